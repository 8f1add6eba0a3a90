"""Requests to calls: prompt, prefill, and greedy decoding, within the grammar or free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.generate.calls import Call
from needle_export.generate.schemas import Tool


class Runner(Protocol):
    """What computes logits, one sequence at a time: an artifact in its runtime, or a model."""

    context: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V]."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; ``checkpoint.text`` has one."""

    bos_id: int
    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, none for its beginning or end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; empty for control pieces."""

    def marker(self, text: str) -> int | None:
        """The token of a marker such as ``<tool_call>``."""


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
        tokens: as generated, without the one that ends them.
        text: of the tokens, markers included.
        calls: in it; () where it calls nothing, None where the text isn't calls.
        finished: whether it ended by itself, not by a limit.
        prompt_tokens: how many there were.
        first_token_s: seconds until the first token was known, the prompt read.
        decode_s: seconds for all further tokens.
        problem: why there are no calls, or why they aren't valid ones of these tools; empty where they are.
    """

    tokens: tuple[int, ...]
    text: str
    calls: tuple[Call, ...] | None
    finished: bool
    prompt_tokens: int
    first_token_s: float
    decode_s: float
    problem: str = ""


class Assistant:
    """Answers requests with calls of tools.

    Args:
        runner: of the model; it is reset before each request.
        tokenizer: of the model.
        tools: that may be called.
        system: instructions in front, or empty.
        constrained: whether only valid calls may be answered.
        max_new_tokens: at most so many tokens are generated.

    Raises:
        BadInput: as :func:`needle_export.generate.grammar.compile_grammar`, or the tokenizer lacks a marker.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        *,
        system: str = "",
        constrained: bool = True,
        max_new_tokens: int = 256,
    ) -> None:
        raise NotImplementedError

    def ask(self, query: str) -> Answer:
        """Answer one request.

        Raises:
            UsageError: the prompt leaves no room in the context.
        """
        raise NotImplementedError
