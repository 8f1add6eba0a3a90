"""The grammar admits valid calls and nothing else."""

from __future__ import annotations

import json
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from needle_export import demo
from needle_export.checkpoint.text import load_tokenizer
from needle_export.errors import BadInput
from needle_export.generate.automaton import Automaton
from needle_export.generate.grammar import compile_grammar
from needle_export.generate.masks import Masks
from needle_export.generate.schemas import read_tools
from tests.support.schemas import all_hold, near, random_all_of, random_schema, valid, written

SCHEMAS, INSTANCES = 250, 30


def grammar_of(schema: dict[str, Any], **options: Any) -> Automaton:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    return compile_grammar(read_tools({"name": "f", "parameters": parameters}), **options)


def call(value: str) -> str:
    return f'{{"name":"f","arguments":{{"v":{value}}}}}'


def admits(grammar: Automaton, value: str) -> bool:
    return grammar.accepts(f"[{call(value)}]".encode())


def test_random_schemas_admit_what_an_independent_judge_does() -> None:
    rng = Random(0)
    judged = right = 0
    for _ in range(SCHEMAS):
        schema = random_schema(rng)
        values = [written(near(rng, schema)) for _ in range(INSTANCES)]
        try:
            grammar = grammar_of(schema)
        except BadInput as error:
            assert "no arguments are valid" in str(error)
            assert not any(valid(schema, json.loads(v, parse_float=Decimal)) for v in values), schema
            continue
        for value in values:
            wanted = valid(schema, json.loads(value, parse_float=Decimal))
            assert admits(grammar, value) == wanted, (schema, value)
            judged, right = judged + 1, right + wanted
    assert judged > 0.8 * SCHEMAS * INSTANCES
    assert 0.3 < right / judged < 0.95


def to_an_end(grammar: Automaton) -> dict[int, int]:
    """Bytes from each state to the nearest one that accepts; every state can reach one."""
    left = dict.fromkeys(grammar.accept, 0)
    while len(left) < len(grammar.edges):
        near = {s: 1 + min(left[to] for _, _, to in row if to in left)
                for s, row in enumerate(grammar.edges) if s not in left and any(to in left for _, _, to in row)}
        assert near
        left |= near
    return left


def walked(rng: Random, grammar: Automaton, left: dict[int, int]) -> bytes:
    """A text that it admits, by a way drawn at random that is drawn towards an end."""
    text, state = bytearray(), 0
    while state not in grammar.accept or (grammar.edges[state] and rng.random() < 0.3):
        nearer = [edge for edge in grammar.edges[state] if left[edge[2]] < left[state]]
        low, high, state = rng.choice(nearer if nearer and rng.random() < 0.4 else grammar.edges[state])
        text.append(rng.randint(low, high))
    return bytes(text)


@pytest.mark.parametrize(("make", "judge"), [(random_schema, valid), (random_all_of, all_hold)])
def test_whatever_it_admits_is_valid(make: Any, judge: Any) -> None:
    rng = Random(7)
    seen = 0
    for _ in range(160):
        schema = make(rng)
        try:
            grammar = grammar_of(schema, max_calls=2)
        except BadInput:
            continue
        left = to_an_end(grammar)
        for _ in range(8):
            calls = json.loads(walked(rng, grammar, left).decode("utf-8"), parse_float=Decimal)
            assert len(calls) <= 2
            for one in calls:
                assert one["name"] == "f" and list(one) == ["name", "arguments"] and list(one["arguments"]) == ["v"]
                assert judge(schema, one["arguments"]["v"]), (schema, one)
                seen += 1
    assert seen > 300


@pytest.mark.parametrize(("low", "high", "step"), [(0, 100, 1), (-12, 7, 1), (5, 30, 1), (99, 1001, 7), (-130, -99, 3)])
def test_every_whole_number_around_a_range(low: int, high: int, step: int) -> None:
    grammar = grammar_of({"type": "integer", "minimum": low, "maximum": high, "multipleOf": step})
    for number in range(low - 150, high + 150):
        assert admits(grammar, str(number)) == (low <= number <= high and number % step == 0)
    for text in ("01", "-0", "1.0", "1e1", "+1", "", " 1", "--1"):
        assert not admits(grammar, text)


@pytest.mark.parametrize(("text", "admitted"), [
    ('"ab"', True), ('"a"', False), ('"abcd"', False), ('"é𝄞"', True), ('"\\n\\""', True), ('"\\u00e9\\\\"', True),
    ('"a\nb"', False), ('"ab', False), ("'ab'", False),
])
def test_strings_are_counted_in_characters(text: str, admitted: bool) -> None:
    assert admits(grammar_of({"type": "string", "minLength": 2, "maxLength": 3}), text) == admitted


