"""Quantisation of activations at run time (iOS 17)."""

from __future__ import annotations

import torch
from torch import Tensor

from needle_export.targets.coreml.evaluate.call import Call, Kernel, axis_of, op
from needle_export.targets.coreml.evaluate.constants import RUNTIME

#: What the quantised types reach.
_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}


def _spread(call: Call, parameter: str, rank: int) -> Tensor | None:
    """A scale or a zero point, of all or one for each place of an axis, laid out to broadcast."""
    if not call.given(parameter):
        return None
    constant = call.constant(parameter)
    if constant is None:
        call.refuse(f"parameter {parameter!r} isn't constant")
    values = constant.dense.to(torch.float32)
    if not constant.type.shape:
        return values
    call.check(call.given("axis"), f"has a {parameter} for each place of no axis")
    axis = axis_of(call, int(call.value("axis")), rank)
    sizes = [1] * rank
    sizes[axis] = constant.type.elements
    return values.reshape(sizes)


@op("quantize")
def _quantize(call: Call) -> Kernel:
    rank = len(call.tensor("input").shape)
    scale, zero = _spread(call, "scale", rank), _spread(call, "zero_point", rank)
    call.value("axis", None)
    wanted = call.value("output_dtype")
    if wanted not in _RANGES:
        call.refuse(f"output_dtype {wanted!r} isn't known")
    call.check(call.outputs[0].dtype == wanted, f"declares {call.outputs[0].dtype}")
    call.check(scale is not None, "has no scale")
    low, high = _RANGES[wanted]
    offset = torch.zeros(()) if zero is None else zero
    return lambda x: torch.clamp(torch.round(x / scale) + offset, low, high).to(RUNTIME[wanted])


@op("dequantize")
def _dequantize(call: Call) -> Kernel:
    rank = len(call.tensor("input").shape)
    scale, zero = _spread(call, "scale", rank), _spread(call, "zero_point", rank)
    call.value("axis", None)
    call.check(scale is not None, "has no scale")
    offset = torch.zeros(()) if zero is None else zero
    return lambda x: (x.to(torch.float32) - offset) * scale
