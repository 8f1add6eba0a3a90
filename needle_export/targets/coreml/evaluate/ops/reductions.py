"""Ops that make one element of many, or order them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from needle_export.targets.coreml.evaluate.call import Call, Kernel, axis_of, op
from needle_export.targets.coreml.evaluate.constants import RUNTIME

Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keep, dtype=x.dtype)
    return x


_REDUCE: dict[str, Reduce] = {
    "reduce_l1_norm": lambda x, axes, keep: x.abs().sum(dim=axes, keepdim=keep, dtype=x.dtype),
    "reduce_l2_norm": lambda x, axes, keep: torch.sqrt((x * x).sum(dim=axes, keepdim=keep)),
    "reduce_log_sum": lambda x, axes, keep: torch.log(x.sum(dim=axes, keepdim=keep)),
    "reduce_log_sum_exp": lambda x, axes, keep: torch.logsumexp(x, dim=axes, keepdim=keep),
    "reduce_max": lambda x, axes, keep: torch.amax(x, dim=axes, keepdim=keep),
    "reduce_mean": lambda x, axes, keep: x.mean(dim=axes, keepdim=keep),
    "reduce_min": lambda x, axes, keep: torch.amin(x, dim=axes, keepdim=keep),
    "reduce_prod": _product,
    "reduce_sum": lambda x, axes, keep: x.sum(dim=axes, keepdim=keep, dtype=x.dtype),
    "reduce_sum_square": lambda x, axes, keep: (x * x).sum(dim=axes, keepdim=keep, dtype=x.dtype),
}

#: These leave the integers.
_FLOATS_ONLY = frozenset({"reduce_l2_norm", "reduce_log_sum", "reduce_log_sum_exp", "reduce_mean"})


@op(*_REDUCE)
def _reduce(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    if call.op.type in _FLOATS_ONLY and not x.dtype.startswith("float"):
        call.refuse(f"isn't known for {x.dtype}")
    rank = len(x.shape)
    axes = [axis_of(call, int(axis), rank) for axis in call.value("axes", list(range(rank)))]
    keep = bool(call.value("keep_dims", False))
    reduce = _REDUCE[call.op.type]
    return lambda x: reduce(x, axes, keep)


@op("reduce_argmax", "reduce_argmin")
def _reduce_arg(call: Call) -> Kernel:
    x = call.tensor("x")
    axis = axis_of(call, int(call.value("axis", -1)), len(x.shape))
    keep = bool(call.value("keep_dims", False))
    wanted = call.value("output_dtype", "int32")
    call.check(call.outputs[0].dtype == wanted, f"has output_dtype {wanted} and declares {call.outputs[0].dtype}")
    runtime = RUNTIME[call.outputs[0].dtype]
    find = torch.argmax if call.op.type == "reduce_argmax" else torch.argmin
    return lambda x: find(x, dim=axis, keepdim=keep).to(runtime)


@op("topk", moves=True)
def _topk(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    axis = axis_of(call, int(call.value("axis", -1)), len(x.shape))
    k = int(call.value("k", 1))
    ascending = bool(call.value("ascending", False))
    call.value("sort", True)  # unsorted promises no order: a sorted answer is one of those allowed
    indices = bool(call.value("return_indices", True))
    wanted = call.value("output_indices_dtype", "int32")
    runtime = RUNTIME[wanted]
    call.check(len(call.outputs) == 1 + indices, "has another number of outputs than it returns")

    def top(x: Tensor) -> Any:
        # A stable sort: of equal elements the first comes first, on every machine.
        values, places = torch.sort(x, dim=axis, descending=not ascending, stable=True)
        count = x.shape[axis] if k == -1 else k
        found = values.narrow(axis, 0, count)
        return (found, places.narrow(axis, 0, count).to(runtime)) if indices else found

    return top


@op("argsort")
def _argsort(call: Call) -> Kernel:
    x = call.tensor("x")
    axis = axis_of(call, int(call.value("axis", -1)), len(x.shape))
    ascending = bool(call.value("ascending", False))
    runtime = RUNTIME[call.outputs[0].dtype]
    return lambda x: torch.argsort(x, dim=axis, descending=not ascending, stable=True).to(runtime)


@op("cumsum")
def _cumsum(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    axis = axis_of(call, int(call.value("axis", 0)), len(x.shape))
    exclusive, reverse = bool(call.value("exclusive", False)), bool(call.value("reverse", False))

    def compute(x: Tensor) -> Tensor:
        y = x.flip(axis) if reverse else x
        total = torch.cumsum(y, dim=axis, dtype=x.dtype)
        if exclusive:
            # Not total - y, which would cancel.
            zero = torch.zeros_like(total.narrow(axis, 0, 1))
            total = torch.cat([zero, total.narrow(axis, 0, total.shape[axis] - 1)], dim=axis)
        return total.flip(axis) if reverse else total

    return compute
