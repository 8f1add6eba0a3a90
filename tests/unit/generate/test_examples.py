"""Files of queries: both forms are read, and a bad line is refused by its number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from needle_export.errors import BadInput
from needle_export.generate.calls import Call
from needle_export.generate.examples import read_examples, sample
from needle_export.generate.schemas import read_tools

FLAT = {"name": "play", "description": "Play music", "parameters": {
    "type": "object", "properties": {"song": {"type": "string"}}, "required": ["song"]}}
CALL = {"name": "play", "arguments": {"song": "Señorita"}}
LINE = {"query": "play it", "tools": [FLAT], "answers": [CALL]}


def lines(*given: Any) -> bytes:
    return "\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in given).encode()


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), "tools": [{"type": "function", "function": FLAT}], **more}


USER = {"role": "user", "content": "play it"}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "play", "arguments": json.dumps({"song": "Señorita"})}}]}


def test_both_forms_are_the_same_to_us() -> None:
    system = {"role": "system", "content": " be brief "}
    flat, talked = read_examples(lines(
        {**LINE, "system": "be brief", "reasoning": "so", "id": 7}, "", chat(system, USER, ASSISTANT)))
    assert (flat.query, flat.answers, flat.system) == ("play it", (Call("play", {"song": "Señorita"}),), "be brief")
    assert (talked.query, talked.answers, talked.system) == (flat.query, flat.answers, flat.system)
    assert [tool.flat for tool in flat.tools] == [tool.flat for tool in talked.tools] == [FLAT]
    assert (flat.line, talked.line) == (1, 3)


def test_what_may_be_written_otherwise() -> None:
    texts, renamed, nothing, silent = read_examples(lines(
        {"query": "q", "tools": json.dumps([FLAT]), "answers": json.dumps([CALL])},
        {"query": "q", "tools": [FLAT], "function_calls": [CALL]},
        {"query": "q", "tools": [FLAT], "answers": []},
        chat(USER, {"role": "assistant", "content": "I can't"})))
    assert texts.answers == renamed.answers == (Call("play", {"song": "Señorita"}),)
    assert nothing.answers == silent.answers == ()


def test_tools_that_are_given_apart() -> None:
    tools = read_tools([FLAT])
    own, other = read_examples(lines(LINE, {"query": "q", "answers": []}), tools)
    assert (own.own_tools, other.own_tools) == (True, False) and other.tools == tools


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in LINE.items() if k != key}


@pytest.mark.parametrize(("line", "sentence"), [
    ("{", "line 2: it isn't JSON; write"),
    ('{"query": NaN}', "line 2: it isn't JSON"),
    ("[1]", "line 2: it isn't a JSON object"),
    ({**LINE, "query": 1}, "line 2: its query isn't text"),
    ({**LINE, "system": [1]}, "line 2: its system isn't text"),
    (without("tools"), "line 2: it has no tools; write them on the line, or give --tools"),
    (without("answers"), "line 2: it has no answers; write [] where nothing is to be called"),
    ({**without("answers"), "answer": []}, "line 2: it has 'answer'; did you mean 'answers'?"),
    ({**LINE, "function_calls": []}, "line 2: it has both answers and function_calls"),
    ({**LINE, "answers": CALL}, "line 2: its answers aren't a list of calls"),
    ({**LINE, "answers": "play"}, "line 2: its answers are text that isn't JSON"),
    ({**LINE, "answers": [{"arguments": {}}]}, "line 2: an answer isn't a call with a name and arguments"),
    ({**LINE, "answers": [{"name": "play", "arguments": "x"}]}, "line 2: an answer isn't a call"),
    ({**LINE, "answers": [{"name": "pley"}]}, "line 2: it wants a call of 'pley', and its tools have none"),
    ({**LINE, "tools": [{"description": "no name"}]}, "line 2"),
    (chat(USER), "line 2: its turns are user instead of user, assistant"),
    (chat(USER, ASSISTANT, USER, ASSISTANT), "line 2: its turns are user, assistant, user, assistant instead"),
    ({"messages": "hello"}, "line 2: its messages aren't a list of objects"),
    (chat(USER, {"role": "assistant", "tool_calls": ["x"]}), "line 2: its tool_calls aren't a list of objects"),
    (chat(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "play", "arguments": "{"}}]}),
     "line 2: its arguments are text that isn't JSON"),
])
def test_a_bad_line_is_named(line: Any, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_examples(lines(LINE, line))
    assert caught.value.sentence.startswith(sentence)


def test_bytes_that_are_no_text_and_files_without_a_query() -> None:
    with pytest.raises(BadInput, match="line 1: it isn't UTF-8"):
        read_examples(b'{"query": "\xff"}')
    with pytest.raises(BadInput, match="it holds no query"):
        read_examples(b"\n \n")


def test_a_sample_is_the_same_of_the_same_file_and_in_its_order() -> None:
    every = read_examples(lines(*[{**LINE, "query": str(i)} for i in range(50)]))
    some = sample(every, 10)
    assert some == sample(every, 10)
    assert [e.line for e in some] == sorted({e.line for e in some}) and len(some) == 10
    assert some != every[:10]
    assert sample(every, 50) == sample(every, 99) == sample(every, None) == every
