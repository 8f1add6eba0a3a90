"""Small deterministic automata over bytes: found by exploring, trimmed, merged, minimised."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from needle_export.generate.automaton import Edge

S = TypeVar("S", bound=Hashable)

#: States that an automaton may have, whole or in parts.
MAX_STATES = 100_000


class TooManyStates(Exception):
    """An automaton would have more than ``MAX_STATES``."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """An automaton whose start is state 0; every state can reach one that accepts."""

    edges: tuple[tuple[Edge, ...], ...]
    accept: frozenset[int]

    def accepts(self, data: bytes) -> bool:
        """Whether a whole text is admitted."""
        state = 0
        for byte in data:
            found = next((target for lo, hi, target in self.edges[state] if lo <= byte <= hi), None)
            if found is None:
                return False
            state = found
        return state in self.accept


def explore(
    start: S, steps: Callable[[S], Iterable[tuple[int, int, S]]], accepts: Callable[[S], bool]
) -> Fragment | None:
    """The automaton that a rule describes, minimal, or None where it admits nothing.

    Args:
        start: the first state.
        steps: edges (lo, hi, target) of a state, disjoint.
        accepts: whether a text may end in a state.

    Raises:
        TooManyStates: before it was minimised.
    """
    ids: dict[S, int] = {start: 0}
    order = [start]
    edges: list[list[Edge]] = []
    while len(edges) < len(order):
        found: list[Edge] = []
        for lo, hi, target in steps(order[len(edges)]):
            if target not in ids:
                ids[target] = len(order)
                order.append(target)
                if len(order) > MAX_STATES:
                    raise TooManyStates
            found.append((lo, hi, ids[target]))
        edges.append(sorted(found))
    return minimised(edges, [accepts(state) for state in order])


def combined(fragments: Sequence[Fragment], exactly_one: bool) -> Fragment | None:
    """What one of several automata admits, or exactly one of them; None where that is nothing."""

    def steps(states: tuple[int, ...]) -> Iterable[tuple[int, int, tuple[int, ...]]]:
        rows = [f.edges[s] if s >= 0 else () for f, s in zip(fragments, states, strict=True)]
        cuts = sorted({cut for row in rows for lo, hi, _ in row for cut in (lo, hi + 1)})
        for lo, end in itertools.pairwise(cuts):
            after = tuple(next((t for a, b, t in row if a <= lo <= b), -1) for row in rows)
            if max(after) >= 0:
                yield lo, end - 1, after

    def accepts(states: tuple[int, ...]) -> bool:
        count = sum(s in f.accept for f, s in zip(fragments, states, strict=True))
        return count == 1 if exactly_one else count > 0

    return explore((0,) * len(fragments), steps, accepts)


def minimised(edges: Sequence[Sequence[Edge]], accept: Sequence[bool]) -> Fragment | None:
    """The least automaton that admits the same; None where that is nothing. State 0 is the start.

    By refining the split into accepting states and others until no two states of a class lead into different classes.
    """
    useful = _useful(edges, accept)
    if 0 not in useful:
        return None
    rows = [[e for e in row if e[2] in useful] for row in edges]
    classes = [int(a) for a in accept]
    count = len({classes[s] for s in useful})
    while True:
        names: dict[tuple[int, tuple[Edge, ...]], int] = {}
        new = list(classes)
        for state in sorted(useful):
            key = (classes[state], joined((lo, hi, classes[t]) for lo, hi, t in rows[state]))
            new[state] = names.setdefault(key, len(names))
        classes = new
        if len(names) == count:
            break
        count = len(names)
    # The start is the first state, hence class 0.
    found: dict[int, tuple[Edge, ...]] = {}
    for state in sorted(useful):
        found.setdefault(classes[state], joined((lo, hi, classes[t]) for lo, hi, t in rows[state]))
    return Fragment(tuple(found[c] for c in range(count)), frozenset(classes[s] for s in useful if accept[s]))


def joined(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Edges in order, neighbours that lead to the same state made one."""
    found: list[Edge] = []
    for lo, hi, target in sorted(edges):
        if found and found[-1][2] == target and found[-1][1] + 1 == lo:
            found[-1] = (found[-1][0], hi, target)
        else:
            found.append((lo, hi, target))
    return tuple(found)


def _useful(edges: Sequence[Sequence[Edge]], accept: Sequence[bool]) -> set[int]:
    """States that can reach one that accepts."""
    before: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for _, _, target in row:
            before[target].append(state)
    useful = {state for state, good in enumerate(accept) if good}
    waiting = list(useful)
    while waiting:
        for state in before[waiting.pop()]:
            if state not in useful:
                useful.add(state)
                waiting.append(state)
    return useful
