"""Schemas that bring others in, leave values open, or ask for more states than there may be."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from needle_export.companions import load_tools
from needle_export.errors import BadInput
from needle_export.generate import build_states, shapes
from needle_export.generate.automaton import Automaton
from needle_export.generate.grammar import compile_grammar
from needle_export.generate.schemas import read_tools
from tests.support.schemas import all_hold, near_all_of, random_all_of, random_schema, written
from tests.unit.generate.test_grammar import admits, call, grammar_of

SCHEMAS, INSTANCES = 300, 25


def of_arguments(parameters: dict[str, Any]) -> Automaton:
    return compile_grammar(read_tools({"name": "f", "parameters": parameters}))


def takes(grammar: Automaton, arguments: str) -> bool:
    return grammar.accepts(f'[{{"name":"f","arguments":{arguments}}}]'.encode())


# Several schemas that hold at once.


def test_schemas_that_all_hold_admit_what_an_independent_judge_does() -> None:
    rng = Random(1)
    judged = right = 0
    for _ in range(SCHEMAS):
        schema = random_all_of(rng)
        values = [written(near_all_of(rng, schema)) for _ in range(INSTANCES)]
        wanted = [all_hold(schema, json.loads(value, parse_float=Decimal)) for value in values]
        try:
            grammar = grammar_of(schema)
        except BadInput as error:
            assert "no arguments are valid" in str(error)
            assert not any(wanted), schema
            continue
        assert [admits(grammar, value) for value in values] == wanted, (schema, values)
        judged, right = judged + len(wanted), right + sum(wanted)
    assert judged > 0.5 * SCHEMAS * INSTANCES
    assert 0.2 < right / judged < 0.95


@pytest.mark.parametrize(("parts", "admitted", "refused"), [
    # True is no number, in enums and constants as elsewhere.
    ([{"enum": [1, "a", None]}, {"enum": [True, "a", None]}], ["\"a\"", "null"], ["1", "true"]),
    ([{"enum": [True, 2]}, {"const": 2.0}], ["2"], ["true"]),
    ([{"type": ["string", "integer"]}, {"type": ["number", "null"]}], ["7"], ["null", "\"a\"", "7.5"]),
    ([{"type": "integer", "minimum": 1}, {"anyOf": [{"maximum": 2}, {"const": 9}]}], ["1", "2", "9"], ["0", "3"]),
    ([{"allOf": [{"minimum": 1}]}, {"allOf": [{"maximum": 2}]}, {"type": "integer"}], ["1", "2"], ["0", "3"]),
    ([{"type": "array", "items": True}, {"items": {"const": 1}}], ["[1,1]", "[]"], ["[2]"]),
    ([{"type": "array", "items": False}, {"items": {"const": 1}}], ["[]"], ["[1]"]),
    ([True, {"type": "null"}], ["null"], ["1"]),
])
def test_parts_that_hold_at_once(parts: list[Any], admitted: list[str], refused: list[str]) -> None:
    grammar = grammar_of({"allOf": parts})
    assert [v for v in admitted + refused if admits(grammar, v)] == admitted


@pytest.mark.parametrize("parts", [
    [{"type": "string"}, {"type": "integer"}], [{"const": 1}, {"const": True}], [{"enum": [1]}, {"enum": [2]}],
    [{"const": 3}, {"enum": [1, 2]}], [{"type": "null"}, False],
])
def test_parts_that_exclude_each_other_admit_nothing(parts: list[Any]) -> None:
    with pytest.raises(BadInput, match="no arguments are valid"):
        grammar_of({"allOf": parts})
    # As one of several alternatives they are merely none.
    grammar = grammar_of({"anyOf": [{"allOf": parts}, {"type": "boolean"}]})
    assert admits(grammar, "false") and not admits(grammar, "1")


@pytest.mark.parametrize(("parts", "said"), [
    ([{"type": "number", "multipleOf": 2}, {"multipleOf": 3}], "multipleOf is given twice"),
    ([{"properties": 3}, {"properties": {}}], "properties isn't right"),
    ([{"required": 3}, {"required": ["a"]}], "required isn't right"),
    ([{"minimum": "a"}, {"minimum": 1}], "minimum isn't right"),
    ([{"items": 3}, {"items": {"type": "null"}}], "a schema is an object"),
    ([3], "a schema is an object"), ({}, "list of schemas"),
])
def test_parts_that_cannot_be_put_together_are_named(parts: Any, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        grammar_of({"allOf": parts})
    assert said in str(refused.value) and "tool 'f': parameters.v" in str(refused.value)


def test_a_closed_part_takes_no_keys_of_another() -> None:
    null = {"type": "null"}
    closed = {"type": "object", "properties": {"a": null}, "additionalProperties": False}
    grammar = of_arguments({"allOf": [closed, {"properties": {"b": null}}]})
    assert takes(grammar, '{"a":null}') and not takes(grammar, '{"a":null,"b":null}')
    assert any("never given" in note for note in grammar.notes)
    with pytest.raises(BadInput, match="no arguments are valid"):
        of_arguments({"allOf": [closed, {"properties": {"b": null}, "required": ["b"]}]})


def test_arguments_may_be_one_of_several_objects() -> None:
    grammar = of_arguments({"properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                            "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert takes(grammar, '{"a":null}') and takes(grammar, '{"b":null,"a":null}')
    assert not takes(grammar, "{}") and not takes(grammar, "null")
    grammar = of_arguments({"oneOf": [{"properties": {"a": {"const": 1}}}, {"type": "null"}], "nullable": True})
    assert takes(grammar, '{"a":1}') and not takes(grammar, "null")


# Values that schemas leave open.


def depth(value: Any) -> int:
    """How deep lists and objects that hold something are nested."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inside)) if inside else 0


