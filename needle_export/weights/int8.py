"""Int8 weights with one scale a row, and what LiteRT computes with them at run time.

Dimension letters: O outputs (rows of a weight), I inputs (its columns), ... any leading dimensions.

A float FULLY_CONNECTED with an int8 weight is *dynamic*: the runtime quantises each row of its input as it arrives,
adds up products of integers in int32, and scales the sums back. Two kernels do this, differently:

``"asymmetric"``
    XNNPACK's, which LiteRT uses by default. Levels -128..127 between the least and the greatest value of the row.
    It ignores the op's ``asymmetric_quantize_inputs``.
``"symmetric"``
    TFLite's own, without the delegate, for an op whose ``asymmetric_quantize_inputs`` is false: levels -127..127
    about zero.

TFLite's own kernel for an op whose ``asymmetric_quantize_inputs`` is true follows ``"asymmetric"``, but finds the
zero point in float64 and adds it before rounding: mostly the same levels, with values halfway between two of them
falling to the other side, and the last bits differ. The two schemes differ from each other by about 1 % of the
output's RMS; the asymmetric one is the nearer to the exact product, since its levels are never further apart.

tflite-runtime 2.14 has no scales by row. It refuses FULLY_CONNECTED 12 and EMBEDDING_LOOKUP 4, the versions that have
them, and where a file claims an older version it returns zeros. What is right in both runtimes is a weight with the
scale 1 for the whole tensor and a MUL by the scales after it. Without a bias, that MUL rounds where
:func:`dynamic_linear` does, so the function describes both forms.

The sources are google/XNNPACK ``src/xnnpack/quantization.h``, ``f32-qs8-vcvt`` and ``qd8-f32-qc8w-gemm``, and
google-ai-edge/LiteRT ``tflite/kernels/fully_connected.cc``, ``internal/reference/portable_tensor_utils.cc`` and
``internal/optimized/sse_tensor_utils.cc``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Activations = Literal["asymmetric", "symmetric"]

#: The greatest level of a weight. -128 stays unused: TFLite's AVX2 kernel multiplies by negated weights, and in int8
#: -128 is its own negative.
LEVELS = 127


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to int8 with one scale a row.

    The scale is max|w| / 127, in float32; values are w / scale, divided in float32 as well and rounded half to even.
    A row of zeros gets the scale 1, and so does a row so small that its scale would be denormal, which processors
    in flush-to-zero mode read as 0: its values become 0, an error below 1.5e-36.

    Args:
        weight: float32 [O, I], finite.

    Returns:
        Values int8 [O, I] in -127..127, and scales float32 [O], all positive and normal.

    Raises:
        ValueError: the weight isn't float32 [O, I] with I of at least 1, or isn't finite.
    """
    if weight.dtype != torch.float32 or weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"a float32 matrix with columns is needed, not {weight.dtype} {tuple(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("a weight with NaN or infinity can't be quantised")
    scales = weight.abs().amax(dim=1) / LEVELS
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.ones_like(scales), scales)
    values = torch.round(weight / scales[:, None]).clamp(-LEVELS, LEVELS)
    return values.to(torch.int8), scales


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """What the values stand for, and what EMBEDDING_LOOKUP returns for its rows, bit for bit.

    Source: ``tflite/kernels/embedding_lookup.cc``, EvalHybrid: value * scale in float32.

    Args:
        values: int8 [O, I].
        scales: float32 [O].

    Returns:
        float32 [O, I].
    """
    return values.to(torch.float32) * scales[:, None]


