"""Runners that spare work where it is known what comes: a prompt's beginning read before, an answer foreseen.

Both are runners themselves. What they hand on is what the runner inside them computes for the same tokens.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import UsageError
from needle_export.generate.assistant import Runner

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]

CHUNK = 64
"""Pieces that prompts are read in; the beginning that is kept ends with one. Shorter ones cost more calls."""


@runtime_checkable
class Saves(Protocol):
    """A runner that can go back to where a sequence was."""

    context: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]; logits [T, V]."""

    def save(self) -> Any:
        """The sequence so far, for ``restore``."""

    def restore(self, saved: Any) -> None:
        """Go back to a sequence that this runner has saved, whatever it has read since."""


class PrefixRunner:
    """Reads the beginning that a prompt shares with the one before once.

    Prompts are read in the same pieces whether their beginning is known or not, so that a runner which restores its
    state exactly gives the same logits to the last bit.

    Args:
        runner: that reads; one that isn't :class:`Saves` reads everything anew.
        max_chunk: the longest chunk that one of its calls takes.
    """

    def __init__(self, runner: Runner, max_chunk: int) -> None:
        self.runner = runner
        self.context = runner.context
        self.chunk = max(1, min(CHUNK, max_chunk))
        self._last: tuple[int, ...] = ()
        #: A beginning, its logits, and the runner's state behind it.
        self._kept: tuple[tuple[int, ...], Floats, Any] | None = None
        self._fresh = True

    def reset(self) -> None:
        """Forget the sequence."""
        self._fresh = True

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]; logits [T, V]."""
        if not self._fresh:
            return self.runner.feed(tokens)
        self._fresh = False
        prompt = tuple(int(token) for token in tokens)
        if len(prompt) > self.context:
            raise UsageError(f"{len(prompt)} tokens don't fit in a context of {self.context}",
                             fix="build with a larger --context")
        # Of the prompt's last piece the logits are wanted, so it is read in any case.
        keep = min(_shared(prompt, self._last), max(0, len(prompt) - 1)) // self.chunk * self.chunk
        self._last = prompt
        parts, at = self._known(prompt)
        for start in range(at, len(prompt), self.chunk):
            piece = np.asarray(tokens[start : start + self.chunk], np.int64)
            parts.append(self.runner.feed(piece))
            if start + len(piece) == keep and isinstance(self.runner, Saves):
                self._kept = prompt[:keep], np.concatenate(parts), self.runner.save()
        return np.concatenate(parts) if parts else self.runner.feed(tokens)

    def save(self) -> Any:
        """As :class:`Saves`; of a runner that does."""
        assert isinstance(self.runner, Saves)
        return self.runner.save()

    def restore(self, saved: Any) -> None:
        """As :class:`Saves`; of a runner that does."""
        assert isinstance(self.runner, Saves)
        self.runner.restore(saved)
        self._fresh = False

    def _known(self, prompt: tuple[int, ...]) -> tuple[list[Floats], int]:
        """Logits of the prompt's beginning as far as it is known, and its length; the runner stands behind it."""
        if self._kept is not None and isinstance(self.runner, Saves):
            beginning, logits, saved = self._kept
            if len(beginning) < len(prompt) and prompt[: len(beginning)] == beginning:
                self.runner.restore(saved)
                return [logits], len(beginning)
        self.runner.reset()
        return [], 0


class ForeseeingRunner:
    """Reads an answer that is foreseen in one call, and goes back where another is given.

    For the reference beside an artifact, whose answers are mostly its own. Logits of a call of several tokens and those
    of several calls differ in their last bits, as those of a prompt read in one piece or in two do.

    Args:
        runner: that reads.
    """

    def __init__(self, runner: Saves) -> None:
        self.runner = runner
        self.context = runner.context
        self._next: Tokens = np.zeros(0, np.int64)
        self._begin()

    def foresee(self, tokens: tuple[int, ...]) -> None:
        """What is thought to be the answer to the next prompt."""
        self._next = np.array(tokens, np.int64)

    def reset(self) -> None:
        """Forget the sequence; what is foreseen stays."""
        self.runner.reset()
        self._begin()

    def _begin(self) -> None:
        self._foreseen: Tokens | None = None
        self._logits: Floats | None = None
        self._taken, self._prompt_read = 0, False
        self._start: Any = None

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T], the first time a prompt; logits [T, V]."""
        if not self._prompt_read:
            found = self.runner.feed(tokens)
            self._prompt_read, self._start = True, self.runner.save()
            self._foreseen, self._next = self._next[: self.context - len(tokens)], np.zeros(0, np.int64)
            return found
        if self._foreseen is not None:
            end = self._taken + len(tokens)
            if len(tokens) and np.array_equal(self._foreseen[self._taken : end], tokens):
                if self._logits is None:
                    self._logits = self.runner.feed(self._foreseen)
                found, self._taken = self._logits[self._taken : end], end
                return found
            self._leave()
        return self.runner.feed(tokens)

    def _leave(self) -> None:
        """Stand behind what was taken of the foreseen, and foresee no more."""
        assert self._foreseen is not None
        if self._logits is not None and self._taken < len(self._foreseen):
            self.runner.restore(self._start)
            if self._taken:
                self.runner.feed(self._foreseen[: self._taken])
        self._foreseen = None


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with alike."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