def some_value(rng: Random, deep: int) -> Any:
    kind = rng.randrange(8) if deep else rng.randrange(6)
    if kind == 6:
        return [some_value(rng, deep - 1) for _ in range(rng.randint(0, 3))]
    if kind == 7:
        keys = rng.sample(["a", "", "é\"", "name"], rng.randint(0, 3))
        return {key: some_value(rng, deep - 1) for key in keys}
    return [rng.randint(-99, 99), Decimal("-0.5"), "x\n", True, None, "\\"][kind]


@pytest.mark.parametrize("schema", [{}, True, {"description": "anything"}])
def test_a_value_without_a_type_is_any_that_is_not_nested_too_deep(schema: Any) -> None:
    grammar, rng = grammar_of(schema), Random(2)
    assert any("any value" in note for note in grammar.notes)
    seen = set()
    for _ in range(3000):
        value = some_value(rng, 4)
        seen.add(depth(value))
        assert admits(grammar, written(value)) == (depth(value) <= shapes.ANY_DEPTH), value
    assert seen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "additionalProperties": True}])
def test_a_free_object_takes_any_keys(schema: dict[str, Any]) -> None:
    grammar, rng = grammar_of(schema), Random(3)
    assert any("any keys are admitted" in note for note in grammar.notes)
    for _ in range(2000):
        value = some_value(rng, 4)
        wanted = isinstance(value, dict) and depth(value) <= shapes.ANY_DEPTH
        assert admits(grammar, written(value)) == wanted, value
    for text in ("{,}", '{"a"}', '{"a":1,}', '{a:1}', '{"a":1'):
        assert not admits(grammar, text)
    assert admits(grammar, '{"a":1,"a":1}')  # which the note says


def test_what_would_be_nested_too_deep_cannot_be_begun() -> None:
    grammar = grammar_of({})
    inside = grammar.step(0, f"[{call('')}".removesuffix("}}").encode() + b'{"a":[{')
    assert inside is not None
    assert [byte for byte in range(256) if grammar.step(inside, bytes([byte])) is not None] == [ord("}")]


