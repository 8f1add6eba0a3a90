"""Requests with their right answers, drawn at random from the templates of one split.

A request is a value of :class:`Example`; the same seed gives the same requests. What a value in braces stands for is
drawn here: the words go into the sentence, the value into the call.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from needle_export.demo import lexicon as lex
from needle_export.demo import templates as tpl

Call = dict[str, Any]

#: How often a request asks for one thing, for two, or for nothing.
SHARES = {"one": 0.62, "two": 0.12, "nothing": 0.26}

_NOTHING = {"off_topic": 0.4, "missing": 0.2, "unknown_place": 0.15, "beyond": 0.15, "negated": 0.1}

#: Slots that are another way to say the value of one.
_NAMES = {"warmth": "degrees", "move": "position", "moved": "position", "lock": "bolt", "locked": "bolt"}

_DEGREES = (" degrees", " degrees", "", " degrees celsius", "°")
_PERCENT = (" percent", " percent", "%", " per cent")
_SPAN = {15: "a quarter of an hour", 30: "half an hour", 45: "three quarters of an hour", 60: "an hour",
         90: "an hour and a half", 120: "two hours", 180: "three hours"}
_MOVES = {"open": ("open", "raise", "pull up"), "closed": ("close", "shut", "lower"),
          "half": ("half open", "half close")}
_MOVED = {"open": ("open", "up", "fully open"), "closed": ("closed", "down", "shut"),
          "half": ("half open", "half closed", "half way")}
_THINGS = ("lamp", "book", "river", "mountain", "song", "ladder", "bridge", "telescope", "piano", "camera", "carpet",
           "umbrella", "engine", "castle", "ticket", "jacket", "bicycle", "statue", "keys", "wallet", "station",
           "museum")


@dataclass(frozen=True)
class Example:
    """One request: what is said, and the calls that answer it, in order."""

    query: str
    answers: tuple[Call, ...]

    @property
    def tools(self) -> frozenset[str]:
        """Names of the tools that the answer calls."""
        return frozenset(call["name"] for call in self.answers)


def draw(rng: Random, split: str) -> Example:
    """One request of a split."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if kind == "nothing":
        return Example(_dressed(_nothing(rng, split), rng, split), ())
    first, calls = _one(rng, split)
    if kind == "two":
        second, more = _one(rng, split)
        first = tpl.tidy(rng.choice(tpl.JOINERS[split]).format(first=first, second=second))
        calls = (*calls, *more)
    return Example(_dressed(first, rng, split), calls)


def _dressed(text: str, rng: Random, split: str) -> str:
    text = tpl.tidy(rng.choice(tpl.BEFORE[split]) + text + rng.choice(tpl.BEHIND[split]))
    if rng.random() < 0.4:
        text = text[0].upper() + text[1:]
    return text + rng.choice(("", "", "", ".", "!" if rng.random() < 0.3 else "."))


def _one(rng: Random, split: str) -> tuple[str, tuple[Call, ...]]:
    intent = rng.choice(tuple(tpl.CORES))
    text, values = _filled(tpl.spell(rng.choice(tpl.CORES[intent][split]), rng), rng, split)
    return text, (_ANSWERS[intent](values),)


def _nothing(rng: Random, split: str) -> str:
    kind = rng.choices(list(_NOTHING), list(_NOTHING.values()))[0]
    if kind == "negated":
        core, _ = _filled(tpl.spell(rng.choice(tpl.ORDERS), rng), rng, split)
        return tpl.tidy(rng.choice(tpl.NEGATIONS[split]).format(core=core))
    return _filled(tpl.spell(rng.choice(tpl.NOTHING[kind][split]), rng), rng, split)[0]


def _filled(text: str, rng: Random, split: str) -> tuple[str, dict[str, Any]]:
    """The sentence with its values said, and the values."""
    values: dict[str, Any] = {}
    while "{" in text:
        start, end = text.index("{"), text.index("}")
        slot = text[start + 1 : end]
        said, values[_NAMES.get(slot, slot)] = _SLOTS[slot](rng, split)
        text = text[:start] + said + text[end + 1 :]
    return tpl.tidy(text), values


def _of(table: Mapping[str, tuple[str, ...]]) -> Callable[[Random, str], tuple[str, Any]]:
    def drawn(rng: Random, split: str) -> tuple[str, Any]:
        value = rng.choice(tuple(table))
        return rng.choice(table[value]), value

    return drawn


def _number(rng: Random, value: int) -> str:
    return str(value) if rng.random() < 0.65 else lex.words(value)


def _brightness(rng: Random, split: str) -> tuple[str, Any]:
    if rng.random() < 0.1:
        return rng.choice((("half", 50), ("full", 100), ("maximum", 100)))
    value = rng.randrange(5, 101, 5) if rng.random() < 0.5 else rng.randint(1, 100)
    return _number(rng, value) + rng.choice(_PERCENT), value


