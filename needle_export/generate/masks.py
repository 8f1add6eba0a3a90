"""Which tokens a state of an automaton admits: the vocabulary's bytes as a trie, walked for all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.generate.automaton import Automaton

#: The state in which nothing is admitted, the last row of a table.
_DEAD = -1


@dataclass(frozen=True)
class _Trie:
    """Prefixes of a vocabulary, shortest first; node 0 is the empty one.

    Attributes:
        levels: for each length from 1 on, (first node, parents of its nodes [N], their last bytes [N]).
        ends: the node of each token [V]; 0 of those without bytes.
        nodes: how many there are.
    """

    levels: tuple[tuple[int, NDArray[np.intp], NDArray[np.intp]], ...]
    ends: NDArray[np.intp]
    nodes: int


class Masks:
    """Masks over a vocabulary by state; each is computed once.

    A state's mask takes one lookup a level of the trie, for all its nodes together: from the state of each parent and
    the node's byte to the node's state.

    Args:
        automaton: whose states they are of.
        pieces: the bytes of each token; a token without bytes is never admitted.
    """

    def __init__(self, automaton: Automaton, pieces: Sequence[bytes]) -> None:
        self._trie = _trie(tuple(pieces))
        self._classes, self._table = _table(automaton)
        self._found: dict[int, NDArray[np.bool_]] = {}

    def admitted(self, state: int) -> NDArray[np.bool_]:
        """Which tokens [V] the automaton admits as a whole in a state; not to be written to."""
        if state not in self._found:
            states = np.full(self._trie.nodes, _DEAD, np.int32)
            states[0] = state
            for first, parents, last in self._trie.levels:
                states[first : first + len(parents)] = self._table[states[parents], self._classes[last]]
            mask = (states[self._trie.ends] != _DEAD) & (self._trie.ends > 0)
            mask.setflags(write=False)
            self._found[state] = mask
        return self._found[state]


@lru_cache(maxsize=4)
def _trie(pieces: tuple[bytes, ...]) -> _Trie:
    nodes = {b""} | {piece[:size] for piece in pieces for size in range(1, len(piece) + 1)}
    ordered = sorted(nodes, key=lambda prefix: (len(prefix), prefix))
    ids = {prefix: i for i, prefix in enumerate(ordered)}
    levels, start = [], 1
    while start < len(ordered):
        size = len(ordered[start])
        end = start
        while end < len(ordered) and len(ordered[end]) == size:
            end += 1
        parents = np.array([ids[prefix[:-1]] for prefix in ordered[start:end]], np.intp)
        levels.append((start, parents, np.array([prefix[-1] for prefix in ordered[start:end]], np.intp)))
        start = end
    return _Trie(tuple(levels), np.array([ids[piece] for piece in pieces], np.intp), len(ordered))


def _table(automaton: Automaton) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Classes of bytes that no edge tells apart [256], and the next state by state and class [S + 1, C]."""
    cuts = sorted({0} | {cut for edges in automaton.edges for lo, hi, _ in edges for cut in (lo, hi + 1) if cut < 256})
    classes: NDArray[Any] = np.searchsorted(cuts, np.arange(256), side="right") - 1
    table = np.full((len(automaton.edges) + 1, len(cuts)), _DEAD, np.int32)
    for state, edges in enumerate(automaton.edges):
        for lo, hi, target in edges:
            table[state, classes[lo] : classes[hi] + 1] = target
    return classes.astype(np.intp), table
