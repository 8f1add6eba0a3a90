"""The prompt as the public cactus-needle package renders it (``needle.model.finetune.render_example``)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from needle_export.generate.schemas import Tool

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
TOOLS_START, TOOLS_END = "<tools>", "</tools>"
CALLS_START, CALLS_END = "<tool_call>", "</tool_call>"

#: All pieces that the tokenizer's markers are, in the order of their ids (``needle.model.tokenizer``).
MARKERS = (
    IM_START, IM_END, THINK_START, THINK_END, TOOLS_START, TOOLS_END, CALLS_START, CALLS_END, "<tool_result>",
    "</tool_result>", "<context>", "</context>", "<extract>", "</extract>", "<schema>", "</schema>",
)  # fmt: skip


def compact(value: object) -> str:
    """A JSON value as prompts and answers write it: no spaces, characters as they are."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


#: What follows a query in a prompt.
AFTER_QUERY = f"{IM_END}\n{IM_START}assistant\n"

#: A prompt in pieces, each a text or the name of what stands there: instructions, where there are any, and a request.
SYSTEM_PARTS = ((f"{IM_START}system\n", None), ("", "system"), (f"{IM_END}\n", None))
PARTS = ((f"{IM_START}user\n{TOOLS_START}", None), ("", "tools"), (f"{TOOLS_END}\n", None), ("", "query"),
         (AFTER_QUERY, None))


def before_query(tools: Sequence[Tool], system: str = "") -> str:
    """A prompt's text up to its query: instructions if there are any, and the tools."""
    values = {"system": system.strip(), "tools": compact([tool.flat for tool in tools])}
    front = SYSTEM_PARTS if values["system"] else ()
    return "".join(text if insert is None else values[insert] for text, insert in (*front, *PARTS[:-2]))


def render(query: str, tools: Sequence[Tool], system: str = "") -> str:
    """The prompt before a query's answer, byte for byte upstream's; the token of the beginning isn't part of it."""
    return f"{before_query(tools, system)}{query}{AFTER_QUERY}"
