"""Templates of what calls nothing, and of what stands around a request; see :mod:`needle_export.demo.templates`."""

from __future__ import annotations

#: Requests that call nothing: what no tool does, a value that is missing, refused or not allowed.
NOTHING: dict[str, dict[str, tuple[str, ...]]] = {
    "off_topic": {
        "train": (
            "what does {label} mean in french",
            "(wash|clean|brush) the (dishes|floor|shoes|teeth)",
            "send the {thing} to {name}",
            "buy {name} a (present|book)",
            "how do i (open|repair|fix) the {thing}",
            "(start|play) a (film|game|quiz)",
            "is it (cold|hot|windy) (outside|today|)",
            "stop talking",
            "what album is this",
            "(pause|stop|turn off) the (radio|television)",
            "who is at the {door}",
            "what time is it in {thing}",
            "how is {name}",
            "tell {name} (to come home|hello)",
            "where did i put the {thing}",
            "(fold|iron) the (shirts|towels)",
            "is the {room} (empty|tidy)",
            "what should i (eat|wear|read) today",
            "how many {thing} do i have",
            "count to {number}",
            "what is {number} percent of {number}",
            "what is the (weather|time|date) (today|tomorrow|like|)", "tell me a (joke|story|riddle)",
            "(send|write) (a message|an email) to {name}", "(call|text|ring) {name}", "how (old|tall|far) is {name}",
            "who (wrote|painted|invented|sang) the {thing}", "what is {number} (plus|times|minus) {number}",
            "(order|buy) (a|some) {label}", "book a (table|taxi|flight|hotel|ticket) for {number}",
            "add {label} to the (shopping|) list", "how do i (cook|make|clean) {label}", "read (me|) the (news|paper)",
            "what is on (television|the radio) (tonight|)", "(open|close) the (fridge|window|app|file|box)",
            "(start|stop|run) the (dishwasher|vacuum|washing machine|car|computer)", "where is (my|the) {thing}",
            "translate {thing} into (french|german|spanish)", "how are you (today|)", "thank you (very much|)",
            "(good morning|good night|hello|hi) (there|)", "what can you do", "who are you",
            "remember that my {thing} is {color}", "(take|make) a (photo|note|picture) (of the {thing}|)",
            "is {name} at home", "how much does a {thing} cost", "find (me|) a (recipe|shop|doctor|plumber)",
            "when is (my|the) next (meeting|train|bus|holiday)", "(mute|pause|skip) the (song|video|film)",
            "what is the {room} (temperature|humidity)", "is the {door} (open|locked)", "are the {room} lights on",
            "how long is left on the timer", "(delete|cancel) (my|the) (alarm|timer|meeting)",
            "(water|feed) the (plants|cat|dog|fish)", "show me the (map|camera|calendar)", "spell {thing}",
            "i am (tired|hungry|bored|cold|happy)", "the {thing} is {color}", "{name} likes {music}",
            "do you like {music}", "(lower|raise) the {room} (table|bed|chair)", "paint the {room} {color}",
            "clean the {room}", "is there (milk|bread|tea) left", "charge the (phone|car|robot)",
        ),
        "validation": (
            "what is the capital of {thing}", "play a game with {name}", "(fix|repair) the {thing}",
            "how many {thing} are there", "is it (raining|snowing) outside", "vacuum the {room}",
        ),
        "heldout": (
            "what is the news (today|)", "send {name} a (photo|picture)", "how much is {number} times {number}",
            "tell {name} that i am (tired|hungry)", "buy a {thing} for {name}", "when is (my|the) flight",
            "who is {name}", "(stop|pause) the (music|album)", "is the {room} (clean|warm)",
            "how do i get to the {thing}", "(wash|brush) the (car|dog)", "what does {thing} mean",
        ),
    },
    "missing": {
        "train": (
            "i would like the (lights|lamps) {state}",
            "have the (lights|lamps) {state}",
            "adjust the (heating|blinds|lights)",
            "i want the (heating|thermostat) (up|down)",
            "{lock} that door",
            "i need you to {lock} the door",
            "play something (nice|new|good)",
            "give me a {label} timer",
            "set the {room} heating",
            "change the {room} lights",
            "put the {room} at",
            "i want the {room} blinds",
            "begin timing",
            "make the {room} (nice|warm|bright)",
            "(turn|switch) {state} the (lights|light|lamps)", "(turn|switch) the (lights|light) {state}",
            "(dim|change) the (lights|light)", "lights {state}", "set the (heating|thermostat|temperature)",
            "(turn|put) the heating (up|down)", "make it (warmer|colder)", "{move} the (blinds|shades)",
            "(blinds|shades) {moved}", "set a timer", "start (a|the) timer", "i need a timer", "{lock} the door",
            "(make sure the|the) door is {locked}", "play (something|it)", "play music in there", "{lock} it",
            "turn it {state}", "dim the lights to {brightness}", "make the lights {color}",
            "set a timer for the {label}", "i want a {label} timer", "do something in the {room}", "the {room}",
            "{color}", "{brightness}", "set the {room} lights", "{room} lights",
        ),
        "validation": ("i want the lights {state}", "the blinds should be {moved}", "time the {label}"),
        "heldout": (
            "i need the (lights|lamps) {state}", "i want the (blinds|shades) {moved}", "give me a timer",
            "set the heating in the {room}", "i want the door {locked}", "change the lights to {color}",
            "set the {room} blinds",
        ),
    },
    "unknown_place": {
        "train": (
            "i want the {no_room} (lights|light) {state}",
            "i would like the {no_room} (blinds|lights) {moved}",
            "have the {no_room} blinds {moved}",
            "(lights|lamps) in the {no_room} to {brightness}",
            "i would like you to {lock} the {no_room} door",
            "in the {no_room} (turn|switch) {state} the lights",
            "get the lights in the {no_room} {state}",
            "(turn|switch) {state} the {no_room} (lights|light)", "(turn|switch) the {no_room} (lights|light) {state}",
            "(turn|switch) the lights in the {no_room} {state}", "dim the {no_room} (lights|light) to {brightness}",
            "set the {no_room} lights to {color}", "{no_room} lights {state}", "{move} the {no_room} (blinds|shades)",
            "{move} the blinds in the {no_room}", "{lock} the {no_room} door", "the {no_room} door should be {locked}",
            "make the {no_room} lights {color}", "set the {no_room} lights to {brightness}",
            "{no_room} blinds {moved}", "make sure the {no_room} door is {locked}",
        ),
        "validation": ("let the {no_room} lights be {state}", "in the {no_room} {move} the blinds"),
        "heldout": (
            "have the {no_room} lights (turned|switched) {state}", "i want the {no_room} blinds {moved}",
            "lights in the {no_room} {state}", "i would like the {no_room} door {locked}",
        ),
    },
    "beyond": {
        "train": (
            "i want the {room} at {too_warm}",
            "have the house at {too_warm}",
            "i would like the {room} lights at {too_bright}",
            "change the brightness of the {room} to {too_bright}",
            "time the {label} for {too_long}",
            "(bring|turn) the heating up to {too_warm}",
            "have a timer run for {too_long}",
            "set the (heating|thermostat|temperature) to {too_warm}", "make it {too_warm} (in here|)",
            "(heat|warm) the {room} to {too_warm}", "i want it at {too_warm}", "set the {room} to {too_warm}",
            "dim the {room} lights to {too_bright}", "set the {room} (lights|light) to {too_bright}",
            "turn on the {room} lights at {too_bright}", "(set|start) a timer for {too_long}",
            "timer (for|of|) {too_long}", "i need a timer for {too_long}", "(set|start) a {label} timer for {too_long}",
            "{room} lights at {too_bright}", "keep the house at {too_warm}", "remind me in {too_long}",
        ),
        "validation": ("adjust the heating to {too_warm}", "give me a timer of {too_long}"),
        "heldout": (
            "i would like the house at {too_warm}", "set the brightness of the {room} to {too_bright}",
            "i would like a timer for {too_long}", "have the {room} lights at {too_bright}",
        ),
    },
}

