"""The contract of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from needle_export.graph.program import Program


@dataclass(frozen=True)
class Left:
    """A place that a pass looked at and left, and why."""

    op: str
    layer: int
    node: str
    reason: str


@dataclass
class Fired:
    """What a pass did: how often each of its rewrites fired, and what it left."""

    counts: dict[str, int] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)

    def add(self, name: str, times: int = 1) -> None:
        """Count a rewrite."""
        self.counts[name] = self.counts.get(name, 0) + times


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program in place.

    Attributes:
        name: as the report and ``--help`` call it.
        needs: facts about the program that must hold before.
        leaves: facts that hold after.
        run: does it and says how often.
    """

    name: str
    needs: frozenset[str]
    leaves: frozenset[str]
    run: Callable[[Program], Fired]