def test_bytes_that_are_no_text_are_not_admitted() -> None:
    grammar = grammar_of({"type": "string"})
    start = grammar.step(0, b'[{"name":"f","arguments":{"v":"')
    assert start is not None
    for data in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe2\x28", b"\xf4\x90\x80\x80"):
        assert grammar.step(start, data) is None
    assert grammar.step(start, "é漢𝄞".encode()) is not None


def test_calls_are_arrays_of_them() -> None:
    grammar, one = grammar_of({"type": "boolean"}), call("true")
    for count in range(4):
        assert grammar.accepts(f"[{','.join([one] * count)}]".encode())
    for text in ("", "[", f"[{one},]", f"[{one}{one}]", one, f"[{one}] ", '[{"arguments":{"v":true},"name":"f"}]',
                 '[{"name":"g","arguments":{"v":true}}]', '[{"name":"f","arguments":{}}]'):
        assert not grammar.accepts(text.encode()), text
    single = grammar_of({"type": "boolean"}, max_calls=1)
    assert single.accepts(f"[{one}]".encode()) and not single.accepts(f"[{one},{one}]".encode())


def test_keys_may_come_in_any_order_and_once() -> None:
    properties = {key: {"type": "null"} for key in "abc"}
    tools = read_tools({"name": "f", "parameters": {"properties": properties, "required": ["b"]}})
    grammar = compile_grammar(tools)

    def given(keys: str) -> bool:
        inside = ",".join(f'"{key}":null' for key in keys)
        return grammar.accepts(f'[{{"name":"f","arguments":{{{inside}}}}}]'.encode())

    assert all(given(keys) for keys in ("b", "ab", "ba", "cab", "bca", "abc"))
    assert not any(given(keys) for keys in ("", "a", "ac", "bb", "abca", "d"))


def test_references_are_followed() -> None:
    parameters = {"type": "object", "properties": {"room": {"$ref": "#/$defs/room"}}, "required": ["room"],
                  "$defs": {"room": {"enum": ["hall", "attic"]}}}
    grammar = compile_grammar(read_tools({"name": "f", "parameters": parameters}))
    assert grammar.accepts(b'[{"name":"f","arguments":{"room":"hall"}}]')
    assert not grammar.accepts(b'[{"name":"f","arguments":{"room":"cellar"}}]')


def test_what_is_not_enforced_is_told() -> None:
    assert grammar_of({"type": "string"}).notes == ()
    (note,) = grammar_of({"type": "string", "pattern": "^a"}).notes
    assert "pattern" in note


@pytest.mark.parametrize("schema", [
    {"enum": []}, {"type": "integer", "minimum": 3, "maximum": 2}, {"type": "string", "minLength": 3, "maxLength": 1}])
def test_what_admits_nothing_is_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="f'"):
        grammar_of(schema)


def test_what_takes_too_many_states_is_refused() -> None:
    with pytest.raises(BadInput, match="states"):
        grammar_of({"type": "array", "items": {"type": "string", "maxLength": 5000}, "maxItems": 5000})


def test_its_json_is_the_same_automaton() -> None:
    grammar = grammar_of({"enum": ["hall", "attic"]})
    told = json.loads(json.dumps(grammar.as_dict()))
    edges = tuple(tuple((lo, hi, to) for lo, hi, to in row) for row in told["edges"])
    again = Automaton(edges, frozenset(told["accept"]))
    assert told["start"] == 0 and (again.edges, again.accept) == (grammar.edges, grammar.accept)


def test_masks_are_what_trying_every_token_gives() -> None:
    tokenizer = load_tokenizer(demo.files().tokenizer)
    grammar = compile_grammar(read_tools(json.loads(demo.files().tools.read_text(encoding="utf-8"))))
    # Pieces of half a character as well, which byte fallback has.
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    masks = Masks(grammar, pieces)
    for state in Random(0).sample(range(len(grammar.edges)), 60):
        wanted = [bool(piece) and grammar.step(state, piece) is not None for piece in pieces]
        assert masks.admitted(state).tolist() == wanted
        assert masks.admitted(state) is masks.admitted(state)


def test_every_right_answer_to_the_heldout_requests_is_admitted() -> None:
    grammar = compile_grammar(read_tools(json.loads(demo.files().tools.read_text(encoding="utf-8"))))
    lines = demo.files().heldout.read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert grammar.accepts(json.dumps(json.loads(line)["answers"], separators=(",", ":")).encode()), line
