"""The demo's requests: what they say, what answers them, and that the splits share nothing."""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any

import pytest

from needle_export.demo import lexicon, queries, templates
from needle_export.demo.make import demo_tools, heldout_requests
from needle_export.demo.prompts import answered, group, offered
from needle_export.demo.queries import Example

SHOWN = 3000


def every_skeleton(split: str) -> set[str]:
    tables = (*templates.CORES.values(), *templates.NOTHING.values())
    return set().union(*(templates.skeletons(t) for table in tables for t in table[split]))


@pytest.mark.parametrize(("one", "other"), tuple(itertools.combinations(templates.SPLITS, 2)))
def test_no_two_splits_share_a_template(one: str, other: str) -> None:
    assert len(every_skeleton(one)) > 50
    assert not every_skeleton(one) & every_skeleton(other)
    for table in (templates.NEGATIONS, templates.JOINERS):
        assert not set(table[one]) & set(table[other])
    assert not set(lexicon.NO_ROOMS[one]) & set(lexicon.NO_ROOMS[other])


def test_skeletons_are_what_spelling_gives() -> None:
    template = "(turn|switch) {state} the {room} (lights|)"
    rng = Random(0)
    assert {templates.spell(template, rng) for _ in range(200)} == templates.skeletons(template)
    assert templates.skeletons(template) == {
        f"{verb} {{state}} the {{room}}{end}" for verb in ("turn", "switch") for end in (" lights", "")}


@pytest.mark.parametrize("split", templates.SPLITS)
def test_answers_obey_the_schemas_and_say_what_the_request_says(split: str) -> None:
    schemas = {tool.name: tool.parameters for tool in demo_tools()}
    rng = Random(split)
    seen: dict[str, int] = {}
    for _ in range(SHOWN):
        example = queries.draw(rng, split)
        assert "{" not in example.query and "|" not in example.query and "  " not in example.query
        for call in example.answers:
            assert_valid(schemas[call["name"]], call["arguments"])
            for key in ("query", "label"):
                if key in call["arguments"]:
                    assert call["arguments"][key].lower() in example.query.lower()
            seen[call["name"]] = seen.get(call["name"], 0) + 1
    assert set(seen) == set(schemas)
    assert min(seen.values()) > SHOWN / 40


def assert_valid(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
    for name, value in arguments.items():
        rule = schema["properties"][name]
        kind = {"string": str, "integer": int, "boolean": bool}[rule["type"]]
        assert type(value) is kind
        assert value in rule.get("enum", [value])
        if kind is int:
            assert rule["minimum"] <= value <= rule["maximum"]


def test_values_come_in_many_words() -> None:
    rng = Random(1)
    requests = {queries.draw(rng, "train").query for _ in range(SHOWN)}
    assert len(requests) > 0.97 * SHOWN
    assert any("forty" in r for r in requests) and any("40" in r for r in requests)


def test_music_of_one_split_is_in_no_other() -> None:
    pairs: dict[str, set[str]] = {}
    for split in templates.SPLITS:
        rng = Random(3)
        found = (queries.draw(rng, split) for _ in range(SHOWN))
        pairs[split] = {c["arguments"]["query"] for e in found for c in e.answers if c["name"] == "play_music"}
        pairs[split] -= set(lexicon.GENRES)
        assert len(pairs[split]) > 30
    for one, other in itertools.combinations(templates.SPLITS, 2):
        assert not pairs[one] & pairs[other]


@pytest.mark.parametrize(("number", "said"), [(0, "zero"), (7, "seven"), (13, "thirteen"), (40, "forty"),
                                              (45, "forty five"), (100, "one hundred"),
                                              (154, "one hundred and fifty four")])
def test_numbers_in_words(number: int, said: str) -> None:
    assert lexicon.words(number) == said


def test_the_heldout_requests_are_the_same_for_a_seed_and_each_once() -> None:
    requests = heldout_requests(7, 200)
    assert requests == heldout_requests(7, 200) != heldout_requests(8, 200)
    assert len({r.query for r in requests}) == 200
    nothing = sum(not r.answers for r in requests)
    assert 0.15 < nothing / 200 < 0.4


def test_a_tool_that_is_not_offered_is_not_called() -> None:
    tools = demo_tools()
    call = {"name": "lock_door", "arguments": {"door": "front", "locked": True}}
    example = Example("lock the front door", (call,))
    assert answered(example, tools) == (call,)
    assert answered(example, [t for t in tools if t.name != "lock_door"]) == ()


def test_most_prompts_offer_all_tools_and_others_some_in_any_order() -> None:
    tools = demo_tools()
    names = [tuple(t.name for t in offered(Random(seed), tools)) for seed in range(300)]
    whole = tuple(t.name for t in tools)
    assert 0.5 < sum(n == whole for n in names) / 300 < 0.7
    assert min(map(len, names)) == 2
    assert any(len(n) == 6 and n != whole for n in names)


def test_groups_are_prompts_with_answers() -> None:
    class Letters:
        bos_id, eos_id = 2, 1

        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

    made = group(Random(5), "train", demo_tools(), 12, Letters())
    assert made.head[0] == 2
    head = "".join(map(chr, made.head[1:]))
    assert head.startswith('<|im_start|>user\n<tools>[{"name":') and head.endswith("</tools>\n")
    for tokens, prompt in made.branches:
        text = "".join(map(chr, tokens[:prompt]))
        answer = "".join(map(chr, tokens[prompt:-1]))
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and tokens[-1] == 1
        assert isinstance(json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call><|im_end|>")), list)
