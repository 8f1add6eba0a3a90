"""Calls out of an answer's text, and whether two answers call the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from needle_export.generate.prompt import CALLS_END, CALLS_START, IM_END, THINK_END, THINK_START


@dataclass(frozen=True)
class Call:
    """One call: the tool's name and its arguments as JSON values."""

    name: str
    arguments: dict[str, Any]


class _Twice(ValueError):
    """A key that an object has twice."""


def parse_calls(text: str) -> tuple[Call, ...] | None:
    """The calls in an answer ``[<think>..</think>\\n]<tool_call>[..]</tool_call>[<|im_end|>]``; () calls nothing.

    None where the text isn't of that form. Spaces around its parts don't matter, keys that come twice do.
    """
    text = text.strip()
    if text.startswith(THINK_START):
        _, closed, text = text.partition(THINK_END)
        if not closed:
            return None
        text = text.strip()
    if not text.startswith(CALLS_START):
        return None
    text = text.removeprefix(CALLS_START).lstrip()
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if text[end:].strip().removesuffix(IM_END).strip() != CALLS_END or not isinstance(value, list):
        return None
    calls = [_call(entry) for entry in value]
    return None if None in calls else tuple(call for call in calls if call is not None)


def same_calls(one: Sequence[Call] | None, other: Sequence[Call] | None) -> bool:
    """Whether two answers make the same calls in the same order, arguments equal as JSON values; None equals nothing.

    The order of an object's keys doesn't matter, and 1 is the number 1.0; true is no number.
    """
    if one is None or other is None or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(a.name == b.name and same_value(a.arguments, b.arguments) for a, b in pairs)


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: the order of keys doesn't matter, and true is no number."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same_value(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _call(entry: Any) -> Call | None:
    if not isinstance(entry, dict) or set(entry) != {"name", "arguments"}:
        return None
    name, arguments = entry["name"], entry["arguments"]
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice("a key comes twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("no JSON number")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_constant)
