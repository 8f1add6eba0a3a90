"""How long work tells whoever waits for it where it is, without knowing who that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One running stage."""

    def advance(self, n: int = 1) -> None:
        """Says that ``n`` more of the stage's total are done."""


class Progress(Protocol):
    """Where stages are announced."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Task]:
        """A stage that runs while the context is open.

        Args:
            name: what is being done, as a person would say it.
            total: how much there is to do, in any unit; None when that isn't known.
        """


class _NullTask:
    def advance(self, n: int = 1) -> None:
        """Nobody listens."""


class NullProgress:
    """Progress for callers that don't want any."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Task]:
        """A stage that nobody sees."""
        yield _NullTask()
