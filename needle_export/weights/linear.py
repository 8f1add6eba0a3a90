"""Symmetric integer weights with a scale for each run of columns, and what ONNX Runtime and XNNPACK compute with them.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), K columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needle_export.weights.int8 import asymmetric


def quantize_blocks(weight: Tensor, bits: int, block: int, brain: bool = False) -> tuple[Tensor, Tensor]:
    """Round a weight to signed integers with one half-precision scale for every ``block`` columns of a row.

    A scale is max|w| / (2^(bits-1) - 1), rounded to half precision; values are w / scale, rounded half to even, and
    held within the levels, as a scale that was rounded down would let the greatest value pass them. The least level
    -2^(bits-1) stays unused, so that levels lie symmetrically about 0. A block of zeros gets the least scale there is.

    Args:
        weight: float32 [O, I], finite.
        bits: 2 to 8.
        block: K, a divisor of I.
        brain: round scales to bfloat16's 8 digits first, so that a runtime that keeps them as such has the same.

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
    scales = runs.abs().amax(-1) / top
    scales = (scales.bfloat16().float() if brain else scales).half()
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


def dynamic_blocks(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """A product with such a weight as ONNX Runtime's MatMulNBits has it at accuracy level 4: inputs rounded to int8.

    Of every row of the input, each run of K columns is rounded by itself, symmetrically: levels -127..127 of a step of
    max|x| / 127, half to even. Products and sums of a run are integers. The runtime adds the runs up in float32 in an
    order of its own, and corrects the sums of unsigned 4-bit levels in float32 as well; here that part is float64, so
    the last bits differ.

    Source: microsoft/onnxruntime, ``core/mlas/lib/sqnbitgemm_kernel_avx512.cpp`` and its siblings.

    Args:
        x: float32 [..., I].
        values: int8 [O, I].
        scales: [O, I / K].

    Returns:
        float32 [..., O].

    Raises:
        ValueError: a shape or a dtype doesn't fit.
    """
    _check(x, values, scales)
    (outputs, inputs), runs = values.shape, scales.shape[1]
    pieces = x.reshape(-1, runs, inputs // runs)
    peak = pieces.abs().amax(-1)
    # Two divisions, not one and its inverse.
    inverse = torch.where(peak > 0, 127 / peak.clamp(min=torch.finfo(torch.float32).tiny), 0)
    levels = (pieces * inverse.unsqueeze(-1)).round().double()
    steps = (peak / 127).double()
    weight = values.reshape(outputs, runs, -1).double()
    total = torch.zeros(len(pieces), outputs, dtype=torch.float64)
    for run in range(runs):
        sums = levels[:, run] @ weight[:, run].T
        total += sums * steps[:, run, None] * scales[:, run].double()
    return total.float().reshape(*x.shape[:-1], outputs)


def dynamic_row_blocks(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """A product with such a weight as XNNPACK has it under LiteRT: every row of the input rounded to int8 by itself.

    Levels are those of an int8 weight with a scale a row, asymmetric. Products and sums of a run are integers. The
    kernel adds the runs up in float32, the zero point's share apart, in an order of its own; here that part is
    float64, so the last bits may differ.

    It keeps scales as bfloat16, whatever the file holds, and rounds others to that; an EMBEDDING_LOOKUP doesn't.

    Sources: google/XNNPACK, ``src/qd8-f32-qb4w-gemm``; google-ai-edge/LiteRT, ``tflite/kernels/embedding_lookup.cc``.

    Args:
        x: float32 [..., I], finite.
        values: int8 [O, I].
        scales: [O, I / K], which bfloat16 holds.

    Returns:
        float32 [..., O].

    Raises:
        ValueError: a shape or a dtype doesn't fit, or a scale is none that the kernel has.
    """
    _check(x, values, scales)
    wide = scales.float()
    if not torch.equal(wide.bfloat16().float(), wide):
        raise ValueError("a scale has more digits than bfloat16")
    (outputs, inputs), runs = values.shape, scales.shape[1]
    levels, step = asymmetric(x.reshape(-1, inputs))
    pieces = levels.double().reshape(len(levels), runs, -1)
    weight = values.reshape(outputs, runs, -1).double()
    total = torch.zeros(len(levels), outputs, dtype=torch.float64)
    for run in range(runs):
        total += (pieces[:, run] @ weight[:, run].T) * wide[:, run].double()
    return (total * step.double()).float().reshape(*x.shape[:-1], outputs)


def _check(x: Tensor, values: Tensor, scales: Tensor) -> None:
    (outputs, inputs), runs = values.shape, scales.shape[1]
    if x.dtype != torch.float32 or x.shape[-1] != inputs or len(scales) != outputs or inputs % runs:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} doesn't fit values {tuple(values.shape)}, {runs} scales a row")
