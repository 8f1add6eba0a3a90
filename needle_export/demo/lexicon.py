"""The values that the demo's requests are made of, and how people say them."""

from __future__ import annotations

#: Values of ``room`` with what people call them.
ROOMS = {
    "kitchen": ("kitchen",),
    "living_room": ("living room", "lounge"),
    "bedroom": ("bedroom",),
    "bathroom": ("bathroom",),
    "hallway": ("hallway", "hall"),
    "study": ("study", "office"),
}

#: Rooms that no tool knows, by split: a request for one of them calls nothing.
NO_ROOMS = {
    "train": ("attic", "basement", "balcony", "laundry", "dining room", "nursery", "porch", "pantry", "gym",
              "guest room", "workshop", "conservatory", "utility room", "playroom", "library", "sauna"),
    "validation": ("terrace", "closet", "lobby"),
    "heldout": ("cellar", "loft", "sunroom", "shed"),
}

COLORS = {
    "white": ("white",), "red": ("red",), "green": ("green",), "blue": ("blue",), "orange": ("orange",),
    "purple": ("purple", "violet"),
}

DOORS = {
    "front": ("front door",), "back": ("back door",), "garage": ("garage door", "garage"),
    "garden": ("garden door", "garden gate"),
}

GENRES = ("jazz", "blues", "rock", "soul", "techno", "reggae", "classical music", "folk", "hip hop", "ambient music",
          "country music", "opera", "funk", "disco", "swing", "punk", "indie pop", "piano music", "guitar music",
          "salsa", "lullabies", "film scores", "string quartets", "synth pop", "gospel", "drum and bass")

#: Titles and artists are pairs of these words; which pairs belong to which split is decided by a hash of the pair.
FIRST = ("silver", "golden", "broken", "hollow", "velvet", "electric", "northern", "quiet", "crimson", "paper",
         "winter", "summer", "midnight", "distant", "burning", "frozen", "wild", "lonely", "hidden", "falling",
         "neon", "marble", "glass", "copper", "scarlet", "rolling", "shining", "secret", "ancient", "gentle")
SECOND = ("rivers", "oaks", "mirrors", "horses", "sky", "garden", "wolves", "harbour", "machine", "dreams",
          "stones", "sparrows", "lights", "shadows", "roads", "ocean", "mountains", "letters", "ghosts", "fires",
          "birds", "engine", "moon", "thunder", "waves", "streets", "flowers", "bells", "castle", "rain")
NAMES = ("nina", "marcus", "elena", "otis", "freya", "hugo", "amara", "leon", "ingrid", "silas", "carmen", "theo",
         "maya", "felix", "rosa", "jonas", "ella", "victor", "iris", "caleb")
SURNAMES = ("holt", "reyes", "lindgren", "moreau", "okafor", "castle", "brandt", "quinn", "salvador", "wells",
            "ferro", "novak", "hart", "delgado", "winters", "keane", "sato", "bloom", "archer", "vance")

#: What a timer can be for.
LABELS = ("pasta", "laundry", "pizza", "rice", "eggs", "bread", "tea", "workout", "homework", "nap", "oven", "cake",
          "dishwasher", "meeting", "soup", "cookies", "potatoes", "yoga", "coffee", "chicken", "washing machine",
          "piano practice", "roast", "break", "noodles", "stew", "dough", "reading", "shower", "sauce")

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def words(number: int) -> str:
    """A number from 0 to 999 in words: ``45`` is "forty five"."""
    if number >= 100:
        rest = f" and {words(number % 100)}" if number % 100 else ""
        return f"{_ONES[number // 100]} hundred{rest}"
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10] + (f" {_ONES[number % 10]}" if number % 10 else "")
