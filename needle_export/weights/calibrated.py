"""Integer blocks with the least error of a layer's outputs, rather than of its weights.

With W the weight [O, I], Q what its levels stand for, and H the sum of x x^T over inputs x that the layer has seen, the
squared error of the outputs is the trace of (W - Q) H (W - Q)^T. Rows don't depend on each other. Three steps lower it:

1. Scales by :mod:`needle_export.weights.search`, a column weighing as much as its entry of H's diagonal.
2. Columns are rounded one after the other, those with the greatest entries first, and what a column is off by is made
   up for by the columns that follow, as far as they can: E. Frantar, S. Ashkboos, T. Hoefler and D. Alistarh, "GPTQ:
   Accurate post-training quantization for generative pre-trained transformers", 2022, equations 2 and 3 with the
   Cholesky factor of step 3; after B. Hassibi and D. Stork, "Second order derivatives for network pruning: Optimal
   brain surgeon", 1993.
3. Sweeps, in which every level, and every scale, takes the best value that there is while all others stay: K. Behdin
   et al., "QuantEase: Optimization-based quantization for language models", 2023, has such sweeps over levels.

The result is a fixed point of rounding to nearest, as the search's is: each block keeps one entry at the greatest
level.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), K columns that share a scale, N = I / K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needle_export.weights.linear import dequantize_blocks
from needle_export.weights.search import TINY, search_blocks

#: What is added to H's diagonal at least, as a part of its mean, so that no direction costs nothing.
DAMPING = 0.01

#: Sweeps over levels and scales. Further ones hardly lower the error.
_SWEEPS = 2

#: Columns whose corrections are carried on to the rest of the matrix at once.
_PANEL = 64


def calibrate_blocks(
    weight: Tensor, moments: Tensor, count: int | None, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    """Levels and scales of a weight with little error of the outputs.

    Args:
        weight: float32 [O, I], finite.
        moments: H, [I, I], the sum of x x^T over inputs; any positive multiple of it gives the same.
        count: how many inputs that were, see :func:`shrunk`; None: H is known exactly.
        bits: 2 to 8.
        block: K, a divisor of I.

    Returns:
        Values int8 [O, I] and scales float16 [O, I / K], as ``quantize_blocks`` returns them, and a fixed point of it.

    Raises:
        ValueError: as ``quantize_blocks``; or H isn't finite, or not [I, I].
    """
    columns = weight.shape[1]
    if moments.shape != (columns, columns) or not bool(torch.isfinite(moments).all()):
        raise ValueError(f"moments must be finite, {columns} x {columns}")
    h = shrunk(moments, count)
    importance = h.diagonal().float()
    values, scales = search_blocks(weight, bits, block, importance)
    rounding = _Rounding(weight, h, values, scales, 2 ** (bits - 1) - 1)
    rounding.carry_on()
    for _ in range(_SWEEPS):
        rounding.sweep_scales()
        rounding.sweep_levels()
    rounding.sweep_scales()
    return rounding.levels.to(torch.int8), rounding.scales.half()


def calibrated(weight: Tensor, moments: Tensor, count: int | None, bits: int, block: int) -> Tensor:
    """What the levels of :func:`calibrate_blocks` stand for, float32 [O, I]."""
    return dequantize_blocks(*calibrate_blocks(weight, moments, count, bits, block))


def shrunk(moments: Tensor, count: int | None) -> Tensor:
    """H of mean 1 on its diagonal, drawn towards the unit matrix as far as so few inputs make it uncertain.

    Few inputs lie in few directions. Taken at its word, their H would have every error moved into the others. How far
    to go is Oracle Approximating Shrinkage, equation 23 of Y. Chen, A. Wiesel, Y. Eldar and A. Hero, "Shrinkage
    algorithms for MMSE covariance estimation", 2010: all the way where there are none, hardly where there are many more
    than columns or some directions are much greater than others. ``DAMPING`` is added in any case.

    Args:
        moments: sum of x x^T over inputs, [I, I].
        count: how many inputs; None if H is no estimate.

    Returns:
        float64 [I, I], positive definite.
    """
    h = moments.double()
    mean, width = float(h.diagonal().mean()), len(h)
    unit = torch.eye(width, dtype=torch.float64)
    if mean <= 0 or count == 0:
        return unit
    h = h / mean
    if count is not None:
        squares, trace = float(h.square().sum()), float(width)
        above = (1 - 2 / width) * squares + trace**2
        below = (count + 1 - 2 / width) * (squares - trace**2 / width)
        share = min(1.0, above / below) if below > 0 else 1.0
        h = (1 - share) * h + share * unit
    return h + DAMPING * unit


class _Rounding:
    """A weight on its way to levels.

    Attributes:
        levels: float32 [O, I], whole numbers.
        scales: float32 [O, N], each a half-precision number.
    """

    def __init__(self, weight: Tensor, h: Tensor, values: Tensor, scales: Tensor, top: int) -> None:
        self.weight, self.h, self.top = weight, h, top
        self.levels, self.scales = values.float(), scales.float()
        self.block = weight.shape[1] // scales.shape[1]

    def _wide(self) -> Tensor:
        """The scale of each entry, [O, I]."""
        return self.scales.repeat_interleave(self.block, dim=1)

    def _counts(self) -> Tensor:
        """How many entries of a block are at the greatest level, [O, N]."""
        at_top = self.levels.abs() == self.top
        return at_top.reshape(len(at_top), -1, self.block).sum(-1)

    def carry_on(self) -> None:
        """Round column by column, and correct the columns that follow."""
        order = self.h.diagonal().argsort(descending=True, stable=True)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.h[order][:, order]))
        factor = torch.linalg.cholesky(inverse, upper=True).float()
        rest, wide = self.weight[:, order].clone(), self._wide()[:, order]
        nearest = self.levels[:, order]
        last = self._last_chances(nearest, order)
        blocks = torch.div(order, self.block, rounding_mode="floor")
        # A block at the least scale needs no greatest level.
        done = self.scales == TINY
        found = torch.empty_like(rest)
        columns = rest.shape[1]
        for start in range(0, columns, _PANEL):
            end = min(start + _PANEL, columns)
            errors = torch.empty(len(rest), end - start)
            for j in range(start, end):
                block = blocks[j]
                level = torch.round(rest[:, j] / wide[:, j]).clamp_(-self.top, self.top)
                level = torch.where(last[:, j] & ~done[:, block], nearest[:, j], level)
                done[:, block] |= level.abs() == self.top
                found[:, j] = level
                off = (rest[:, j] - level * wide[:, j]) / factor[j, j]
                errors[:, j - start] = off
                rest[:, j + 1 : end] -= off[:, None] * factor[j, j + 1 : end]
            rest[:, end:] -= errors @ factor[start:end, end:]
        self.levels[:, order] = found

    def _last_chances(self, nearest: Tensor, order: Tensor) -> Tensor:
        """Of each block, the last column in order that rounding to nearest has at the greatest level, bool [O, I]."""
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        at_top = torch.empty_like(nearest, dtype=torch.bool)
        at_top[:, order] = nearest.abs() == self.top
        places = torch.where(at_top, place, -1).reshape(len(nearest), -1, self.block)
        greatest = places.amax(-1, keepdim=True)
        last = ((places == greatest) & (greatest >= 0)).reshape(at_top.shape)
        return last[:, order]

    def _off(self) -> Tensor:
        """W - Q, float32 [O, I]."""
        return self.weight - self.levels * self._wide()

    def sweep_levels(self) -> None:
        """Give each level its best value while all others stay, column by column."""
        h = self.h.float()
        off, wide, counts = self._off(), self._wide(), self._counts()
        free = self.scales == TINY
        columns = off.shape[1]
        for start in range(0, columns, _PANEL):
            end = min(start + _PANEL, columns)
            slope = off @ h[:, start:end]
            for j in range(start, end):
                block, scale, level = j // self.block, wide[:, j], self.levels[:, j]
                best = torch.round(level + slope[:, j - start] / (h[j, j] * scale)).clamp_(-self.top, self.top)
                was, becomes = level.abs() == self.top, best.abs() == self.top
                # The only entry at the greatest level stays there.
                held = was & ~becomes & (counts[:, block] == 1) & ~free[:, block]
                best = torch.where(held, level, best)
                counts[:, block] += (best.abs() == self.top).long() - was.long()
                change = (best - level) * scale
                slope -= change[:, None] * h[j, start:end]
                off[:, j] -= change
                self.levels[:, j] = best

    def sweep_scales(self) -> None:
        """Give each scale its best value while all others stay, block by block."""
        h = self.h.float()
        off = self._off()
        for block in range(self.scales.shape[1]):
            at = slice(block * self.block, (block + 1) * self.block)
            levels, scale = self.levels[:, at], self.scales[:, block]
            slope = (levels * (off @ h[:, at])).sum(1)
            curve = (levels * (levels @ h[at, at])).sum(1)
            wanted = (scale + slope / curve.clamp(min=1e-30)).clamp(TINY, torch.finfo(torch.float16).max)
            change = wanted.half().float() - scale
            # A block of zeros has no slope. One at the least scale may have no greatest level, and stays there.
            better = (change * (change * curve - 2 * slope) < 0) & (scale > TINY)
            change = torch.where(better, change, torch.zeros_like(change))
            off[:, at] -= change[:, None] * levels
            self.scales[:, block] += change
