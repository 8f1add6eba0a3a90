"""Matrix products, convolutions, attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from needle_export.targets.coreml.evaluate.call import Call, Kernel, op
from needle_export.targets.coreml.evaluate.types import FLOATS


@op("linear")
def _linear(call: Call) -> Kernel:
    x = call.tensor("x")
    weight = call.tensor("weight")
    call.same("x", "weight")
    call.check(len(weight.shape) == 2, "has a weight that isn't a matrix")
    if call.given("bias"):
        call.tensor("bias")
        call.same("x", "bias")
        if x.dtype in FLOATS:
            return functional.linear
        return lambda x, weight, bias: torch.matmul(x, weight.T) + bias
    return functional.linear if x.dtype in FLOATS else lambda x, weight: torch.matmul(x, weight.T)


@op("matmul")
def _matmul(call: Call) -> Kernel:
    x, y = call.tensor("x"), call.tensor("y")
    call.same("x", "y")
    # Without effect on vectors, as documented.
    turn_x = bool(call.value("transpose_x", False)) and len(x.shape) > 1
    turn_y = bool(call.value("transpose_y", False)) and len(y.shape) > 1
    if len(y.shape) == 2 and len(x.shape) > 2 and turn_y and not turn_x and x.dtype in FLOATS:
        return functional.linear
    if not turn_x and not turn_y:
        return torch.matmul
    if turn_x and turn_y:
        return lambda x, y: torch.matmul(x.transpose(-1, -2), y.transpose(-1, -2))
    if turn_x:
        return lambda x, y: torch.matmul(x.transpose(-1, -2), y)
    return lambda x, y: torch.matmul(x, y.transpose(-1, -2))


def _letters(equation: str) -> str:
    """An equation with its letters renamed in the order in which they occur."""
    names: dict[str, str] = {}
    return "".join(
        names.setdefault(letter, chr(ord("a") + len(names))) if letter.isalpha() else letter
        for letter in equation.replace(" ", "")
    )


@op("einsum")
def _einsum(call: Call) -> Kernel:
    types = call.tensors("values")
    equation = call.value("equation")
    call.check(len(types) == 2, "takes two tensors")
    call.check(len({types[0].dtype, types[1].dtype, call.outputs[0].dtype}) == 1, "element types differ")
    if _letters(equation) not in (_letters("nchw,nwhu->nchu"), _letters("chw,whr->chr")):
        call.refuse(f"equation {equation!r} isn't known")
    return lambda x, y: torch.einsum(equation, x, y)


def _padding(
    call: Call, kind: str, kernel: list[int], strides: list[int], dilations: list[int]
) -> Callable[[Tensor], list[int]]:
    """What is added before and after each spatial dimension, as torch's pad wants it: from the last one on."""
    count = len(kernel)
    if kind == "valid":
        return lambda x: [0] * (2 * count)
    if kind == "custom":
        pad = [int(size) for size in call.value("pad")]
        call.check(len(pad) == 2 * count, "has another number of pads than two a dimension")
        turned = [size for axis in reversed(range(count)) for size in pad[2 * axis : 2 * axis + 2]]
        return lambda x: turned
    if kind not in ("same", "same_lower"):
        call.refuse(f"pad_type {kind!r} isn't known")

    def same(x: Tensor) -> list[int]:
        sizes = []
        for axis in reversed(range(count)):
            size, reach = x.shape[2 + axis], (kernel[axis] - 1) * dilations[axis] + 1
            whole = max(0, strides[axis] * (math.ceil(size / strides[axis]) - 1) + reach - size)
            less, more = whole // 2, whole - whole // 2
            sizes += [more, less] if kind == "same_lower" else [less, more]
        return sizes

    return same


@op("conv")
def _conv(call: Call) -> Kernel:
    x, weight = call.tensor("x"), call.tensor("weight")
    call.same("x", "weight")
    biased = call.given("bias")
    if biased:
        call.tensor("bias")
        call.same("x", "bias")
    count = len(x.shape) - 2
    call.check(1 <= count <= 3 and len(weight.shape) == len(x.shape), "has ranks that no convolution has")
    kernel = list(weight.shape[2:])
    strides = [int(size) for size in call.value("strides", [1] * count)]
    dilations = [int(size) for size in call.value("dilations", [1] * count)]
    groups = int(call.value("groups", 1))
    kind = call.value("pad_type", "valid")
    if kind != "custom" and call.given("pad"):
        call.value("pad")  # documented to be ignored
    padding = _padding(call, kind, kernel, strides, dilations)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[count - 1]

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        pads = padding(x)
        if any(pads):
            x = functional.pad(x, pads)
        return convolve(x, weight, bias, stride=strides, dilation=dilations, groups=groups)

    return compute


@op("scaled_dot_product_attention")
def _attention(call: Call) -> Kernel:
    query, key, value = call.tensor("query"), call.tensor("key"), call.tensor("value")
    call.same("query", "key", "value")
    rank = len(query.shape)
    call.check(rank >= 3 and len(key.shape) == len(value.shape) == rank, "takes three tensors of one rank, 3 or more")
    call.check(
        query.shape[:-2] == key.shape[:-2] == value.shape[:-2], "query, key and value differ in batch dimensions"
    )
    call.check(query.shape[-1] == key.shape[-1], "query and key differ in width")
    call.check(key.shape[-2] == value.shape[-2], "key and value differ in length")
    scale = 1 / math.sqrt(query.shape[-1])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(query * scale, key.transpose(-1, -2)), dim=-1), value)

    if not call.given("attn_mask"):
        return attend
    mask = call.tensor("attn_mask")
    call.check(mask.dtype in ("bool", query.dtype), f"has a mask of {mask.dtype}")
    keep = mask.dtype == "bool"

    def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(query * scale, key.transpose(-1, -2))
        scores = scores.masked_fill(~mask, -math.inf) if keep else scores + mask
        return torch.matmul(torch.softmax(scores, dim=-1), value)

    return attend_masked
