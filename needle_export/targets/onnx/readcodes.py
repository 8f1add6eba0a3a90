"""Matrices in codebook form as a finished graph makes numbers of them: packed indices, levels of a byte, and norms.

Dimension letters: O outputs (rows of a matrix), I inputs (its columns), G groups of a row, g elements of a group,
P indices in a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Readers = dict[str, list[tuple[Any, int]]]


class Strange(Exception):
    """An op that reads a constant otherwise than as a matrix, in one clause."""


@dataclass(frozen=True)
class Numbers:
    """Where a graph has multiplied levels by norms.

    Attributes:
        value: name of the numbers, [O, I] or rows of it.
        levels: of the constant [256, P] that levels are read from.
        norms: of the constant [O, G].
        group: g.
        first: the node that reads the indices.
        looked_up: these are the rows of a lookup.
    """

    value: str
    levels: str
    norms: str
    group: int
    first: Any
    looked_up: bool


class Nodes:
    """Nodes of a graph by what they read and make.

    Args:
        ints: the numbers of a constant by name, or None.
        attributes: of a node.
    """

    def __init__(
        self, nodes: Any, readers: Readers, ints: Callable[[str], list[int] | None],
        attributes: Callable[[Any], dict[str, Any]],
    ) -> None:
        self.makers = {name: node for node in nodes for name in node.output}
        self.readers, self.ints, self.attributes = readers, ints, attributes

    def numbers(self, name: str) -> Iterator[Numbers | tuple[Any, str]]:
        """What is made of packed indices, once for each op that reads them; or the op and why it can't be told."""
        for node, index in self.readers.get(name, []):
            try:
                if node.op_type == "Cast":
                    yield self._numbers(node, node, None)
                elif node.op_type == "Gather" and index == 0 and self.attributes(node).get("axis", 0) == 0:
                    yield self._numbers(node, self._only(node.output[0], "Cast"), node.input[1])
                else:
                    raise Strange(f"{node.op_type} reads it, not as indices of rows")
            except Strange as fault:
                yield node, str(fault)

    def places(self, numbers: Numbers) -> Iterator[tuple[Any, str, int]]:
        """Products that read numbers: the node, by ``rows``, ``columns`` or ``slice``, and which of several matrices.

        Raises:
            Strange: something else reads them.
        """
        for node, index in self.readers.get(numbers.value, []):
            if node.op_type == "Concat" and self.attributes(node).get("axis") == 0:
                turned = self._only(self._only(node.output[0], "Reshape").output[0], "Transpose")
                if self.attributes(turned).get("perm") != [0, 2, 1]:
                    raise Strange(f"{turned.op_type} turns it otherwise than by its last axes")
                yield from ((n, "columns", index) for n in self._products(turned.output[0]))
            elif node.op_type == "Transpose" and self.attributes(node).get("perm") == [1, 0]:
                yield from ((n, "columns", -1) for n in self._products(node.output[0]))
            elif node.op_type == "Slice" and index == 0:
                yield node, "slice", -1
            elif node.op_type == "Gemm" and index == 1:
                yield node, "rows", -1
            else:
                raise Strange(f"{node.op_type} reads it, not as a matrix of rows")

    def _products(self, name: str) -> Iterator[Any]:
        for node, index in self.readers.get(name, []):
            if node.op_type != "MatMul" or index != 1:
                raise Strange(f"{node.op_type} reads it, not as a matrix of columns")
            yield node

    def _numbers(self, first: Any, cast: Any, at: str | None) -> Numbers:
        """From the op that widens indices on."""
        levels = self._only(cast.output[0], "Gather", 1)
        if self.attributes(levels).get("axis", 0) != 0:
            raise Strange("its levels are no rows of a table")
        units = self._only(levels.output[0], "Reshape")
        times = self._only(units.output[0], "Mul")
        whole = self._only(times.output[0], "Reshape")
        (other,) = [n for n in times.input if n != units.output[0]] or [""]
        lengths = self._made(other, "Reshape")
        norms = self._made(lengths.input[0], "Cast").input[0]
        if at is not None:
            rows = self._made(norms, "Gather")
            if rows.input[1] != at or self.attributes(rows).get("axis", 0) != 0:
                raise Strange("its norms are read by other indices")
            norms = rows.input[0]
        one, other_shape = self.ints(units.input[1]), self.ints(lengths.input[1])
        if one is None or len(one) != 3 or other_shape != [*one[:2], 1]:
            raise Strange("its levels and norms aren't multiplied by groups")
        if (self.ints(whole.input[1]) or [])[1:] != [one[1] * one[2]]:
            raise Strange("its groups aren't put back into rows")
        return Numbers(whole.output[0], levels.input[0], norms, one[2], first, at is not None)

    def _only(self, name: str, kind: str, place: int = 0) -> Any:
        """The one node that reads a value."""
        found = self.readers.get(name, [])
        if len(found) != 1 or found[0][0].op_type != kind or (kind != "Mul" and found[0][1] != place):
            raise Strange(f"{found[0][0].op_type if found else 'nothing'} reads it where {kind} should")
        return found[0][0]

    def _made(self, name: str, kind: str) -> Any:
        node = self.makers.get(name)
        if node is None or node.op_type != kind:
            raise Strange(f"its norms come from {node.op_type if node is not None else 'nowhere'}, not from {kind}")
        return node