def test_keys_of_a_map_have_values_of_its_kind() -> None:
    grammar = grammar_of({"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}})
    assert admits(grammar, '{"x":1,"y":20}') and admits(grammar, "{}")
    assert not admits(grammar, '{"x":-1}') and not admits(grammar, '{"x":"1"}')


def test_a_tool_without_properties_takes_no_arguments_unless_it_says_so() -> None:
    for parameters in ({}, {"type": "object"}, {"properties": {}, "additionalProperties": False}):
        grammar = of_arguments(parameters)
        assert takes(grammar, "{}") and not takes(grammar, '{"a":1}')
    grammar = of_arguments({"type": "object", "additionalProperties": True})
    assert takes(grammar, "{}") and takes(grammar, '{"a":[1]}')


# Limits.


def object_of(count: int, required: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": {"type": "null"} for n in range(count)},
            "required": [f"k{n}" for n in required]}


def given(keys: tuple[int, ...]) -> str:
    return "{" + ",".join(f'"k{n}":null' for n in keys) + "}"


def test_many_keys_keep_the_schemas_order_and_a_note_says_so() -> None:
    count, required = 10, (1, 4)
    grammar = of_arguments(object_of(count, required))
    (note,) = grammar.notes
    assert note == "tool 'f', parameters: its keys are admitted in the order of the schema only"
    rng = Random(4)
    for size in range(count + 1):
        for keys in itertools.combinations(range(count), size):
            assert takes(grammar, given(keys)) == set(required).issubset(keys)
            other = tuple(rng.sample(keys, size))
            assert takes(grammar, given(other)) == (set(required).issubset(keys) and other == keys)
    assert not takes(grammar, given((1, 4, 4)))


def test_the_estimate_decides_whether_keys_keep_their_order() -> None:
    def free(count: int) -> bool:
        return takes(of_arguments(object_of(count)), given((1, 0)))

    # A key of null takes 5 bytes with its colon and 5 states for the value, in half of the subsets of keys.
    fits = [count for count in range(2, 12) if (5 + 5) * count << (count - 1) <= build_states.ANY_ORDER_STATES]
    assert [count for count in range(2, 12) if free(count)] == fits == list(range(2, 8))


def long_text(name: str, most: int) -> dict[str, Any]:
    """A tool of which each character of an argument takes states of its own, which no other tool shares."""
    properties = {"text": {"type": "string", "maxLength": most}, "of": {"const": name}}
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": ["text", "of"]}}


def test_what_would_take_too_many_states_is_refused_by_its_place() -> None:
    tools = [long_text("one", 3000), long_text("two", 3000), long_text("long", 20_000)]
    assert 50_000 < len(compile_grammar(read_tools(tools[:1])).edges) < 100_000
    with pytest.raises(BadInput, match=r"^tools: the grammar would have more than 100,000 states; choose smaller"):
        compile_grammar(read_tools(tools[:2]))
    with pytest.raises(BadInput, match=r"^tool 'long': the grammar would have more than 100,000 states; choose"):
        compile_grammar(read_tools(tools[2:]))


# References.

TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}


def nested(times: int) -> str:
    return '{"v":1}' if times == 0 else f'{{"v":1,"next":{nested(times - 1)}}}'


@pytest.mark.parametrize("way", [
    {"$ref": "#/$defs/node"}, {"allOf": [{"$ref": "#/$defs/node"}]}, {"anyOf": [{"$ref": "#/$defs/node"}]},
    {"allOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node"}]},
])
def test_a_definition_may_stand_within_itself_so_often(way: dict[str, Any]) -> None:
    node = {**TREE, "properties": {"v": {"type": "integer"}, "next": way}}
    grammar = of_arguments({"type": "object", "properties": {"root": way}, "required": ["root"],
                            "$defs": {"node": node}})
    assert [n for n in range(6) if takes(grammar, f'{{"root":{nested(n)}}}')] == list(range(shapes.REF_DEPTH + 1))
    assert any("stands within itself, and at most 2 times" in note for note in grammar.notes)


def test_the_whole_schema_may_be_named() -> None:
    grammar = of_arguments({"type": "object", "properties": {"sub": {"$ref": "#"}, "n": {"type": "null"}}})
    assert takes(grammar, '{"n":null}') and takes(grammar, '{"sub":{"sub":{"n":null}}}')


