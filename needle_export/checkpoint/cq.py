"""Codebook weights as a container stores them: packed indices and norms.

A [out, in] matrix is cut along ``in`` (zero-padded to whole groups) into groups of g elements. A group
is ``w = (codebook[idx] * norm) @ H`` with one index an element, one float16 norm a group and H the
normalised Walsh-Hadamard matrix [g, g] (symmetric and orthonormal). Format and formula: the container
description in the public cactus-needle package, ``needle.model.export``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from needle_export.weights.cq import TERNARY, decode, padded

MIN_GROUP, MAX_GROUP = 8, 1024

# Rows expanded at a time: index, unit and product arrays of a slice stay small beside the result.
_SLICE_ELEMENTS = 1 << 20


def index_bits(bits: int) -> int:
    """Bits an index takes in the stream, for a record's ``bits`` code."""
    return 2 if bits == TERNARY else bits


def row_bytes(in_pad: int, bits: int) -> int:
    """Packed bytes of one row of ``in_pad`` indices."""
    return in_pad * index_bits(bits) // 8


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """One quantised matrix exactly as the file has it.

    Attributes:
        name: tensor name, with ``#layer`` when it is one layer of a stacked tensor.
        shape: (out, in) of the matrix. Linear kernels are stored transposed, output rows first.
        bits: 1, 2, 3 or 4, or 5 for ternary.
        group: elements of a row that share a norm, g.
        packed: indices, uint8 [out, row_bytes], a view on the file.
        norms: float16 [out, groups], a view on the file.
        codebook: float32 [levels]; an index points into it.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    group: int
    packed: NDArray[np.uint8]
    norms: NDArray[np.float16]
    codebook: NDArray[np.float32]

    @property
    def in_pad(self) -> int:
        """Row length in elements, padded to whole groups."""
        return padded(self.shape[1], self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of indices and norms in the file."""
        return self.packed.nbytes + self.norms.nbytes

    def indices(self) -> NDArray[np.uint8]:
        """Codebook indices, uint8 [out, in_pad]."""
        return unpack(self.packed, self.bits, self.in_pad)

    def dequantize(self) -> NDArray[np.float32]:
        """The matrix, float32 [out, in], bit for bit what the format's own reader returns."""
        out, in_dim = self.shape
        result = np.empty((out, in_dim), np.float32)
        step = max(1, _SLICE_ELEMENTS // self.in_pad)
        for start in range(0, out, step):
            rows = slice(start, min(start + step, out))
            index = unpack(self.packed[rows], self.bits, self.in_pad)
            result[rows] = decode(index, self.norms[rows], self.codebook)[:, :in_dim]
        return result

    def rows(self, start: int, stop: int, name: str) -> PackedTensor:
        """Rows ``start`` to ``stop`` under another name, sharing the bytes."""
        return PackedTensor(name, (stop - start, self.shape[1]), self.bits, self.group,
                            self.packed[start:stop], self.norms[start:stop], self.codebook)

    def take(self, rows: NDArray[np.intp]) -> PackedTensor:
        """The named rows, copied, under the same name."""
        return PackedTensor(self.name, (len(rows), self.shape[1]), self.bits, self.group,
                            self.packed[rows], self.norms[rows], self.codebook)

    def renamed(self, name: str) -> PackedTensor:
        """The same matrix under another name, sharing the bytes."""
        return self.rows(0, self.shape[0], name)


def unpack(packed: NDArray[np.uint8], bits: int, in_pad: int) -> NDArray[np.uint8]:
    """Indices uint8 [rows, in_pad] from a stream of ``bits`` each, lowest bit first.

    Ternary crumbs 3, 0, 1 (-1, 0, +1) become indices 0, 1, 2.
    """
    width = index_bits(bits)
    rows = len(packed)
    if width == 3:
        chunks = packed.reshape(rows, in_pad // 8, 3).astype(np.uint32)
        word = chunks[..., 0] | chunks[..., 1] << 8 | chunks[..., 2] << 16
        shifts = np.arange(0, 24, 3, dtype=np.uint32)
        index = (word[..., None] >> shifts & 7).astype(np.uint8)
    else:
        shifts8 = np.arange(0, 8, width, dtype=np.uint8)
        index = packed[..., None] >> shifts8 & np.uint8((1 << width) - 1)
    index = index.reshape(rows, in_pad)
    if bits == TERNARY:
        index = (index + np.uint8(1)) & np.uint8(3)
    return index


def has_invalid_crumbs(packed: NDArray[np.uint8]) -> bool:
    """Whether a ternary stream holds the fourth pattern (binary 10), which names no level."""
    flat = packed.reshape(-1)
    for start in range(0, len(flat), _SLICE_ELEMENTS):
        part = flat[start:start + _SLICE_ELEMENTS]
        if np.any((part >> 1) & ~part & np.uint8(0x55)):
            return True
    return False