def dynamic_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, activations: Activations) -> Tensor:
    """A FULLY_CONNECTED with float input and int8 weight, as the runtime computes it.

    The integers, and their sums, are the runtime's own. So is every rounding afterwards, on x86-64 with fused
    multiply-add; a processor without it, or whose kernel was compiled to contract differently, may differ by one
    unit in the last place of the product or of the sum with the bias.

    Args:
        x: float32 [..., I], finite. Between 0 and 1e-36, a row's range (its peak, when symmetric: 1e-36 as well) is
            too small for the runtime's multiplier, which overflows, and the result is as undefined as there.
        values: int8 [O, I].
        scales: float32 [O].
        bias: float32 [O] or None.
        activations: Which kernel, see the module.

    Returns:
        float32 [..., O].

    Raises:
        ValueError: a shape or a dtype doesn't fit.
    """
    _check(x, values, scales, bias)
    if activations == "asymmetric":
        levels, step = asymmetric(x)
    else:
        levels, step = _symmetric(x)
    # Products of integers below 2^15 and sums of them below 2^53 are exact in float64 whatever the order. The kernels
    # add in int32, where they fit as long as I is below 66,000; the one rounding, to float32, is theirs as well.
    sums = (levels.to(torch.float64) @ values.to(torch.float64).T).to(torch.float32)
    if activations == "asymmetric":
        # qd8-f32-qc8w-gemm: sum * step, rounded, then one fused multiply-add with the row's scale and the bias. The
        # product of two float32 is exact in float64, so the last conversion is the fused operation's one rounding.
        fused = (sums * step).to(torch.float64) * scales.to(torch.float64)
        if bias is not None:
            fused = fused + bias.to(torch.float64)
        return fused.to(torch.float32)
    # MatrixBatchVectorMultiplyAccumulate: the scales are multiplied first, and the output starts as the bias.
    product = sums * (scales * step)
    return product if bias is None else bias + product


def _check(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Refuses what torch would broadcast or promote into a plausible wrong answer."""
    if values.dtype != torch.int8 or values.dim() != 2:
        raise ValueError(f"values must be int8 [O, I], not {values.dtype} {tuple(values.shape)}")
    outputs, inputs = values.shape
    if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] != inputs:
        raise ValueError(f"x must be float32 [..., {inputs}], not {x.dtype} {tuple(x.shape)}")
    for name, vector in (("scales", scales), ("bias", bias)):
        if vector is not None and (vector.dtype != torch.float32 or vector.shape != (outputs,)):
            raise ValueError(f"{name} must be float32 [{outputs}], not {vector.dtype} {tuple(vector.shape)}")


def asymmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels less their zero point, float32 [..., I], and the step between levels, float32 [..., 1].

    Source: ``xnn_qd8_asymmetric_quantization_params`` and ``f32-qs8-vcvt``, in float32 throughout. The range always
    includes 0, so that 0 is a level exactly: a row of zeros gives zeros. Rounding is half to even. The kernel adds
    the zero point after rounding and saturates at int8; here the zero point stays off, and the bounds move instead.
    """
    low = x.amin(dim=-1, keepdim=True).clamp(max=0.0)
    high = x.amax(dim=-1, keepdim=True).clamp(min=0.0)
    flat = low == high
    width = torch.where(flat, torch.ones_like(low), high - low)
    multiplier = torch.where(flat, torch.ones_like(low), torch.full_like(low, 255.0) / width)
    from_low, from_high = low * multiplier, high * multiplier
    # Of the two ends, the one that gives the zero point with the smaller rounding error.
    nearer = (from_low - 128.0) + (from_high + 127.0) > 0.0
    zero_point = torch.where(nearer, -128.0 - from_low, 127.0 - from_high).clamp(-128.0, 127.0).round()
    levels = torch.minimum(torch.maximum((x * multiplier).round(), -128.0 - zero_point), 127.0 - zero_point)
    return levels, torch.ones_like(multiplier) / multiplier


def _symmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels, float32 [..., I], and the step between levels, float32 [..., 1].

    Source: ``PortableSymmetricQuantizeFloats``. Step and multiplier are two divisions, not one and its inverse.
    Rounding is half away from zero.
    """
    peak = x.abs().amax(dim=-1, keepdim=True)
    flat = peak == 0.0
    safe = torch.where(flat, torch.ones_like(peak), peak)
    scaled = x * (torch.full_like(safe, LEVELS) / safe)
    # In float64, since adding a half to the float32 just below a half rounds up to 1.
    levels = torch.copysign((scaled.abs().to(torch.float64) + 0.5).floor(), scaled.to(torch.float64))
    step = torch.where(flat, torch.ones_like(peak), peak / LEVELS)
    return levels.clamp(-LEVELS, LEVELS).to(torch.float32), step