def _degrees(rng: Random, split: str) -> tuple[str, Any]:
    value = rng.randint(5, 30)
    said = _number(rng, value)
    return said + rng.choice(_DEGREES), value


def _warmth(rng: Random, split: str) -> tuple[str, Any]:
    value = rng.randint(5, 30)
    return _number(rng, value) + rng.choice((" degrees", " degrees", " degrees celsius", "°")), value


def _minutes(rng: Random, split: str) -> tuple[str, Any]:
    if rng.random() < 0.2:
        value, said = rng.choice(tuple(_SPAN.items()))
        return said, value
    value = rng.choice((rng.randint(1, 30), rng.randint(1, 180), rng.randrange(5, 121, 5)))
    return _number(rng, value) + (" minute" if value == 1 else " minutes" if rng.random() < 0.85 else " min"), value


def _too_warm(rng: Random, split: str) -> tuple[str, Any]:
    value = rng.choice((rng.randint(31, 60), rng.randint(61, 400), rng.randint(0, 4)))
    return _number(rng, value) + rng.choice(_DEGREES), value


def _too_bright(rng: Random, split: str) -> tuple[str, Any]:
    value = rng.choice((rng.randint(101, 150), rng.randint(151, 990), 0))
    return _number(rng, value) + rng.choice(_PERCENT), value


def _too_long(rng: Random, split: str) -> tuple[str, Any]:
    if rng.random() < 0.4:
        return rng.choice(("four hours", "five hours", "six hours", "ten hours", "a day", "two days", "a week")), None
    value = rng.randint(181, 990)
    return _number(rng, value) + " minutes", value


def _music(rng: Random, split: str) -> tuple[str, Any]:
    kind = rng.random()
    if kind < 0.3:
        text = rng.choice(lex.GENRES)
    elif kind < 0.55:
        text = _pair(rng, split, lex.FIRST, lex.SECOND)
    elif kind < 0.8:
        text = _pair(rng, split, lex.NAMES, lex.SURNAMES)
    else:
        text = f"{_pair(rng, split, lex.FIRST, lex.SECOND)} by {_pair(rng, split, lex.NAMES, lex.SURNAMES)}"
    return text, text


def _pair(rng: Random, split: str, first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """Two words that no other split puts together."""
    while True:
        pair = f"{rng.choice(first)} {rng.choice(second)}"
        tenth = zlib.crc32(pair.encode()) % 10
        if tpl.SPLITS[0 if tenth < 8 else tenth - 7] == split:
            return pair


def _plain(words: tuple[str, ...]) -> Callable[[Random, str], tuple[str, Any]]:
    return lambda rng, split: (lambda word: (word, word))(rng.choice(words))


_SLOTS: dict[str, Callable[[Random, str], tuple[str, Any]]] = {
    "room": _of(lex.ROOMS),
    "color": _of(lex.COLORS),
    "door": _of(lex.DOORS),
    "state": _of({"on": ("on",), "off": ("off",)}),
    "move": _of(_MOVES),
    "moved": _of(_MOVED),
    "lock": _of({"locked": ("lock",), "unlocked": ("unlock",)}),
    "locked": _of({"locked": ("locked",), "unlocked": ("unlocked",)}),
    "brightness": _brightness,
    "degrees": _degrees,
    "warmth": _warmth,
    "minutes": _minutes,
    "label": _plain(lex.LABELS),
    "music": _music,
    "name": _plain(lex.NAMES),
    "thing": _plain(_THINGS),
    "number": lambda rng, split: (_number(rng, rng.randint(2, 99)), None),
    "no_room": lambda rng, split: (rng.choice(lex.NO_ROOMS[split]), None),
    "too_warm": _too_warm,
    "too_bright": _too_bright,
    "too_long": _too_long,
}


def _call(name: str, **arguments: Any) -> Call:
    return {"name": name, "arguments": arguments}


def _locked(v: dict[str, Any]) -> Call:
    return _call("lock_door", door=v["door"], locked=v["bolt"] == "locked")


_ANSWERS: dict[str, Callable[[dict[str, Any]], Call]] = {
    "lights": lambda v: _call("set_lights", room=v["room"], state=v["state"]),
    "dim": lambda v: _call("set_lights", room=v["room"], state="on", brightness=v["brightness"]),
    "color": lambda v: _call("set_lights", room=v["room"], state="on", color=v["color"]),
    "temperature": lambda v: _call("set_temperature", degrees=v["degrees"]),
    "room_temperature": lambda v: _call("set_temperature", degrees=v["degrees"], room=v["room"]),
    "blinds": lambda v: _call("move_blinds", room=v["room"], position=v["position"]),
    "music": lambda v: _call("play_music", query=v["music"]),
    "room_music": lambda v: _call("play_music", query=v["music"], room=v["room"]),
    "timer": lambda v: _call("start_timer", minutes=v["minutes"]),
    "labelled_timer": lambda v: _call("start_timer", minutes=v["minutes"], label=v["label"]),
    "door": _locked,
}
