"""Symmetric integer weights with a scale for each run of columns, as Core ML's kernels take them.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), K columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_blocks(weight: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Round a weight to signed integers with one half-precision scale for every ``block`` columns of a row.

    A scale is max|w| / (2^(bits-1) - 1), rounded to half precision; values are w / scale, rounded half to even, and
    held within the levels, as a scale that was rounded down would let the greatest value pass them. The least level
    -2^(bits-1) stays unused, so that levels lie symmetrically about 0. A block of zeros gets the least scale there is.

    Args:
        weight: float32 [O, I], finite.
        bits: 2 to 8.
        block: K, a divisor of I.

    Returns:
        Values int8 [O, I] and scales float16 [O, I / K], all positive.

    Raises:
        ValueError: ``block`` doesn't divide I, or a scale is beyond half precision.
    """
    rows, columns = weight.shape
    if block < 1 or columns % block:
        raise ValueError(f"blocks of {block} don't divide {columns} columns")
    top = 2 ** (bits - 1) - 1
    runs = weight.reshape(rows, columns // block, block)
    scales = (runs.abs().amax(-1) / top).half()
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a scale is beyond half precision")
    tiny = torch.finfo(torch.float16).tiny
    scales = torch.where(scales < tiny, torch.full_like(scales, tiny), scales)
    values = torch.round(runs / scales.float().unsqueeze(-1)).clamp(-top, top)
    return values.to(torch.int8).reshape(rows, columns), scales


def dequantize_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """What values [O, I] and scales [O, I / K] stand for: their product in float32, [O, I]."""
    rows, columns = values.shape
    runs = values.reshape(rows, scales.shape[1], -1).float()
    return (runs * scales.float().unsqueeze(-1)).reshape(rows, columns)
