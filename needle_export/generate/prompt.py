"""The prompt as the public cactus-needle package renders it (``needle.model.finetune.render_example``)."""

from __future__ import annotations

from collections.abc import Sequence

from needle_export.generate.schemas import Tool

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
TOOLS_START, TOOLS_END = "<tools>", "</tools>"
CALLS_START, CALLS_END = "<tool_call>", "</tool_call>"


def render(query: str, tools: Sequence[Tool], system: str = "") -> str:
    """The prompt before a query's answer, byte for byte upstream's; the token of the beginning isn't part of it."""
    raise NotImplementedError
