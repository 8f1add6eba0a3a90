"""A matrix in codebook form, before or after its rotation; see ``weights.cq`` for the format.

Dimension letters: O outputs (rows), I inputs (columns, whole groups), G groups of a row, g elements of a group,
L levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from needle_export.weights.cq import TERNARY, decode


@dataclass(frozen=True, eq=False)
class Codes:
    """Indices into levels, and a norm a group.

    Attributes:
        bits: an index takes.
        indices: uint8 [O, I].
        norms: float16 [O, G].
        levels: float32 [L].
        imported: they are the checkpoint's own, and were not made from floats.
    """

    bits: int
    indices: NDArray[np.uint8]
    norms: NDArray[np.float16]
    levels: NDArray[np.float32]
    imported: bool = False

    @property
    def group(self) -> int:
        """g."""
        columns, groups = self.indices.shape[1], self.norms.shape[1]
        return int(columns // groups)

    @property
    def form(self) -> str:
        """As a report has it: ``cq4x128``, or ``codebook4x128`` of the checkpoint; its 5 stands for three levels."""
        width = TERNARY if len(self.levels) == 3 else self.bits
        return f"{'codebook' if self.imported else 'cq'}{width}x{self.group}"

    @property
    def nbytes(self) -> int:
        """Of packed indices and norms."""
        return math.prod(self.indices.shape) * self.bits // 8 + self.norms.nbytes

    def rotated(self) -> NDArray[np.float32]:
        """Levels times norms, without the rotation, [O, I]."""
        rows, columns = self.indices.shape
        units = self.levels[self.indices].reshape(rows, -1, self.group)
        units *= self.norms.astype(np.float32)[:, :, None]
        return units.reshape(rows, columns)

    def matrix(self) -> NDArray[np.float32]:
        """The matrix that they stand for, [O, I], bit for bit what the format's own reader returns."""
        return decode(self.indices, self.norms, self.levels)


def joined(several: Sequence[Codes]) -> Codes:
    """Rows of several below each other.

    Raises:
        ValueError: their levels or groups differ.
    """
    first = several[0]
    if any(c.form != first.form or not np.array_equal(c.levels, first.levels) for c in several):
        raise ValueError(f"{', '.join(dict.fromkeys(c.form for c in several))} don't share their levels")
    if len(several) == 1:
        return first
    indices, norms = (np.concatenate([getattr(c, name) for c in several]) for name in ("indices", "norms"))
    return Codes(first.bits, indices, norms, first.levels, first.imported)
