"""The contract of a pass."""

from __future__ import annotations

from collections import Counter
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
    """What a pass did: where each of its rewrites fired (rewrite, layer), and what it left."""

    places: list[tuple[str, int]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def add(self, name: str, layer: int = -1) -> None:
        """Note a rewrite."""
        self.places.append((name, layer))

    @property
    def counts(self) -> dict[str, int]:
        """Firings by rewrite."""
        return dict(Counter(name for name, _ in self.places))


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
