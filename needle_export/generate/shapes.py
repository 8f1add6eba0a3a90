"""What a JSON schema admits, as a tree of a few kinds of values; what can't be enforced becomes a note."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from needle_export.errors import BadInput
from needle_export.generate.calls import same_value
from needle_export.generate.merging import ANNOTATIONS, merged
from needle_export.generate.numbers import Range, is_decimal, step_fits

#: How often a definition may stand within itself.
REF_DEPTH = 2
#: How deep values nest of which a schema says nothing.
ANY_DEPTH = 2


@dataclass(frozen=True, eq=False)
class Text:
    """Strings of so many characters; ``most`` None is any number."""

    least: int = 0
    most: int | None = None


@dataclass(frozen=True, eq=False)
class Number:
    """Numbers in a range."""

    within: Range


@dataclass(frozen=True, eq=False)
class Choice:
    """Some values, those among them that ``rest`` admits too."""

    values: tuple[Any, ...]
    rest: Shape | None = None


@dataclass(frozen=True, eq=False)
class Array:
    """Lists of so many items; ``most`` None is any number."""

    items: Shape
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, eq=False)
class Record:
    """Objects with some keys (name, value, whether it must be there), or with any keys to values of one kind."""

    keys: tuple[tuple[str, Shape, bool], ...]
    others: Shape | None = None
    where: str = ""


@dataclass(frozen=True, eq=False)
class Either:
    """What one of several admits, or exactly one of them; nothing where there are none."""

    shapes: tuple[Shape, ...]
    exactly_one: bool = False


Shape = Text | Number | Choice | Array | Record | Either

_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "minItems", "maxItems", "uniqueItems", "prefixItems", "contains"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties", "dependentRequired"),
}  # fmt: skip
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_ENFORCED = {
    "type", "enum", "const", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "items", "minItems", "maxItems", "properties", "required", "additionalProperties", "nullable",
}  # fmt: skip


class Reader:
    """Reads the schemas of one tool.

    Attributes:
        notes: what isn't enforced or is narrower than written, each once, in order.
    """

    def __init__(self, name: str, root: dict[str, Any]) -> None:
        self._root, self._name = root, name
        self.notes: dict[str, None] = {}

    def arguments(self) -> Shape:
        """What a call's arguments may be, which is always an object; without properties it is empty."""
        root = {key: value for key, value in self._root.items() if key != "nullable"} | {"type": "object"}
        if "properties" not in root and not any(key in root for key in ("$ref", "allOf", "anyOf", "oneOf")):
            root.setdefault("additionalProperties", False)
        return self.shape(root, "parameters", ())

    def shape(self, schema: Any, where: str, refs: tuple[str, ...]) -> Shape:
        """What a schema admits.

        Args:
            where: it stands, for messages.
            refs: definitions that it stands within.

        Raises:
            BadInput: it is no schema.
        """
        if schema is True:
            schema = {}
        if schema is False:
            return Either(())
        if not isinstance(schema, dict):
            raise self.error("a schema is an object, true or false", where)
        if "$ref" in schema:
            name = schema["$ref"]
            if refs.count(name) > REF_DEPTH:
                self.note(where, f"{name} stands within itself, and at most {REF_DEPTH} times is admitted")
                return Either(())
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self.shape(self._merged(rest, self._target(name, where), where), where, (*refs, name))
        for word in ("allOf", "anyOf", "oneOf"):
            if word in schema:
                parts = schema[word]
                if not isinstance(parts, list) or not parts:
                    raise self.error("it is a list of schemas", f"{where}.{word}")
                base = {key: value for key, value in schema.items() if key != word}
                return self._several(word, base, parts, where, refs)
        for word in schema:
            if word not in ANNOTATIONS and word not in _ENFORCED:
                known = any(word in words for words in _KEYWORDS.values())
                self.note(where, f"{word} isn't enforced" if known else f"{word!r} is unknown here and isn't enforced")
        return self._plain(schema, where, refs)

    def note(self, where: str, what: str) -> None:
        """Keep a note."""
        self.notes[f"tool {self._name!r}, {where}: {what}"] = None

    def error(self, what: str, where: str, fix: str = "") -> BadInput:
        """An error about a place in the schema."""
        return BadInput(what, where=f"tool {self._name!r}: {where}", fix=fix)

    def _merged(self, one: dict[str, Any], other: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            return merged(one, other)
        except ValueError as fault:
            raise self.error(str(fault), where, "write one schema for both") from None

    def _target(self, name: Any, where: str) -> dict[str, Any]:
        found: Any = self._root
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise self.error(f"{name!r} isn't a definition in the same schema", f"{where}.$ref", "begin it with #/")
        for part in name.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise self.error(f"there is no definition {name}", f"{where}.$ref")
            found = found[part]
        if found is True:
            return {}
        if not isinstance(found, dict):
            raise self.error(f"{name} isn't a schema", f"{where}.$ref")
        return found

    def _several(
        self, word: str, base: dict[str, Any], parts: list[Any], where: str, refs: tuple[str, ...]
    ) -> Shape:
        schemas = []
        for i, part in enumerate(parts):
            if isinstance(part, dict):
                schemas.append(part)
            elif part is True:
                schemas.append({})
            elif part is not False:
                raise self.error("a schema is an object, true or false", f"{where}.{word}[{i}]")
            elif word == "allOf":
                return Either(())
        if word == "allOf":
            inner = refs
            for i, part in enumerate(schemas):
                chain = refs  # parts stand beside each other, and none of them within another
                while "$ref" in part:
                    name = part["$ref"]
                    if chain.count(name) > REF_DEPTH:
                        self.note(where, f"{name} stands within itself, and at most {REF_DEPTH} times is admitted")
                        return Either(())
                    chain = (*chain, name)
                    rest = {key: value for key, value in part.items() if key != "$ref"}
                    part = self._merged(rest, self._target(name, where), f"{where}.allOf[{i}]")
                base = self._merged(base, part, f"{where}.allOf[{i}]")
                inner += tuple(name for i, name in enumerate(chain) if chain[: i + 1].count(name) > inner.count(name))
            return self.shape(base, where, inner)
        # What stands beside the alternatives holds for each of them.
        each = [{"allOf": [base, part]} if set(base) - ANNOTATIONS else part for part in schemas]
        shapes = tuple(self.shape(part, where, refs) for part in each)
        return Either(shapes, exactly_one=word == "oneOf")

    def _plain(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> Shape:
        rest = {key: value for key, value in schema.items() if key not in ("enum", "const")}
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            if not isinstance(values, list):
                raise self.error("it is a list of values", f"{where}.enum")
            if "const" in schema:
                values = [value for value in values if same_value(value, schema["const"])]
            limits = set(rest) - ANNOTATIONS
            return Choice(tuple(values), self._plain(rest, where, refs) if limits else None)
        types = self._types(schema, where)
        if types is None:
            if not set(schema) & _ENFORCED:
                self.note(where, f"any value is admitted, nested at most {ANY_DEPTH} deep")
                return anything(ANY_DEPTH)
            types = list(_TYPES)
        if schema.get("nullable") is True and "null" not in types:
            types = [*types, "null"]
        shapes = tuple(self._of_type(kind, schema, where, refs) for kind in types)
        return shapes[0] if len(shapes) == 1 else Either(shapes)

    def _types(self, schema: dict[str, Any], where: str) -> list[str] | None:
        """Types that a schema names or its keywords are about; None where it says nothing."""
        if "type" not in schema:
            groups = [kind for kind, words in _KEYWORDS.items() if any(word in schema for word in words)]
            if groups:
                self.note(where, f"it has no type, and is taken for {' or '.join(groups)}")
            return groups or None
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        unknown = next((t for t in types if t not in _TYPES), None)
        if unknown is not None or not types:
            raise self.error(f"{unknown!r} is no type" if types else "it is an empty list", f"{where}.type",
                             f"choose from {', '.join(_TYPES)}")
        return [t for t in dict.fromkeys(types) if not (t == "integer" and "number" in types)]

    def _of_type(self, kind: str, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> Shape:
        if kind == "boolean":
            return Choice((True, False))
        if kind == "null":
            return Choice((None,))
        if kind == "string":
            least, most = self._counts(schema, "minLength", "maxLength", where)
            return Text(least, most)
        if kind == "array":
            least, most = self._counts(schema, "minItems", "maxItems", where)
            return Array(self.shape(schema.get("items", True), f"{where}[]", refs), least, most)
        if kind == "object":
            return self._object(schema, where, refs)
        return Number(self._range(schema, kind == "integer", where))

    def _counts(self, schema: dict[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
        for word in (low, high):
            value = schema.get(word)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if value is not None and not good:
                raise self.error("it is a whole number from 0 on", f"{where}.{word}")
        return schema.get(low) or 0, schema.get(high)

    def _range(self, schema: dict[str, Any], whole: bool, where: str) -> Range:
        given: dict[str, Fraction | None] = {}
        for word in _KEYWORDS["number"]:
            value = schema.get(word)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self.error("it is a number", f"{where}.{word}")
            try:
                given[word] = None if value is None else Fraction(repr(value))
            except ValueError:
                raise self.error("it is a finite number", f"{where}.{word}") from None
        step = given["multipleOf"]
        if step is not None and step <= 0:
            raise self.error("it is a number above 0", f"{where}.multipleOf")
        scaled = step if step is None or not whole else Fraction(step.numerator)
        if scaled is not None and not step_fits(scaled):
            self.note(where, f"multipleOf {schema['multipleOf']} isn't enforced, as it would take too many states")
            step = None
        least, above = given["minimum"], False
        low = given["exclusiveMinimum"]
        if low is not None and (least is None or low >= least):
            least, above = low, True
        most, below = given["maximum"], False
        high = given["exclusiveMaximum"]
        if high is not None and (most is None or high <= most):
            most, below = high, True
        assert all(b is None or is_decimal(b) for b in (least, most))  # since they were written in decimals
        return Range(least, most, above, below, step, whole)

    def _object(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> Record:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise self.error("it is an object of schemas", f"{where}.properties")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise self.error("it is a list of names", f"{where}.required")
        unknown = next((key for key in required if key not in properties), None)
        if unknown is not None:
            raise self.error(f"{unknown!r} isn't among the properties", f"{where}.required")
        more = schema.get("additionalProperties")
        if not properties and more is not False:
            self.note(where, "any keys are admitted, and that none comes twice isn't enforced")
            inner = anything(ANY_DEPTH - 1) if more in (None, True) else self.shape(more, f"{where}.*", refs)
            return Record((), inner, where)
        if properties and more not in (None, False):
            self.note(where, "keys other than its properties are never given")
        keys = tuple(
            (key, self.shape(part, f"{where}.{key}", refs), key in required) for key, part in properties.items()
        )
        return Record(keys, None, where)


def anything(depth: int) -> Shape:
    """Any JSON value, with lists and objects nested at most so deep."""
    plain: tuple[Shape, ...] = (Text(), Number(Range()), Choice((True, False, None)))
    inner = anything(depth - 1) if depth else Either(())
    return Either((*plain, Array(inner), Record((), inner)))
