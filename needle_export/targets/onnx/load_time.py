"""Arithmetic on weights alone, which a runtime does once, when it loads the model.

A weight that constants were folded into is no checkpoint tensor's numbers, and would have to stay float32. What it was
made of can be stored as the scheme has it, and the arithmetic be part of the graph: constant folding is on at every
level of ONNX Runtime's optimisation, so that a step runs none of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from needle_export.graph.program import Weight
from needle_export.targets.claims import kernel_name
from needle_export.targets.constants import is_constant, short_name
from needle_export.targets.onnx.builder import Builder, matrix_name
from needle_export.targets.onnx.integers import widened, widened_form

aten = torch.ops.aten

_ARITHMETIC = {aten.add.Tensor: "Add", aten.mul.Tensor: "Mul", aten.sub.Tensor: "Sub", aten.div.Tensor: "Div"}


def computed(b: Builder, weight: Weight, shape: tuple[int, ...]) -> ir.Value | None:
    """A folded weight as arithmetic on what it was made of, under a shape; None where it is to be stored as it is.

    A constant of equal numbers, such as the scale of a norm without one, is spread out at load time too.
    """
    first = weight.value.flatten()[:1]
    spread = is_constant(weight.parts) and weight.value.is_floating_point() and bool((weight.value == first).all())
    if not b.narrows(weight) or (weight.made is None and not spread):
        return None
    key = ("made", id(weight.value), shape)
    if key not in b.memo:
        layer, b.layer = b.layer, -1
        value = b.op("Expand", b.constant(first.numpy()), b.constant(shape, np.int64)) if spread else _value(b, weight)
        if not spread and tuple(weight.value.shape) != shape:
            value = b.op("Reshape", value, b.constant(shape, np.int64))
        b.layer = layer
        b.memo[key] = value
    found: ir.Value = b.memo[key]
    return found


def _value(b: Builder, operand: Any) -> ir.Value:
    """A weight in float32, or a number."""
    if not isinstance(operand, Weight):
        return b.constant(operand, np.float32)
    made = operand.made
    if made is None:
        return _leaf(b, operand)
    value: ir.Value
    if made.target in _ARITHMETIC:
        value = b.op(_ARITHMETIC[made.target], *(_value(b, x) for x in made.operands))
    elif made.target is aten.sigmoid.default:
        value = b.op("Sigmoid", _value(b, made.operands[0]))
    elif made.target is aten.expand.default:
        value = b.op("Expand", _value(b, made.operands[0]), b.constant(made.operands[1], np.int64))
    elif made.target is aten.cat.default:
        value = b.op("Concat", *(_value(b, x) for x in made.operands), axis=0)
    else:
        raise TypeError(f"{operand.name} is made by {made.target}, which has no ONNX lowering")
    return value


def _leaf(b: Builder, weight: Weight) -> ir.Value:
    form = widened_form(b, weight)
    if form is not None:
        return widened(b, weight, form)
    name = matrix_name(replace(weight, folded=True)) if min(weight.value.shape, default=1) > 1 else ""
    return b.array(weight, weight.value.contiguous().numpy(), name if weight.value.dim() > 1 else "")


def taps_kernel(b: Builder, weight: Weight, dilation: int, by_hand: bool = False) -> ir.Value:
    """Taps [K, C], the newest first, as a kernel with zeros between, oldest first: [C, 1, (K - 1) * dilation + 1].

    Args:
        by_hand: [1, C, ..] instead.
    """
    count, channels = weight.value.shape
    length = (count - 1) * dilation + 1
    data = np.ascontiguousarray(weight.value.numpy()[::-1].T)
    lead = (1, channels) if by_hand else (channels, 1)
    name = kernel_name(short_name(weight.name), weight.folded, dilation)
    if dilation == 1 or not b.narrows(weight):
        whole = np.zeros((channels, length), np.float32)
        whole[:, ::dilation] = data
        return b.array(weight, whole.reshape(*lead, length), name)
    dense = b.array(weight, data.reshape(*lead, count), name)
    layer, b.layer = b.layer, -1
    columns = b.op("Reshape", dense, b.constant([channels, count, 1], np.int64))
    apart = b.op("Pad", columns, b.constant([0, 0, 0, 0, 0, dilation - 1], np.int64))
    row = b.op("Reshape", apart, b.constant([*lead, count * dilation], np.int64))
    kernel: ir.Value = b.op("Slice", row, *(b.constant([v], np.int64) for v in (0, length, 2)))
    b.layer = layer
    return kernel
