"""Palettised weights: every entry is one of a few values, which a group of rows shares.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), N groups of rows, L levels of a palette.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Of Lloyd's iterations; from where they start, the error hardly falls after a dozen.
_ITERATIONS = 15

#: Cells of equal count between which the density is measured for the start.
_CELLS = 64

#: Entries that are sorted at once.
_AT_ONCE = 1 << 24


def palettize(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Round a weight to 2^bits levels for every ``group`` rows: the levels with the least squared error nearby.

    Levels start as dense as the cube root of the entries' density, which is best for many levels (P. F. Panter and
    W. Dite, "Quantization distortion in pulse-count modulation with nonuniform spacing of levels", 1951). Then each
    becomes the mean of the entries that are nearest to it, and so on (S. P. Lloyd, "Least squares quantization in PCM",
    1982). Levels are rounded to half precision at the end, and entries take the
    nearest of the rounded ones; halfway between two, the upper. A group of no more values than levels keeps its values,
    as far as half precision holds them.

    Args:
        weight: float32 [O, I], finite.
        bits: 1 to 8.
        group: rows that share a palette, a divisor of O.

    Returns:
        Indices uint8 [O, I], and levels float16 [O / group, 2^bits], ascending.

    Raises:
        ValueError: ``group`` doesn't divide O, or a level is beyond half precision.
    """
    rows, columns = weight.shape
    if group < 1 or rows % group:
        raise ValueError(f"groups of {group} don't divide {rows} rows")
    entries = weight.reshape(rows // group, group * columns)
    step = max(1, _AT_ONCE // entries.shape[1])
    found = [_palettes(entries[i : i + step], 2**bits) for i in range(0, len(entries), step)]
    indices, levels = (torch.cat([f[i] for f in found]) for i in range(2))
    if not bool(torch.isfinite(levels).all()):
        raise ValueError("a level is beyond half precision")
    return indices.reshape(rows, columns), levels


def _palettes(entries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of [N, n] entries: indices [N, n] and levels [N, L]."""
    groups, size = entries.shape
    ordered = entries.sort(dim=1).values
    # Sums up to each place, in float64: means of neighbouring entries are differences of large sums.
    sums = torch.zeros(groups, size + 1, dtype=torch.float64)
    torch.cumsum(ordered, 1, dtype=torch.float64, out=sums[:, 1:])
    levels = _start(ordered, count)
    for _ in range(_ITERATIONS):
        edges = torch.searchsorted(ordered, _between(levels))
        edges = torch.cat([edges.new_zeros(groups, 1), edges, edges.new_full((groups, 1), size)], 1)
        counts = edges.diff(dim=1)
        means = sums.gather(1, edges).diff(dim=1) / counts.clamp(min=1)
        following = torch.where(counts > 0, means.float(), levels)
        if torch.equal(following, levels):
            break
        levels = following
    few = ordered.diff(dim=1).count_nonzero(dim=1) < count
    if bool(few.any()):
        levels[few] = _own_values(ordered[few], count)
    levels = levels.half()
    indices = torch.searchsorted(_between(levels.float()), entries, right=True)
    return indices.to(torch.uint8), levels


def _own_values(ordered: Tensor, count: int) -> Tensor:
    """The different values of sorted entries [N, n], of which there are at most L, and the last again: [N, L]."""
    place = torch.zeros(ordered.shape, dtype=torch.int64)
    torch.cumsum(ordered.diff(dim=1) != 0, 1, out=place[:, 1:])
    return ordered[:, -1:].repeat(1, count).scatter_(1, place, ordered)


def _start(ordered: Tensor, count: int) -> Tensor:
    """Levels [N, L] as dense as the cube root of the density of sorted entries [N, n]."""
    groups, size = ordered.shape
    ends = ordered[:, torch.arange(_CELLS + 1) * (size - 1) // _CELLS].double()
    # A cell as wide as d has the density 1/d, and so d^(2/3) of the levels.
    mass = torch.zeros(groups, _CELLS + 1, dtype=torch.float64)
    torch.cumsum(ends.diff(dim=1) ** (2 / 3), 1, out=mass[:, 1:])
    wanted = (torch.arange(count) + 0.5) / count * mass[:, -1:]
    cell = torch.searchsorted(mass[:, 1:-1].contiguous(), wanted)
    left, right = mass.gather(1, cell), mass.gather(1, cell + 1)
    share = (wanted - left) / (right - left).clamp(min=1e-30)
    low, high = ends.gather(1, cell), ends.gather(1, cell + 1)
    return (low + share * (high - low)).float()


def _between(levels: Tensor) -> Tensor:
    """Halfway between neighbouring levels: [N, L] -> [N, L - 1]."""
    return ((levels[:, 1:] + levels[:, :-1]) / 2).contiguous()


def dequantize_palette(indices: Tensor, levels: Tensor) -> Tensor:
    """What indices [O, I] into levels [N, L] stand for, float32 [O, I]."""
    rows, columns = indices.shape
    grouped = indices.reshape(levels.shape[0], -1).long()
    return levels.float().gather(1, grouped).reshape(rows, columns)
