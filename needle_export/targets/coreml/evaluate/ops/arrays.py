"""Ops that lay elements out anew, repeat them, or make tensors from sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from needle_export.targets.coreml.evaluate.call import Call, Kernel, axis_of, op
from needle_export.targets.coreml.evaluate.constants import RUNTIME


def _resolve(shape: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Sizes of a reshape: 0 keeps the size at its place, -1 takes what is left."""
    if 0 in wanted and len(wanted) != len(shape):
        raise IndexError(f"a size of 0 in {list(wanted)} for a tensor of rank {len(shape)}")
    sizes = [shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(shape) // known if known else 0
    return sizes


@op("reshape", moves=True)
def _reshape(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    constant = call.constant("shape")
    if constant is None:
        call.tensor("shape")
        return lambda x, shape: x.reshape(_resolve(x.shape, shape.tolist()))
    wanted = [int(size) for size in constant.dense.tolist()]
    call.check(wanted.count(-1) <= 1 and min(wanted, default=0) >= -1, f"has sizes {wanted}")
    if -1 not in x.shape:
        call.check(0 not in wanted or len(wanted) == len(x.shape), f"has sizes {wanted} for rank {len(x.shape)}")
        sizes = _resolve(x.shape, wanted)
        return lambda x: x.reshape(sizes)
    return lambda x: x.reshape(_resolve(x.shape, wanted))


@op("transpose", moves=True)
def _transpose(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    order = [axis_of(call, int(axis), len(x.shape)) for axis in call.value("perm")]
    call.check(sorted(order) == list(range(len(x.shape))), f"has the order {order}")
    return lambda x: x.permute(order)


@op("expand_dims", moves=True)
def _expand_dims(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    axes = call.value("axes")
    rank = len(x.shape) + len(axes)
    places = sorted(axis_of(call, int(axis), rank) for axis in axes)
    call.check(len(set(places)) == len(places), f"names an axis twice: {axes}")

    def expand(x: Tensor) -> Tensor:
        for axis in places:
            x = x.unsqueeze(axis)
        return x

    return expand if len(places) != 1 else lambda x: x.unsqueeze(places[0])


@op("squeeze", moves=True)
def _squeeze(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    axes = call.value("axes", None)
    if axes is None:
        return lambda x: x.squeeze()
    places = tuple(axis_of(call, int(axis), len(x.shape)) for axis in axes)
    call.check(all(x.shape[axis] in (1, -1) for axis in places), f"drops an axis of {list(x.shape)} that isn't 1")
    return lambda x: x.squeeze(places)


@op("concat", moves=True)
def _concat(call: Call) -> Kernel:
    types = call.tensors("values")
    call.check(bool(types), "has no values")
    call.check(len({t.dtype for t in types} | {call.outputs[0].dtype}) == 1, "element types differ")
    axis = axis_of(call, int(call.value("axis")), len(types[0].shape))
    if call.value("interleave", False):
        # One of each in turn: stack behind the axis, and make one of the two.
        return lambda *values: torch.stack(values, dim=axis + 1).flatten(axis, axis + 1)
    return lambda *values: torch.cat(values, dim=axis)


@op("stack", moves=True)
def _stack(call: Call) -> Kernel:
    types = call.tensors("values")
    call.check(bool(types), "has no values")
    call.check(len({t.dtype for t in types} | {call.outputs[0].dtype}) == 1, "element types differ")
    axis = axis_of(call, int(call.value("axis")), len(types[0].shape) + 1)
    return lambda *values: torch.stack(values, dim=axis)


@op("tile", moves=True)
def _tile(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    repeats = [int(count) for count in call.value("reps")]
    call.check(len(repeats) == len(x.shape), "has another number of repeats than dimensions")
    return lambda x: x.repeat(repeats)


@op("pad")
def _pad(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    pads = [int(size) for size in call.value("pad")]
    call.check(len(pads) % 2 == 0 and len(pads) <= 2 * len(x.shape) and min(pads, default=0) >= 0, f"has pads {pads}")
    mode = call.value("mode", "constant")
    filling = call.value("constant_val", 0)
    # The pads are those of the last dimensions in order; torch wants the last one first.
    turned = [size for at in reversed(range(0, len(pads), 2)) for size in pads[at : at + 2]]
    if mode == "constant":
        return lambda x: functional.pad(x, turned, value=filling)
    if mode not in ("reflect", "replicate"):
        call.refuse(f"mode {mode!r} isn't known")
    first = len(x.shape) - len(pads) // 2

    def pad(x: Tensor) -> Tensor:
        for at in range(0, len(pads), 2):
            axis, size = first + at // 2, x.shape[first + at // 2]
            places = torch.arange(-pads[at], size + pads[at + 1])
            mirrored = (size - 1) - ((size - 1) - places.abs()).abs()
            x = x.index_select(axis, places.clamp(0, size - 1) if mode == "replicate" else mirrored)
        return x

    return pad


@op("fill")
def _fill(call: Call) -> Kernel:
    value, runtime = call.value("value", 0.0), RUNTIME[call.outputs[0].dtype]
    constant = call.constant("shape")
    if constant is not None:
        sizes = constant.dense.tolist()
        return lambda: torch.full(sizes, value, dtype=runtime)
    call.tensor("shape")
    return lambda shape: torch.full(shape.tolist(), value, dtype=runtime)


@op("fill_like")
def _fill_like(call: Call) -> Kernel:
    call.tensor("ref_tensor")
    value, runtime = call.value("value", 0.0), RUNTIME[call.outputs[0].dtype]
    return lambda x: torch.full(x.shape, value, dtype=runtime)


@op("range_1d")
def _range_1d(call: Call) -> Kernel:
    runtime = RUNTIME[call.tensor("start").dtype]
    call.tensor("end")
    call.tensor("step")
    call.same("start", "end", "step")
    return lambda start, end, step: torch.arange(start.item(), end.item(), step.item(), dtype=runtime)


@op("shape", moves=True)
def _shape(call: Call) -> Kernel:
    call.tensor("x")
    runtime = RUNTIME[call.outputs[0].dtype]
    return lambda x: torch.tensor(x.shape, dtype=runtime)


@op("one_hot")
def _one_hot(call: Call) -> Kernel:
    indices = call.tensor("indices")
    size = int(call.value("one_hot_vector_size"))
    axis = axis_of(call, int(call.value("axis", -1)), len(indices.shape) + 1)
    on, off = call.value("on_value", 1), call.value("off_value", 0)
    runtime = RUNTIME[call.outputs[0].dtype]

    def compute(indices: Tensor) -> Tensor:
        hot = indices.unsqueeze(-1) == torch.arange(size)
        values = torch.where(hot, torch.tensor(on, dtype=runtime), torch.tensor(off, dtype=runtime))
        return values.movedim(-1, axis)

    return compute


@op("band_part", moves=True)
def _band_part(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    lower, upper = int(call.value("lower", -1)), int(call.value("upper", -1))

    def band(x: Tensor) -> Tensor:
        row, column = torch.arange(x.shape[-2]).view(-1, 1), torch.arange(x.shape[-1])
        keep = ((row - column <= lower) | (lower < 0)) & ((column - row <= upper) | (upper < 0))
        return torch.where(keep, x, torch.zeros((), dtype=x.dtype))

    return band


@op("reverse", moves=True)
def _reverse(call: Call) -> Kernel:
    rank = len(call.tensor("x").shape)
    call.same("x")
    axes = [axis_of(call, int(axis), rank) for axis in call.value("axes", list(range(rank)))]
    return lambda x: x.flip(axes)
