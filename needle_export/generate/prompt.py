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


def before_query(tools: Sequence[Tool], system: str = "") -> str:
    """A prompt's text up to its query: instructions if there are any, and the tools."""
    system = system.strip()
    front = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    return f"{front}{IM_START}user\n{TOOLS_START}{compact([tool.flat for tool in tools])}{TOOLS_END}\n"


def render(query: str, tools: Sequence[Tool], system: str = "") -> str:
    """The prompt before a query's answer, byte for byte upstream's; the token of the beginning isn't part of it."""
    return f"{before_query(tools, system)}{query}{AFTER_QUERY}"
