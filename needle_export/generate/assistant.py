"""Requests to calls: prompt, prefill, and greedy decoding, within the grammar or free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, UsageError
from needle_export.generate.calls import Call, parse_calls
from needle_export.generate.constraint import Constraint, Grammar, Tokenizer, need_marker
from needle_export.generate.grammar import compile_grammar
from needle_export.generate.prompt import IM_END, compact, render
from needle_export.generate.schemas import Tool

MAX_NEW_TOKENS = 256
"""Tokens that an answer may have, unless somebody says otherwise."""


class Runner(Protocol):
    """What computes logits, one sequence at a time: an artifact in its runtime, or a model."""

    context: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V]."""


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
        tokens: as generated, without ``<|im_end|>``.
        text: of the tokens, markers included.
        calls: in it; () where it calls nothing, None where the text isn't calls.
        finished: whether it ended by itself, not by a limit.
        prompt_tokens: how many there were, that of the beginning included.
        first_token_s: seconds until the first token was known, the prompt read.
        decode_s: seconds for all further tokens.
        problem: why there are no calls, or why they aren't valid ones of these tools; empty where they are.
        steps: decode steps that ``decode_s`` is for.
    """

    tokens: tuple[int, ...]
    text: str
    calls: tuple[Call, ...] | None
    finished: bool
    prompt_tokens: int
    first_token_s: float
    decode_s: float
    problem: str = ""
    steps: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Decode steps a second; None where there was none."""
        return self.steps / self.decode_s if self.steps and self.decode_s > 0 else None


class Assistant:
    """Answers requests with calls of tools.

    Args:
        runner: of the model; it is reset before each request.
        tokenizer: of the model.
        tools: that may be called.
        system: instructions in front, or empty.
        constrained: whether only valid calls may be answered.
        max_new_tokens: at most so many tokens are generated.
        max_calls: at most so many in an answer; None, any number.

    Attributes:
        automaton: of valid calls, with its notes.

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
        max_new_tokens: int = MAX_NEW_TOKENS,
        max_calls: int | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise UsageError("an answer has at least one token", where="max_new_tokens")
        self._runner, self._tokenizer = runner, tokenizer
        self._tools, self._system = tuple(tools), system
        self._limit = max_new_tokens
        self._end = need_marker(tokenizer, IM_END)
        self.automaton = compile_grammar(self._tools, max_calls=max_calls)
        self._grammar = Grammar(self.automaton, tokenizer) if constrained else None

    def ask(self, query: str) -> Answer:
        """Answer one request: the whole prompt in one call of ``feed``, then single tokens.

        Raises:
            UsageError: the prompt leaves no room in the context.
        """
        begin = time.perf_counter()
        prompt = [self._tokenizer.bos_id, *self._tokenizer.encode(render(query, self._tools, self._system))]
        if len(prompt) >= self._runner.context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, and the context holds {self._runner.context}",
                fix="give fewer tools or a shorter request, or build with a larger --context",
            )
        self._runner.reset()
        logits = self._runner.feed(np.array(prompt, np.int64))[-1]
        constraint = None if self._grammar is None else Constraint(self._grammar)
        tokens: list[int] = []
        # The last token is known without a place of its own in the context.
        limit = min(self._limit, self._runner.context - len(prompt) + 1)
        first = 0.0
        ended = False
        while True:
            token = self._choose(logits, constraint)
            if not first:
                first = time.perf_counter()
            if constraint is None and token in (self._end, self._tokenizer.eos_id):
                ended = True
                break
            tokens.append(token)
            if constraint is not None:
                constraint.push(token)
                if constraint.done:  # only <|im_end|> could follow
                    ended = True
                    break
            if len(tokens) == limit:
                break
            logits = self._runner.feed(np.array([token], np.int64))[-1]
        took = time.perf_counter() - first
        steps = len(tokens) - 1 + (ended and constraint is None)
        return self._answer(tokens, ended, len(prompt), first - begin, took, steps)

    def _choose(self, logits: NDArray[np.float32], constraint: Constraint | None) -> int:
        if constraint is None:
            return int(logits.argmax())
        # The model may have rows for more tokens than the tokenizer has pieces, or for fewer.
        mask = constraint.admitted()[: len(logits)]
        if not mask.any():
            raise BadInput("the model has no logit for any token that may come next", where="tokenizer",
                           fix="give the tokenizer that the model was trained with")
        return int(np.where(mask, logits[: len(mask)], -np.inf).argmax())

    def _answer(
        self, tokens: list[int], ended: bool, prompt: int, first: float, took: float, steps: int
    ) -> Answer:
        known = [token for token in tokens if token < self._tokenizer.vocab_size]
        text = self._tokenizer.decode(known)
        calls = parse_calls(text) if ended else None
        problem = ""
        if not ended:
            problem = "it didn't end within the limit of tokens"
        elif len(known) < len(tokens):
            calls, problem = None, "it has tokens that the tokenizer doesn't know"
        elif calls is None:
            problem = "it isn't calls"
        elif not self.automaton.accepts(compact([asdict(call) for call in calls]).encode("utf-8", "replace")):
            problem = "they aren't valid calls of these tools"
        return Answer(tuple(tokens), text, calls, ended, prompt, first, took, problem, steps)