def test_what_stands_within_itself_at_once_admits_nothing() -> None:
    with pytest.raises(BadInput, match="no arguments are valid"):
        of_arguments({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"],
                      "$defs": {"a": {"$ref": "#/$defs/a"}}})


@pytest.mark.parametrize(("name", "said"), [
    ("#/$defs/b", "there is no definition"), ("#node", "isn't a definition in the same schema"),
    ("other.json#/a", "isn't a definition in the same schema"), (3, "isn't a definition"),
    ("#/properties/a/$ref", "isn't a schema"),
])
def test_references_that_lead_nowhere_are_named(name: Any, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        of_arguments({"type": "object", "properties": {"a": {"$ref": name}}, "$defs": {"a": {}}})
    assert said in str(refused.value) and "parameters.a.$ref" in str(refused.value)


def test_names_of_definitions_may_be_escaped() -> None:
    grammar = of_arguments({"type": "object", "properties": {"v": {"$ref": "#/$defs/a~1b%20c"}},
                            "$defs": {"a/b c": {"const": 5}}})
    assert takes(grammar, '{"v":5}') and not takes(grammar, '{"v":6}')


# Numbers.


@pytest.mark.parametrize(("text", "admitted"), [
    ("1e5", True), ("1E5", True), ("1e+5", True), ("1e-05", True), ("-2.50e10", True), ("0e0", True), ("0.0e1", True),
    ("1e", False), ("1e+", False), ("1e123", False), ("e5", False), ("1.e5", False), ("1e5.0", False), ("-0e5", False),
    ("1e5e5", False), ("1e--5", False),
])
def test_a_number_that_nothing_bounds_may_have_an_exponent(text: str, admitted: bool) -> None:
    assert admits(grammar_of({"type": "number"}), text) == admitted
    for rule in ({"minimum": -1e9}, {"maximum": 1e9}, {"multipleOf": 0.5}):
        assert not admits(grammar_of({"type": "number", **rule}), text)
    assert not admits(grammar_of({"type": "integer"}), text)


def test_listed_numbers_are_judged_by_their_value() -> None:
    grammar = grammar_of({"type": "number", "minimum": 0, "maximum": 1e21, "enum": [1e-7, 1e21, -1.5, 2.0, 1e22]})
    assert [v for v in ("1e-07", "1e+21", "-1.5", "2.0", "1e+22") if admits(grammar, v)] == ["1e-07", "1e+21", "2.0"]
    assert admits(grammar_of({"type": "integer", "enum": [2.0, 2.5]}), "2.0")


def test_tools_with_what_is_no_number_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text('{"name": "f", "parameters": {"properties": {"v": {"enum": [NaN]}}}}')
    with pytest.raises(BadInput, match="NaN is no number of JSON"):
        load_tools(path)


# Whatever stands in a file of tools.

JUNK: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, "", "x", [], {}, [1], {"a": 1}, 1e300, "#/$defs/node", [[]])


def spoilt(rng: Random, value: Any) -> Any:
    """A copy with something else in one place."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.2:
        return rng.choice(JUNK)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [spoilt(rng, one) if i == at else one for i, one in enumerate(value)]
    at = rng.choice(list(value))
    return {key: spoilt(rng, one) if key == at else one for key, one in value.items()}


def test_schemas_that_are_none_are_refused_and_break_nothing() -> None:
    rng = Random(5)
    refused = 0
    for _ in range(600):
        parts = [random_all_of(rng), random_schema(rng), TREE, {"$ref": "#/$defs/node"}, {"not": 1}]
        properties = {key: rng.choice(parts) for key in "ab"}
        tool = {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": {"node": TREE}}}
        try:
            grammar = compile_grammar(read_tools(spoilt(rng, tool)))
        except BadInput as error:
            assert str(error) and "\n" not in str(error)
            refused += 1
        else:
            assert grammar.accepts(b"[]")
    assert 60 < refused < 540
