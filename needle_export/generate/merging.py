"""Two JSON schemas that both hold, as one."""

from __future__ import annotations

from typing import Any

from needle_export.generate.calls import same_value

#: Keywords that say nothing about values.
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "$defs", "definitions",
})  # fmt: skip

_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


#: Keywords that bring other schemas in, which are read before anything is put together.
_BRINGING = frozenset({"$ref", "allOf"})


class _Nothing(Exception):
    """No value is what both admit."""


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The schema of what both admit; the second's annotations win. Where that is nothing, it has an empty ``enum``.

    Raises:
        ValueError: that can't be written as one; the text says why.
    """
    found = dict(one)
    nothing = False
    for word, value in other.items():
        if word not in found or word in ANNOTATIONS or same_value(found[word], value):
            found[word] = value
        elif word not in _KEYS:
            try:
                found[word] = _both(word, found[word], value)
            except _Nothing:
                nothing = True
    found |= _keys(one, other)
    return {**found, "enum": []} if nothing else found


#: Keywords of an object's keys: what one schema says of a key depends on both of them.
_KEYS = ("properties", "additionalProperties")


def _keys(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both keywords of two schemas: a key that one doesn't name is what it admits of further keys."""
    found: dict[str, Any] = {}
    try:
        if any("properties" in schema for schema in (one, other)):
            names = dict.fromkeys([*one.get("properties", {}), *other.get("properties", {})])
            found["properties"] = {name: _schema(_of_key(one, name), _of_key(other, name)) for name in names}
    except (TypeError, AttributeError):
        raise _not_right("properties") from None
    more = [schema["additionalProperties"] for schema in (one, other) if "additionalProperties" in schema]
    if more:
        found["additionalProperties"] = more[0] if len(more) == 1 else _schema(*more)
    return found


def _of_key(schema: dict[str, Any], name: str) -> Any:
    return schema.get("properties", {}).get(name, schema.get("additionalProperties", True))


def _schema(one: Any, other: Any) -> Any:
    """Two schemas that both hold, either of which may be true or false."""
    if one is False or other is False:
        return False
    if one is True or same_value(one, other):
        return other
    if other is True:
        return one
    if not isinstance(one, dict) or not isinstance(other, dict):
        raise ValueError("a schema is an object, true or false")
    return {"allOf": [one, other]} if _BRINGING & (one.keys() | other.keys()) else merged(one, other)


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
                raise _Nothing
            return both
        if word == "const":
            raise _Nothing  # they aren't the same
        if word in ("required", "allOf"):
            return [*one, *(value for value in other if value not in one)]
        if word == "enum":
            return [value for value in one if any(same_value(value, known) for known in other)]
        if word == "items":
            return _schema(one, other)
    except (TypeError, AttributeError):
        raise _not_right(word) from None
    raise ValueError(f"{word} is given twice by schemas that both hold, which can't be put together")


def _not_right(word: str) -> ValueError:
    return ValueError(f"{word} isn't right in one of two schemas that both hold")
