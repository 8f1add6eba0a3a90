"""Look-ups by index, and their opposite.

From opset iOS 17 on, what an index outside its axis gives is undefined. Here it is an error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from needle_export.targets.coreml.evaluate.call import Call, Kernel, axis_of, op
from needle_export.targets.coreml.evaluate.constants import Constant


def _within(index: Tensor, size: int) -> Tensor:
    """Places as int64.

    Raises:
        IndexError: one is outside.
    """
    places = index.to(torch.int64)
    if places.numel() and (int(places.min()) < 0 or int(places.max()) >= size):
        raise IndexError(f"index {int(places.min())} to {int(places.max())} for an axis of {size}")
    return places


def _table(call: Call, leading: int) -> Constant | None:
    """The constant that is looked up, its first dimensions as one, where that needs no decompression."""
    constant = call.constant("x")
    if constant is None or leading <= 1:
        return constant
    return constant.merged(leading)


@op("gather", moves=True)
def _gather(call: Call) -> Kernel:
    x, indices = call.type("x"), call.type("indices")
    call.same("x")
    rank = len(x.shape)
    axis = axis_of(call, int(call.value("axis", 0)), rank)
    batch = int(call.value("batch_dims", 0))
    call.value("validate_indices", False)  # checked in any case
    call.check(0 <= batch <= axis and batch <= len(indices.shape), f"has {batch} batch dimensions")
    call.check(x.shape[:batch] == indices.shape[:batch], "batch dimensions differ")
    size = x.shape[axis]
    if batch == 0:
        whole = call.constant("x")
        if whole is not None:
            call.tensor("indices")

            def look_up(indices: Tensor) -> Tensor:
                found = whole.select(axis, _within(indices, size).reshape(-1))
                return found.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])

            return look_up
        call.tensor("x")
        call.tensor("indices")

        def gather(x: Tensor, indices: Tensor) -> Tensor:
            found = x.index_select(axis, _within(indices, x.shape[axis]).reshape(-1))
            return found.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])

        return gather
    batches = math.prod(x.shape[:batch])
    rest = x.shape[axis + 1 :]
    between = x.shape[batch:axis]
    kept = (*x.shape[:batch], *between, *indices.shape[batch:], *rest)
    if axis == batch:
        first = torch.arange(batches).view(-1, 1) * size
        table = _table(call, batch + 1)
        if table is None:
            call.tensor("x")
        call.tensor("indices")

        def look_up_batches(*arguments: Tensor) -> Tensor:
            places = (_within(arguments[-1], size).reshape(batches, -1) + first).reshape(-1)
            if table is not None:
                return table.select(0, places).reshape(kept)
            return arguments[0].reshape(batches * size, *rest).index_select(0, places).reshape(kept)

        return look_up_batches
    call.tensor("x")
    call.tensor("indices")

    def gather_batches(x: Tensor, indices: Tensor) -> Tensor:
        places = _within(indices, size).reshape(batches, -1)
        flat = x.reshape(batches, math.prod(between), size, *rest)
        return torch.stack([flat[i].index_select(1, places[i]) for i in range(batches)]).reshape(kept)

    return gather_batches


@op("gather_along_axis", moves=True)
def _gather_along_axis(call: Call) -> Kernel:
    x = call.tensor("x")
    call.tensor("indices")
    call.same("x")
    axis = axis_of(call, int(call.value("axis", 0)), len(x.shape))
    call.value("validate_indices", False)  # checked in any case
    return lambda x, indices: torch.gather(x, axis, _within(indices, x.shape[axis]))


@op("gather_nd", moves=True)
def _gather_nd(call: Call) -> Kernel:
    x, indices = call.type("x"), call.type("indices")
    call.same("x")
    batch = int(call.value("batch_dims", 0))
    call.value("validate_indices", False)  # checked in any case
    depth = indices.shape[-1]
    call.check(depth >= 1 and batch + depth <= len(x.shape), "has indices deeper than its tensor")
    call.check(x.shape[:batch] == indices.shape[:batch], "batch dimensions differ")
    table = _table(call, batch + depth)
    if table is None:
        call.tensor("x")
    call.tensor("indices")
    sizes = x.shape[batch : batch + depth]
    rest = x.shape[batch + depth :]
    batches, inner = math.prod(x.shape[:batch]), math.prod(sizes)
    first = torch.arange(batches).view(-1, 1) * inner

    def look_up(*arguments: Tensor) -> Tensor:
        index = arguments[-1]
        places = torch.zeros(index.shape[:-1], dtype=torch.int64)
        for level, size in enumerate(sizes):
            places = places * size + _within(index[..., level], size)
        flat = (places.reshape(batches, -1) + first).reshape(-1)
        kept = (*index.shape[:-1], *rest)
        if table is not None:
            return table.select(0, flat).reshape(kept)
        return arguments[0].reshape(batches * inner, *rest).index_select(0, flat).reshape(kept)

    return look_up


def _adds(call: Call) -> bool:
    """What a scatter takes beside its axis; whether updates are added, or else replace. Other modes aren't known."""
    call.tensor("data")
    call.tensor("indices")
    call.tensor("updates")
    call.same("data", "updates")
    mode = call.value("mode", "add")
    if mode not in ("add", "update"):
        call.refuse(f"mode {mode!r} isn't known")
    call.value("validate_indices", False)  # checked in any case
    return bool(mode == "add")


@op("scatter")
def _scatter(call: Call) -> Kernel:
    adds, shape = _adds(call), call.type("data").shape
    axis = axis_of(call, int(call.value("axis", 0)), len(shape))

    def put(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        places = _within(indices, data.shape[axis])
        return data.index_add(axis, places, updates) if adds else data.index_copy(axis, places, updates)

    return put


@op("scatter_along_axis")
def _scatter_along_axis(call: Call) -> Kernel:
    adds, shape = _adds(call), call.type("data").shape
    axis = axis_of(call, int(call.value("axis", 0)), len(shape))

    def put(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        places = _within(indices, data.shape[axis])
        return data.scatter_add(axis, places, updates) if adds else data.scatter(axis, places, updates)

    return put


@op("scatter_nd")
def _scatter_nd(call: Call) -> Kernel:
    adds, shape = _adds(call), call.type("data").shape
    depth = call.type("indices").shape[-1]
    call.check(depth <= len(shape), "has indices deeper than its tensor")

    def put(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        places = tuple(_within(indices[..., level], data.shape[level]) for level in range(depth))
        return data.index_put(places, updates, accumulate=adds)

    return put
