"""Queries with the calls that are right for them: a text file of one JSON object a line.

A line has ``query``, ``answers``, and ``tools`` unless those are given apart, as the public cactus-needle package
trains on; or it is a chat of one turn with OpenAI-style tools (its ``needle.model.finetune.from_chat``).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from needle_export.checkpoint.jsonl import no_constant, read_objects
from needle_export.errors import BadInput
from needle_export.generate.calls import Call
from needle_export.generate.schemas import Tool, read_tools

SEED = 0
"""Of the lines that a limit leaves: the same of the same file."""

_FORM = 'write {"query": "...", "tools": [...], "answers": [{"name": "...", "arguments": {...}}]} on a line of its own'
_KEYS = ("query", "tools", "answers", "function_calls", "system", "reasoning")


@dataclass(frozen=True)
class Example:
    """A query and what is right.

    Attributes:
        line: of the file, from 1.
        query: as it is asked.
        tools: that may be called.
        answers: the calls that are right, in order; empty where nothing is to be called.
        system: instructions in front, or empty.
        own_tools: whether the line has its tools itself.
    """

    line: int
    query: str
    tools: tuple[Tool, ...]
    answers: tuple[Call, ...]
    system: str = ""
    own_tools: bool = True


def read_examples(data: bytes, tools: Sequence[Tool] | None = None) -> tuple[Example, ...]:
    """The examples of a file, in order. Empty lines are passed over.

    Args:
        data: the file, UTF-8.
        tools: of lines that have none.

    Raises:
        BadInput: naming the line, when one isn't such an object, has no tools although none are given, or wants a call
            of a tool that it hasn't; or there is no line.
    """
    known: dict[str, tuple[Tool, ...]] = {}
    found = []
    for number, raw in read_objects(data, _FORM):
        where = f"line {number}"
        if "messages" in raw and "query" not in raw:
            raw = _from_chat(raw, where)
        _check_keys(raw, where)
        found.append(_example(raw, number, where, tools, known))
    if not found:
        raise BadInput("it holds no query", fix=_FORM)
    return tuple(found)


def sample(examples: Sequence[Example], limit: int | None) -> tuple[Example, ...]:
    """At most ``limit`` examples, drawn from a fixed seed, in the order of the file: its first ones might be alike."""
    if limit is None or limit >= len(examples):
        return tuple(examples)
    picked = np.random.default_rng(SEED).choice(len(examples), limit, replace=False)
    return tuple(examples[i] for i in sorted(picked))


def _check_keys(raw: dict[str, Any], where: str) -> None:
    """Refuse a key that is nearly one that is known; others mean nothing here, such as an id."""
    for key in set(raw) - set(_KEYS):
        near = difflib.get_close_matches(key, [k for k in _KEYS if k not in raw], 1, 0.75)
        if near:
            raise BadInput(f"it has {key!r}", where=where, fix=f"did you mean {near[0]!r}?")


def _example(
    raw: dict[str, Any], number: int, where: str, tools: Sequence[Tool] | None, known: dict[str, tuple[Tool, ...]]
) -> Example:
    query, system = raw.get("query"), raw.get("system") or ""
    if not isinstance(query, str) or not isinstance(system, str):
        raise BadInput(f"its {'system' if isinstance(query, str) else 'query'} isn't text", where=where, fix=_FORM)
    own = "tools" in raw
    if own:
        # Most lines have the same ones.
        key = json.dumps(raw["tools"])
        if key not in known:
            known[key] = _tools(raw["tools"], where)
        offered = known[key]
    elif tools is None:
        raise BadInput("it has no tools", where=where, fix="write them on the line, or give --tools")
    else:
        offered = tuple(tools)
    if "answers" in raw and "function_calls" in raw:
        raise BadInput("it has both answers and function_calls", where=where, fix="leave one out")
    if "answers" not in raw and "function_calls" not in raw:
        raise BadInput("it has no answers", where=where, fix="write [] where nothing is to be called")
    answers = _answers(raw.get("answers", raw.get("function_calls")), where)
    names = {tool.name for tool in offered}
    for call in answers:
        if call.name not in names:
            raise BadInput(f"it wants a call of {call.name[:60]!r}, and its tools have none of that name", where=where,
                           fix="correct the answer or the tools")
    return Example(number, query, offered, answers, system.strip(), own)


def _tools(value: Any, where: str) -> tuple[Tool, ...]:
    try:
        return read_tools(_decoded(value, "tools", where))
    except BadInput as error:
        inner = f"{where}, {error.where}" if error.where and not error.where.startswith(where) else where
        raise BadInput(error.what, where=inner, fix=error.fix) from None


def _answers(value: Any, where: str) -> tuple[Call, ...]:
    value = _decoded(value, "answers", where)
    if not isinstance(value, list):
        raise BadInput("its answers aren't a list of calls", where=where, fix=_FORM)
    calls = []
    for call in value:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise BadInput("an answer isn't a call with a name and arguments", where=where, fix=_FORM)
        calls.append(Call(name, arguments))
    return tuple(calls)


def _decoded(value: Any, what: str, where: str) -> Any:
    """A value that may be written as the text of its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=no_constant)
    except (ValueError, RecursionError):
        raise BadInput(f"its {what} are text that isn't JSON", where=where, fix=_FORM) from None


def _from_chat(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A chat as a line with a query: one user's turn and the assistant's, with instructions in front or without."""
    messages = raw["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadInput("its messages aren't a list of objects", where=where, fix=_FORM)
    turns = [m for m in messages if m.get("role") != "system"]
    if [m.get("role") for m in turns] != ["user", "assistant"]:
        roles = ", ".join(str(m.get("role"))[:20] for m in turns) or "nothing"
        raise BadInput(f"its turns are {roles} instead of user, assistant", where=where,
                       fix="one query with its answer can be judged; leave the line out")
    out: dict[str, Any] = {"query": turns[0].get("content") or "", "answers": []}
    for call in _list(turns[1].get("tool_calls"), where):
        function = call.get("function") or call
        if not isinstance(function, dict):
            raise BadInput("an answer isn't a call with a name and arguments", where=where, fix=_FORM)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _decoded(arguments, "arguments", where) if arguments.strip() else {}
        out["answers"].append({"name": function.get("name"), "arguments": arguments})
    if "tools" in raw:
        out["tools"] = raw["tools"]
    system = [m.get("content") for m in messages if m.get("role") == "system"]
    return {**out, "system": system[0] or ""} if system else out


def _list(value: Any, where: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadInput("its tool_calls aren't a list of objects", where=where, fix=_FORM)
    return value