#: What makes a request its opposite: none is to be acted on.
NEGATIONS = {
    "train": ("don't {core}", "do not {core}", "never {core}", "please don't {core}", "you must not {core}",
              "i don't want you to {core}", "there is no need to {core}", "no , don't {core}"),
    "validation": ("you need not {core}",),
    "heldout": ("please do not {core}", "you don't need to {core}", "i do not want you to {core}"),
}

#: Intents whose first template words are an order, so that a negation can stand in front.
ORDERS = ("(turn|switch) {state} the {room} (lights|light|lamps)", "dim the {room} (lights|light) to {brightness}",
          "{move} the {room} (blinds|shades)", "play (some|) {music}", "{lock} the {door}",
          "(set|start) a timer for {minutes}", "set the (heating|thermostat|temperature) to {degrees}",
          "set the {room} (lights|light) to {color}")

#: Two requests in one.
JOINERS = {
    "train": ("{first} and {second}", "{first} , then {second}", "{first} and then {second}", "{first} , {second}",
              "{first} . {second}", "{first} and also {second}", "first {first} , then {second}"),
    "validation": ("{first} , and after that {second}",),
    "heldout": ("{first} , and {second}", "{first} and please {second}", "first {first} and then {second}"),
}

#: What stands before and behind a request.
BEFORE = {
    "train": ("", "", "", "please ", "hey , ", "ok , ", "hi , ", "well , ", "now ", "hello , ", "so , "),
    "validation": ("", "right , "),
    "heldout": ("", "", "hey , please ", "ok , now "),
}
BEHIND = {
    "train": ("", "", "", "", " please", " now", " , thanks", " , thank you", " right now", " for me", " , would you"),
    "validation": ("", " , please"),
    "heldout": ("", "", " , will you", " right now please"),
}
