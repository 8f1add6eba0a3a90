"""Scales of integer blocks by least squared error, instead of by the greatest value alone.

Rounding to nearest gives a block the least scale at which its greatest value is still a level. A smaller one clips that
value and brings the others nearer, a larger one may do so by chance. Which is best is found by trying.

What is found here is a *fixed point* of rounding to nearest: ``quantize_blocks`` of the weight that the levels stand
for gives the same levels and the same scales, bit for bit. So a weight can be replaced by a better one that lies on
levels, and whatever rounds it later, in a target or in the reference, changes nothing. Two kinds of blocks have the
property. Either some level is the greatest, top = 2^(bits-1) - 1: then the greatest value is top * scale, which float32
holds exactly, and a top-th of it is the scale again. Or the scale is the least that there is, which smaller ones are
raised to.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), K columns that share a scale, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needle_export.weights.linear import dequantize_blocks, quantize_blocks

#: The least scale.
TINY = torch.finfo(torch.float16).tiny

#: Scales that are tried first, as parts of the plain one; the least serves a block with one outlier.
_LEAST, _COARSE = 0.1, 48

#: Scales that are tried around the best of these, to either side of it.
_FINE = 4

#: How often the best scale for given levels and the best levels for given scales follow each other.
_ROUNDS = 3

#: Values that are worked on at once, so that they stay in a processor's cache.
_AT_ONCE = 1 << 18


def search_blocks(weight: Tensor, bits: int, block: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Levels and scales of a weight with the least squared error nearby, never more than rounding to nearest has.

    Tried are parts of the plain scale from a tenth to the greatest at which the greatest value still has the greatest
    level, in equal ratios; then finer ones around the best; then levels and scales in turn, where the scale with the
    least squared error for given levels v is sum(h w v) / sum(h v^2). Every scale is rounded to half precision before
    its levels are chosen.

    Args:
        weight: float32 [O, I], finite.
        bits: 2 to 8.
        block: K, a divisor of I.
        importance: what the squared error of a column weighs, float32 [I], none negative; None: all alike.

    Returns:
        Values int8 [O, I] and scales float16 [O, I / K], as ``quantize_blocks`` returns them, and a fixed point of it.

    Raises:
        ValueError: as ``quantize_blocks``, or ``importance`` doesn't fit.
    """
    values, scales = quantize_blocks(weight, bits, block)
    rows, columns = weight.shape
    if importance is None:
        importance = torch.ones(columns)
    if importance.shape != (columns,) or not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise ValueError(f"importance must be {columns} finite numbers, none negative")
    # Columns without importance count as much as makes them follow the others where these don't decide.
    mean = float(importance.double().mean())
    h = (importance / mean if mean > 0 else torch.ones(columns)).float().clamp(min=1e-6)
    step = max(1, _AT_ONCE // columns)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        runs = weight[part].reshape(-1, block)
        weights = h.reshape(1, -1, block).expand(len(weight[part]), -1, -1).reshape(-1, block)
        found = _Blocks(runs, weights, 2 ** (bits - 1) - 1, scales[part].reshape(-1))
        found.search()
        scales[part] = found.scales.reshape(scales[part].shape)
        values[part] = found.levels(found.scales).to(torch.int8).reshape(values[part].shape)
    return values, scales


def searched(weight: Tensor, bits: int, block: int, importance: Tensor | None = None) -> Tensor:
    """What the levels of :func:`search_blocks` stand for, float32 [O, I]."""
    return dequantize_blocks(*search_blocks(weight, bits, block, importance))


class _Blocks:
    """Blocks [N, K] with the best scale found so far, float16 [N]."""

    def __init__(self, runs: Tensor, weights: Tensor, top: int, scales: Tensor) -> None:
        self.runs, self.weights, self.top = runs, weights, top
        self.scales = scales.clone()
        self.errors = self._error(self.scales, self.levels(self.scales))

    def levels(self, scales: Tensor) -> Tensor:
        """Nearest levels at scales float16 [N]: float32 [N, K]."""
        return torch.round(self.runs / scales.float().unsqueeze(-1)).clamp_(-self.top, self.top)

    def _error(self, scales: Tensor, levels: Tensor) -> Tensor:
        return ((levels * scales.float().unsqueeze(-1) - self.runs).square_() * self.weights).sum(-1)

    def _try(self, scales: Tensor) -> None:
        """Take scales float32 [N] where they have less error, and are a fixed point."""
        halves = scales.clamp(TINY, torch.finfo(torch.float16).max).half()
        levels = self.levels(halves)
        errors = self._error(halves, levels)
        better = (errors < self.errors) & ((levels.abs().amax(-1) == self.top) | (halves == TINY))
        self.scales = torch.where(better, halves, self.scales)
        self.errors = torch.where(better, errors, self.errors)

    def search(self) -> None:
        """Find the best scales."""
        plain = self.runs.abs().amax(-1) / self.top
        # Beyond this one the greatest value falls to the level below.
        greatest = self.top / (self.top - 0.5)
        ratio = (greatest / _LEAST) ** (1 / _COARSE)
        for i in range(_COARSE):
            self._try(plain * (greatest * ratio**-i * (1 - 2.0**-11)))
        best = self.scales.float()
        for i in range(-_FINE, _FINE + 1):
            self._try(best * ratio ** (i / (_FINE + 1)))
        for _ in range(_ROUNDS):
            levels = self.levels(self.scales)
            squares = (levels.square() * self.weights).sum(-1)
            products = (levels * self.runs * self.weights).sum(-1)
            # A block of zeros, or one that rounds to zeros, has no such scale.
            self._try(torch.where(squares > 0, products / squares.clamp(min=1e-30), self.scales.float()))
