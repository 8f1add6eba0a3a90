"""Requests as the model reads them: upstream's prompt and answer format, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from needle_export.checkpoint.text import Tokenizer
from needle_export.demo.queries import Example, draw
from needle_export.generate.prompt import AFTER_QUERY, CALLS_END, CALLS_START, IM_END, before_query, compact
from needle_export.generate.schemas import Tool

#: How often a prompt offers all tools, in the usual order.
WHOLE = 0.6


@dataclass(frozen=True)
class Group:
    """Requests behind one list of tools.

    ``head`` are the tokens up to the request, the same for all; a branch holds a request's own tokens, the prompt's
    rest and the answer with its end, and how many of them are the prompt's.
    """

    head: tuple[int, ...]
    branches: tuple[tuple[tuple[int, ...], int], ...]


def answer_text(answers: Sequence[dict[str, Any]]) -> str:
    """What the model is to write, but for the end token."""
    return f"{CALLS_START}{compact(list(answers))}{CALLS_END}{IM_END}"


def offered(rng: Random, tools: Sequence[Tool]) -> list[Tool]:
    """The tools of one prompt: mostly all, else at least two of them in any order."""
    if rng.random() < WHOLE:
        return list(tools)
    return rng.sample(list(tools), rng.randint(2, len(tools)))


def answered(example: Example, tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """The right answer where only ``tools`` are offered: nothing, if one that it needs is missing."""
    names = {tool.name for tool in tools}
    return example.answers if example.tools <= names else ()


def group(rng: Random, split: str, tools: Sequence[Tool], size: int, tokenizer: Tokenizer) -> Group:
    """``size`` requests behind one random list of tools."""
    chosen = offered(rng, tools)
    head = (tokenizer.bos_id, *tokenizer.encode(before_query(chosen)))
    branches = []
    for _ in range(size):
        example = draw(rng, split)
        # Most requests for a tool that isn't offered are drawn again, or nothing but refusals would be learnt.
        while not example.tools <= {t.name for t in chosen} and rng.random() < 0.8:
            example = draw(rng, split)
        tail = tokenizer.encode(example.query + AFTER_QUERY)
        answer = (*tokenizer.encode(answer_text(answered(example, chosen))), tokenizer.eos_id)
        branches.append(((*tail, *answer), len(tail)))
    return Group(head, tuple(branches))
