"""A deterministic automaton over bytes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

#: (lo, hi, target): bytes lo to hi, both included, lead to the state ``target``.
Edge = tuple[int, int, int]


@dataclass(frozen=True)
class Automaton:
    """States are numbered from 0, the start; every state can still reach one that accepts.

    Attributes:
        edges: of each state, ascending and disjoint.
        accept: the states in which a text may end.
        notes: what of the schemas isn't enforced, or is narrower than it is written there, a sentence each.
    """

    edges: tuple[tuple[Edge, ...], ...]
    accept: frozenset[int]
    notes: tuple[str, ...] = ()

    def step(self, state: int, data: bytes) -> int | None:
        """The state after some bytes, or None where the automaton doesn't admit them there."""
        for byte in data:
            edges = self.edges[state]
            at = bisect_right(edges, (byte, 256, 0)) - 1
            if at < 0 or edges[at][1] < byte:
                return None
            state = edges[at][2]
        return state

    def accepts(self, data: bytes) -> bool:
        """Whether a whole text is admitted."""
        return self.step(0, data) in self.accept

    def as_dict(self) -> dict[str, Any]:
        """For JSON: ``{"start": 0, "accept": [states], "edges": [[[lo, hi, target], ..] for each state]}``."""
        return {
            "start": 0,
            "accept": sorted(self.accept),
            "edges": [[list(edge) for edge in edges] for edges in self.edges],
        }
