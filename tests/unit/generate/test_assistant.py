"""The loop from a request to its calls, with a runner that says what is written down for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from needle_export.errors import BadInput, UsageError
from needle_export.generate.assistant import Assistant
from needle_export.generate.calls import Call, parse_calls, same_calls
from needle_export.generate.schemas import read_tools
from tests.support.scripted import ByteTokenizer, ScriptedRunner, answer_of

TOOLS = read_tools({"name": "lights", "parameters": {
    "type": "object", "properties": {"room": {"enum": ["hall", "kitchen"]}}, "required": ["room"]}})
RIGHT = answer_of(("lights", {"room": "hall"}))


def assistant(says: str, **options: Any) -> tuple[Assistant, ScriptedRunner]:
    runner = ScriptedRunner({"on": says}, options.pop("context", 2048))
    return Assistant(runner, ByteTokenizer(), TOOLS, **options), runner


@pytest.mark.parametrize("constrained", [True, False])
def test_a_valid_answer_is_the_same_within_the_grammar_and_free(constrained: bool) -> None:
    asked, runner = assistant(RIGHT, constrained=constrained)
    for _ in range(2):  # a second request starts anew
        answer = asked.ask("on")
        assert answer.calls == (Call("lights", {"room": "hall"}),)
        assert answer.finished and not answer.problem
        assert answer.text == RIGHT.removesuffix("<|im_end|>")
    assert runner.tokens[0] == ByteTokenizer.bos_id


def test_the_grammar_keeps_an_answer_to_what_is_valid() -> None:
    asked, _ = assistant(answer_of(("lights", {"room": "hell"})))
    answer = asked.ask("on")
    assert answer.calls == (Call("lights", {"room": "hall"}),) and answer.finished


@pytest.mark.parametrize(("says", "calls", "problem"), [
    (answer_of(), (), ""),
    (answer_of(("lights", {"room": "hell"})), (Call("lights", {"room": "hell"}),), "valid"),
    ("no calls at all<|im_end|>", None, "isn't calls"),
])
def test_free_answers_are_told_for_what_they_are(
    says: str, calls: tuple[Call, ...] | None, problem: str
) -> None:
    asked, _ = assistant(says, constrained=False)
    answer = asked.ask("on")
    assert answer.calls == calls and answer.finished
    assert problem in answer.problem and bool(problem) == bool(answer.problem)


def test_an_answer_that_ends_by_the_end_token_is_finished() -> None:
    asked, _ = assistant(RIGHT.removesuffix("<|im_end|>"), constrained=False)
    assert asked.ask("on").finished


@pytest.mark.parametrize("constrained", [True, False])
def test_an_answer_is_cut_at_its_limit(constrained: bool) -> None:
    asked, _ = assistant(RIGHT, constrained=constrained, max_new_tokens=5)
    answer = asked.ask("on")
    assert len(answer.tokens) == 5 and not answer.finished and answer.calls is None
    assert "limit" in answer.problem


def test_thoughts_may_come_first() -> None:
    asked, _ = assistant(f"<think>\nhall is é\n</think>\n{RIGHT}")
    answer = asked.ask("on")
    assert answer.calls == (Call("lights", {"room": "hall"}),)
    assert answer.text.startswith("<think>\nhall is é\n</think>\n<tool_call>")


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    asked, _ = assistant(RIGHT, context=40)
    with pytest.raises(UsageError, match="context"):
        asked.ask("on")


def test_a_model_without_logits_for_what_must_come_is_refused() -> None:
    class Few(ScriptedRunner):
        def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
            return super().feed(tokens)[:, :8]

    asked = Assistant(Few({}), ByteTokenizer(), TOOLS)
    with pytest.raises(BadInput, match="no logit"):
        asked.ask("on")


@pytest.mark.parametrize(("text", "calls"), [
    ("<tool_call>[]</tool_call>", ()),
    ('<tool_call>[{"name":"a","arguments":{"b":1}}]</tool_call><|im_end|>', (Call("a", {"b": 1}),)),
    ('<tool_call>[{"name":"a","arguments":{"b":1,"b":2}}]</tool_call>', None),
    ('<tool_call>[{"name":"a"}]</tool_call>', None),
    ('<tool_call>[{"name":"a","arguments":{"b":NaN}}]</tool_call>', None),
    ("<tool_call>[]", None), ("[]", None), ("<think>x<tool_call>[]</tool_call>", None),
])
def test_calls_in_texts(text: str, calls: tuple[Call, ...] | None) -> None:
    assert parse_calls(text) == calls


def test_calls_are_the_same_as_json_is() -> None:
    one = (Call("a", {"b": 1, "c": [True, "x"]}),)
    assert same_calls(one, (Call("a", {"c": [True, "x"], "b": 1.0}),))
    for other in ((), None, (*one, *one), (Call("b", one[0].arguments),), (Call("a", {"b": True, "c": [True, "x"]}),),
                  (Call("a", {"b": 1, "c": ["x", True]}),), (Call("a", {"b": 1}),)):
        assert not same_calls(one, other)
    assert same_calls((), ()) and not same_calls(None, None)


@pytest.mark.parametrize(("tools", "sentence"), [
    (3, "tools are a list"), ([1], "tool 1"), ([{"description": "x"}], "tool 1: name"),
    ([{"name": "a", "parameters": 1}], "tool 'a': parameters"), ([{"name": "a"}, {"name": "a"}], "same name"),
    ([{"type": "function", "function": {"name": ""}}], "function.name"),
    ([{"name": "a", "parameters": {"type": "array"}}], "parameters.type"),
])
def test_tools_that_are_none_are_refused(tools: Any, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_tools(tools)
    assert sentence in str(refused.value)
