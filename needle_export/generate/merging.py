"""Two JSON schemas that both hold, as one."""

from __future__ import annotations

from typing import Any

#: Keywords that say nothing about values.
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "$defs", "definitions",
})  # fmt: skip

_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The schema of what both admit; the second's annotations win.

    Raises:
        ValueError: that can't be written as one; the text says why.
    """
    found = dict(one)
    for word, value in other.items():
        if word not in found or word in ANNOTATIONS or found[word] == value:
            found[word] = value
        else:
            found[word] = _both(word, found[word], value)
    return found


def _both(word: str, one: Any, other: Any) -> Any:
    try:
        if word in _LARGEST:
            return max(one, other)
        if word in _LEAST:
            return min(one, other)
        if word == "type":
            kinds, others = (value if isinstance(value, list) else [value] for value in (one, other))
            if "number" in others:
                others = [*others, "integer"]
            if "number" in kinds:
                kinds = [*kinds, "integer"]
            both = [kind for kind in kinds if kind in others]
            if not both:
                raise ValueError(f"nothing is both {one} and {other}")
            return both
        if word == "required":
            return list(dict.fromkeys([*one, *other]))
        if word == "enum":
            return [value for value in one if value in other]
        if word == "properties":
            return {**one, **{k: merged(one[k], v) if k in one else v for k, v in other.items()}}
        if word == "items":
            return merged(one, other)
        if word == "additionalProperties" and False in (one, other):
            return False
    except (TypeError, AttributeError):
        raise ValueError(f"{word} isn't right in one of two schemas that both hold") from None
    raise ValueError(f"{word} is given twice by schemas that both hold, which can't be put together")
