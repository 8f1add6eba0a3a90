"""What may come next in an answer: its markers in order, and between them what the grammar admits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput
from needle_export.generate.automaton import Automaton
from needle_export.generate.masks import Masks
from needle_export.generate.prompt import CALLS_END, CALLS_START, MARKERS, THINK_END, THINK_START


class Tokenizer(Protocol):
    """What is needed of a tokenizer; ``checkpoint.text`` has one."""

    bos_id: int
    eos_id: int
    unk_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, none for its beginning or end."""

    def decode(self, ids: list[int]) -> str:
        """The text of tokens."""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; empty for control pieces."""

    def marker(self, text: str) -> int | None:
        """The token of a marker such as ``<tool_call>``."""


def need_marker(tokenizer: Tokenizer, text: str) -> int:
    """The token of a marker.

    Raises:
        BadInput: the tokenizer has none.
    """
    token = tokenizer.marker(text)
    if token is None:
        raise BadInput(f"it has no piece {text}", where="tokenizer", fix="give the tokenizer of a Needle 3 model")
    return token


class Grammar:
    """The automaton of a set of tools with a tokenizer's masks over it, and the tokens of the answer's frame."""

    def __init__(self, automaton: Automaton, tokenizer: Tokenizer) -> None:
        self.automaton = automaton
        self.size = tokenizer.vocab_size
        self.start, self.end = need_marker(tokenizer, CALLS_START), need_marker(tokenizer, CALLS_END)
        self.think, self.thought = tokenizer.marker(THINK_START), tokenizer.marker(THINK_END)
        # Markers are no text, though their pieces have letters: they end or begin parts of an answer.
        apart = {tokenizer.marker(text) for text in MARKERS} | {tokenizer.unk_id}
        self.pieces = [b"" if i in apart else tokenizer.token_bytes(i) for i in range(self.size)]
        self.masks = Masks(automaton, self.pieces)
        #: What the tokenizer itself puts in front of a text that begins with a marker, a space's piece or nothing.
        self.front = tokenizer.encode(CALLS_START)[:-1]
        #: What comes between thoughts and calls.
        self.between: list[int] = []
        if self.think is not None and self.thought is not None:
            whole = tokenizer.encode(f"{THINK_START}.{THINK_END}\n{CALLS_START}")
            self.between = whole[whole.index(self.thought) + 1 : -1]


class Constraint:
    """Follows one answer: which tokens may come next, and whether it is whole."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._forced = list(grammar.front)
        #: Where in the answer: before its calls, in its thoughts, behind them, in its calls.
        self._part = "front"
        self._state = 0
        self.done = False

    def admitted(self) -> NDArray[np.bool_]:
        """Which tokens [V] of the tokenizer may come next.

        Raises:
            BadInput: there is none, because the vocabulary lacks a piece for what must come.
        """
        grammar = self._grammar
        if self._forced:
            return self._only([self._forced[0]])
        if self._part == "front":
            thinks = grammar.think is not None and grammar.thought is not None
            return self._only([grammar.start, grammar.think] if thinks else [grammar.start])
        if self._part == "behind":
            return self._only([grammar.start])
        if self._part == "thoughts":
            mask = np.array([bool(piece) for piece in grammar.pieces])
            mask[grammar.thought] = True
            return mask
        mask = grammar.masks.admitted(self._state)
        if self._state in grammar.automaton.accept:
            mask = mask.copy()
            mask[grammar.end] = True
        if not mask.any():
            raise BadInput("it has no piece for what must come next in a call", where="tokenizer",
                           fix="give a tokenizer with a piece for each byte")
        return mask

    def push(self, token: int) -> None:
        """Go on with an admitted token."""
        grammar = self._grammar
        if self._forced:
            self._forced.pop(0)
        elif token == grammar.start:
            self._part = "calls"
        elif self._part == "front":
            self._part = "thoughts"
        elif self._part == "thoughts":
            if token == grammar.thought:
                self._part, self._forced = "behind", list(grammar.between)
        elif token == grammar.end:
            self.done = True
        else:
            state = grammar.automaton.step(self._state, grammar.pieces[token])
            assert state is not None  # of an admitted token
            self._state = state

    def _only(self, tokens: Sequence[int | None]) -> NDArray[np.bool_]:
        mask = np.zeros(self._grammar.size, np.bool_)
        mask[[token for token in tokens if token is not None]] = True
        return mask
