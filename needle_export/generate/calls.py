"""Calls out of an answer's text, and whether two answers call the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call: the tool's name and its arguments as JSON values."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str) -> tuple[Call, ...] | None:
    """The calls in an answer ``[<think>..</think>\\n]<tool_call>[..]</tool_call>[<|im_end|>]``; () calls nothing.

    None where the text isn't of that form.
    """
    raise NotImplementedError


def same_calls(one: Sequence[Call] | None, other: Sequence[Call] | None) -> bool:
    """Whether two answers make the same calls in the same order, arguments equal as JSON values; None equals nothing."""
    raise NotImplementedError
