"""Random JSON schemas, values near what they ask for, and a judge of these that shares no code with the grammar."""

from __future__ import annotations

import json
from decimal import Decimal
from random import Random
from typing import Any

Schema = dict[str, Any]


def random_schema(rng: Random, depth: int = 2) -> Schema:
    """A schema of the kinds that the grammar enforces whole, nested ``depth`` deep at most."""
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum", "const", "any", "types",
                       *(["array", "object"] if depth else [])])
    if kind == "string":
        return {"type": kind} | _some(rng, minLength=rng.randint(0, 2), maxLength=rng.randint(2, 4))
    if kind in ("integer", "number"):
        low, high = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        return {"type": kind} | _some(rng, **{low: _bound(rng), high: _bound(rng)},
                                      multipleOf=rng.choice([1, 2, 3, 7, 0.5, 0.25, 2.5]))
    if kind == "enum":
        return {"enum": rng.sample([1, 12, "a", "ab", True, None, -3, 2.5, "é"], rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice([1, "x", False])}
    if kind == "any":
        parts = [random_schema(rng, max(0, depth - 1)) for _ in range(rng.randint(1, 3))]
        return {rng.choice(["anyOf", "oneOf"]): parts}
    if kind == "types":
        return {"type": rng.sample(["string", "integer", "boolean", "null"], 2)}
    if kind == "array":
        return {"type": kind, "items": random_schema(rng, depth - 1)} | _some(
            rng, minItems=rng.randint(0, 2), maxItems=rng.randint(1, 3))
    if kind == "object":
        keys = rng.sample(["a", "ab", "b", "x y"], rng.randint(1, 3))
        return {"type": kind, "properties": {key: random_schema(rng, depth - 1) for key in keys},
                "required": [key for key in keys if rng.random() < 0.5]}
    return {"type": kind}


def random_all_of(rng: Random) -> Schema:
    """A schema whose parts all hold; those of objects name the same keys, open or closed, and ask different things."""
    parts = [_part(rng, kind) for kind in [rng.choice(["string", "integer", "number", "array", "object", "object"])]
             for _ in range(rng.randint(2, 3))]
    beside = parts.pop() if rng.random() < 0.4 else {}
    return {"allOf": parts, **beside}


def _part(rng: Random, kind: str) -> Schema:
    if kind == "object":
        keys = rng.sample(["a", "ab", "b"], rng.randint(1, 3))
        kinds = {"a": "integer", "ab": "string", "b": "enum"}
        return {"type": kind, "properties": {key: rng.choice([True, _part(rng, kinds[key])]) for key in keys},
                "required": [key for key in keys if rng.random() < 0.4]} | _some(
                    rng, additionalProperties=rng.choice([False, False, {"type": "integer"}]))
    if kind == "array":
        items = rng.choice([True, _part(rng, "integer")])
        return {"type": kind, "items": items} | _some(rng, minItems=rng.randint(0, 2), maxItems=rng.randint(1, 3))
    if kind == "enum":
        return {"enum": rng.sample([1, True, "a", 2.5], rng.randint(2, 4))}
    if kind == "string":
        return {"type": kind} | _some(rng, minLength=rng.randint(0, 3), maxLength=rng.randint(1, 4))
    low, high = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": rng.choice([kind, "number"])} | _some(rng, **{low: rng.randint(-9, 3), high: rng.randint(0, 12)})


def parts_of(schema: Schema) -> list[Schema]:
    """Those of :func:`random_all_of`, what stands beside them included."""
    beside = {key: value for key, value in schema.items() if key != "allOf"}
    return [*schema["allOf"], *([beside] if beside else [])]


def near_all_of(rng: Random, schema: Schema) -> Any:
    """A value that such a schema may admit."""
    part = rng.choice(parts_of(schema))
    if part["type"] == "array":
        return [rng.randint(-9, 12) for _ in range(rng.randint(0, 4))]
    if part["type"] != "object":
        return near(rng, part)
    values = {"a": rng.randint(-9, 12), "ab": "x" * rng.randint(0, 4), "b": rng.choice([1, True, "a", Decimal("2.5")])}
    named = {key for one in parts_of(schema) for key in one["properties"]}
    keys = [key for key in rng.sample(list(values), len(values)) if rng.random() < 0.9 * (key in named) + 0.05]
    return {key: values[key] for key in keys}


def all_hold(schema: Schema, value: Any) -> bool:
    """Whether every part admits a value. Beyond JSON Schema, no keys are given that none of the parts names."""
    parts = parts_of(schema)
    if isinstance(value, dict) and not set(value) <= {key for part in parts for key in part.get("properties", {})}:
        return False
    return all(_holds(part, value) for part in parts)


def _holds(part: Schema | bool, value: Any) -> bool:
    if isinstance(part, bool):
        return part
    if part.get("type") == "array":
        return (isinstance(value, list) and part.get("minItems", 0) <= len(value) <= part.get("maxItems", 99)
                and all(_holds(part["items"], one) for one in value))
    if part.get("type") == "object":
        more = part.get("additionalProperties", True)
        return isinstance(value, dict) and set(part["required"]) <= set(value) and all(
            _holds(part["properties"].get(key, more), one) for key, one in value.items())
    return valid(part, value)


def _some(rng: Random, **rules: Any) -> Schema:
    return {key: value for key, value in rules.items() if rng.random() < 0.5}


def _bound(rng: Random) -> float:
    return rng.randint(-120, 120) if rng.random() < 0.6 else rng.randint(-1200, 1200) / rng.choice([10, 100])


def near(rng: Random, schema: Schema) -> Any:
    """A value that a schema may admit; numbers with a point are Decimals."""
    if rng.random() < 0.06:
        return rng.choice([1, "a", None, True, Decimal("2.5"), [], {}])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return near(rng, rng.choice(schema[word]))
    if "enum" in schema or "const" in schema:
        value = rng.choice(schema["enum"]) if "enum" in schema else schema["const"]
        return Decimal(repr(value)) if isinstance(value, float) else value
    kind = schema["type"]
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "string":
        return "".join(rng.choice('aé𝄞"\\\n/\x01') for _ in range(rng.randint(0, 5)))
    if kind in ("integer", "number"):
        bounds = [v for k, v in schema.items() if k.lower().endswith("mum")]
        value = Decimal(repr(rng.choice(bounds))) if bounds and rng.random() < 0.7 else Decimal(rng.randint(-130, 130))
        value += rng.choice([0, 0, 1, -1, Decimal("0.01"), Decimal("-0.01"), Decimal("0.5"), Decimal("-0.25")])
        return int(value) if value == int(value) and rng.random() < 0.9 else value or 0
    if kind == "array":
        return [near(rng, schema["items"]) for _ in range(rng.randint(0, 4))]
    if kind == "object":
        keys = [key for key in schema["properties"] if rng.random() < 0.8]
        rng.shuffle(keys)
        return {key: near(rng, schema["properties"][key]) for key in keys}
    return rng.random() < 0.5 if kind == "boolean" else None


def written(value: Any) -> str:
    """Compact JSON of a value, Decimals as they are."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def valid(schema: Schema, value: Any) -> bool:
    """Whether a value, read with ``parse_float=Decimal``, is one that the schema admits."""
    if "anyOf" in schema:
        return any(valid(part, value) for part in schema["anyOf"])
    if "oneOf" in schema:
        return sum(valid(part, value) for part in schema["oneOf"]) == 1
    if "enum" in schema or "const" in schema:
        return any(_equal(value, one) for one in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if isinstance(kind, list):
        return any(valid({**schema, "type": one}, value) for one in kind)
    if kind == "string":
        return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
    if kind in ("integer", "number"):
        return _number(value) and (kind == "number" or isinstance(value, int)) and _within(schema, Decimal(value))
    if kind == "array":
        return (isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
                and all(valid(schema["items"], one) for one in value))
    if kind == "object":
        return (isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(valid(schema["properties"][key], one) for key, one in value.items()))
    return isinstance(value, bool) if kind == "boolean" else value is None


def _number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _equal(value: Any, other: Any) -> bool:
    other = Decimal(repr(other)) if isinstance(other, float) else other
    return bool(value == other) if _number(value) and _number(other) else type(value) is type(other) and value == other


def _within(rules: Schema, value: Decimal) -> bool:
    at = {key: Decimal(repr(rule)) for key, rule in rules.items() if key != "type"}
    return not (value < at.get("minimum", value) or value > at.get("maximum", value)
                or ("exclusiveMinimum" in at and value <= at["exclusiveMinimum"])
                or ("exclusiveMaximum" in at and value >= at["exclusiveMaximum"])
                or ("multipleOf" in at and value % at["multipleOf"] != 0))
