"""Codebook weights with a rotation: how numbers become levels and norms, and how they are had back.

Each row is padded with zeros to whole groups of g. A group is rotated by the normalised Walsh-Hadamard matrix H, which
makes its entries look normal whatever they were, and stored as its length and, for every entry of the unit vector, the
nearest of a few levels: ``w = (codebook[index] * norm) @ H``. H is symmetric and orthonormal, its own inverse.

The format is the public cactus-needle package's (3.2.8, ``needle.model.export`` and ``needle.model.quantize``), and
what :func:`encode` returns is what its exporter writes, bit for bit. That exporter writes 4 bits for every matrix: the
embedding, projections, lanes, engram tables and probe heads, kernels transposed so that rows are outputs. Its
quantisation in training knows the other widths too. A norm is the length of the rotated group, rounded to half
precision after the unit vector was made; so encoding again what was decoded doesn't give the same norms.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), P = I rounded up to whole groups, G groups of a
row, g elements of a group.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

TERNARY = 5
"""Code of three-level weights among the widths in bits."""

# Levels of a unit normal: means of the cells that are nearest to each, in 400,000 drawn values (RandomState(0)), after
# 200 rounds. They aren't symmetric, as the drawn values aren't. Source: needle.model.quantize, _lloyd_max_gaussian;
# stated rather than drawn, since the last bits of a mean depend on the order of a sum.
_LEVELS: dict[int, tuple[float, ...]] = {
    1: (-math.sqrt(2.0 / math.pi), math.sqrt(2.0 / math.pi)),
    2: (-1.5066708475715247, -0.45144060939344055, 0.4529474939511613, 1.5099326242547164),
    3: (-2.141247862845774, -1.3337164609389895, -0.7483982925010272, -0.23774016363616235,
        0.2500446195658646, 0.7555868210708537, 1.3379826350451236, 2.1476362705161423),
    4: (-2.709990028558534, -2.0444556051349227, -1.5947570221842273, -1.233336191082712,
        -0.9222139662739897, -0.6395373737252813, -0.37266394934485414, -0.11445072030649898,
        0.14380628677643073, 0.4039889754802918, 0.6726933686864701, 0.9614053009735016,
        1.2755257831234952, 1.6370587960592824, 2.0844263722579237, 2.7410141261982846),
    TERNARY: (-1.2240064, 0.0, 1.2240064),
}  # fmt: skip

#: Elements that are worked on at a time.
_AT_ONCE = 1 << 20


def padded(columns: int, group: int) -> int:
    """``columns`` rounded up to whole groups."""
    return -(-columns // group) * group


@functools.lru_cache(maxsize=4)
def hadamard(group: int) -> NDArray[np.float32]:
    """Normalised Walsh-Hadamard matrix [group, group], ``group`` a power of two.

    Built by doubling in float32 and divided by sqrt(group) once, so that entries carry the same bits as those the
    format's own reader uses.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < group:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: NDArray[np.float32] = (matrix / np.sqrt(group)).astype(np.float32)
    scaled.flags.writeable = False
    return scaled


@functools.lru_cache(maxsize=16)
def codebook(bits: int, group: int) -> NDArray[np.float32]:
    """Levels of the entries of a unit vector of ``group`` elements, ascending, float32 [levels].

    Raises:
        KeyError: for a width other than 1, 2, 3, 4 and ``TERNARY``.
    """
    scaled: NDArray[np.float32] = (np.array(_LEVELS[bits]) / np.sqrt(group)).astype(np.float32)
    scaled.flags.writeable = False
    return scaled


def encode(
    matrix: NDArray[np.float32], bits: int, group: int = 128
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Levels and norms of a matrix.

    A level is the nearest to an entry of the rotated group divided by its length, the lower of two equally near. A
    group of zeros has the norm 0, and levels nearest to 0.

    Args:
        matrix: float32 [O, I], finite.
        bits: 1, 2, 3, 4 or ``TERNARY``.
        group: g, a power of two.

    Returns:
        Indices into ``codebook(bits, group)``, uint8 [O, P], and norms float16 [O, G].

    Raises:
        KeyError: no such width.
        ValueError: the matrix isn't float32 [O, I] or isn't finite, ``group`` is no power of two, or a norm is beyond
            half precision.
    """
    levels = codebook(bits, group)
    if group < 1 or group & (group - 1):
        raise ValueError(f"a group of {group} is no power of two")
    if matrix.dtype != np.float32 or matrix.ndim != 2:
        raise ValueError(f"a float32 matrix is needed, not {matrix.dtype} {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("a weight with NaN or infinity can't be quantised")
    rows, width = len(matrix), padded(matrix.shape[1], group)
    indices, norms = np.empty((rows, width), np.uint8), np.empty((rows, width // group), np.float16)
    step = max(1, _AT_ONCE // max(1, width))
    with np.errstate(over="ignore"):
        for at in range(0, rows, step):
            part = slice(at, at + step)
            indices[part], norms[part] = _encode(np.ascontiguousarray(matrix[part]), width, levels, group)
    if not np.isfinite(norms).all():
        raise ValueError("a norm is beyond half precision")
    return indices, norms


def _encode(
    rows: NDArray[np.float32], width: int, levels: NDArray[np.float32], group: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    whole = np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    # One product of [G, g] @ [g, g] a row, as in ``decode``: the shape decides the order of the sums.
    rotated = whole.reshape(len(rows), -1, group) @ hadamard(group)
    lengths = np.sqrt(np.square(rotated).sum(-1, keepdims=True))
    unit = rotated / np.maximum(lengths, np.float32(1e-12))
    above = np.clip(np.searchsorted(levels, unit.reshape(-1)), 1, len(levels) - 1).reshape(unit.shape)
    # Both distances in float32, as the package has them: halfway between levels is no rounder number.
    lower = np.abs(unit - levels[above - 1]) <= np.abs(unit - levels[above])
    return (above - lower).astype(np.uint8).reshape(len(rows), width), lengths[:, :, 0].astype(np.float16)


def decode(
    indices: NDArray[np.uint8], norms: NDArray[np.float16], levels: NDArray[np.float32]
) -> NDArray[np.float32]:
    """What indices [O, P] into levels and norms [O, G] stand for, float32 [O, P].

    Bit for bit what the format's own reader returns. Rows don't depend on each other.
    """
    rows, width = indices.shape
    group = width // norms.shape[1]
    unit = levels[indices].reshape(rows, -1, group)
    unit *= norms.astype(np.float32)[:, :, None]
    # One product of [G, g] @ [g, g] a row: the shape decides the order of the BLAS sums, and with it the last bit, so
    # rows must not be merged into one large product.
    product: NDArray[np.float32] = (unit @ hadamard(group)).reshape(rows, width)
    return product
