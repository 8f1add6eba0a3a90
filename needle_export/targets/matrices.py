"""Matrices as a finished artifact computes with them, read back through its graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowsOf:
    """Which rows a stored matrix says that it holds.

    Attributes:
        parameters: of the step, by path, whose rows lie below each other in this order.
        site: which of the matrices that each of them stacks, or -1 where they are matrices themselves.
        start, stop: of the rows of all; no stop: to the last.
        columns: how many of the first are stored, where the others meet zeros only; None: all.
    """

    parameters: tuple[str, ...]
    site: int = -1
    start: int = 0
    stop: int | None = None
    columns: int | None = None

    def __str__(self) -> str:
        rows = "" if (self.start, self.stop) == (0, None) else f", rows {self.start} to {self.stop}"
        rows += "" if self.columns is None else f", columns 0 to {self.columns}"
        site = "" if self.site < 0 else f", site {self.site}"
        return " + ".join(self.parameters) + site + rows


def coded_form(group: int) -> str:
    """The form of a matrix in codebook form: whose codes they are, and of how many levels, a file doesn't say."""
    return f"codesx{group}"


@dataclass(frozen=True)
class Place:
    """An op that reads a matrix: its graph and name, and the block that it computes for (-1: none, or unknown)."""

    name: str
    block: int


@dataclass(frozen=True)
class ReadMatrix:
    """A matrix as a finished artifact computes with it, read through its graphs.

    Attributes:
        claim: what the artifact says that it is.
        folded: constants went into its numbers, as the artifact says: they are nobody's any more.
        values: [O, I] as stored: float16, float32, integers as int8, or indices into a palette as uint8; of a matrix in
            codebook form the levels that its indices point to, float32, without the rotation.
        scales: float32, what the values are multiplied by: [O] behind the op, or the matrix' own [O, I / K], each of K
            columns of a row, as norms are; of a palette the levels [O, L] of each row. None if there is nothing of the
            kind.
        places: the ops that read these values with these scales.
        fault: why it can't be read like this, or empty; then values and scales are empty too.
        behind: float32 [O], what multiplies the rows' results behind an op whose matrix has scales of its own, if
            anything does: a factor of its rows, or something else's.
        bits: that a value takes in the file.
        form: by the name that ``weights.forms`` has for it, of what is stored in blocks or palettes; of codes
            :func:`coded_form`; else empty.
        own: scales [O] are a factor of the op that reads it. Else they stand behind the op, where they may belong to
            something else if the matrix has none.
        bytes: that values and scales take in the files, where that isn't told by ``bits``.
    """

    claim: RowsOf
    folded: bool
    values: NDArray[Any]
    scales: NDArray[np.float32] | None
    places: tuple[Place, ...]
    fault: str = ""
    behind: NDArray[np.float32] | None = None
    bits: int = 0
    form: str = ""
    own: bool = False
    bytes: int | None = None

    @property
    def dtype(self) -> str:
        """Of its values, or its form."""
        return self.form or str(self.values.dtype.name)

    def row_bytes(self, factors: bool) -> int:
        """Bytes of a row in the file: values, a half for each scale of its own, a float where it has ``factors``."""
        if self.bytes is not None:
            return self.bytes // len(self.values)
        bits = self.bits or 8 * self.values.itemsize
        runs = len(self.scales[0]) if self.scales is not None and self.scales.ndim == 2 else 0
        return bits * len(self.values[0]) // 8 + 2 * runs + 4 * factors
