"""Parts of tensors: cut out, and put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from needle_export.targets.coreml.evaluate.call import Call, Kernel, axis_of, op


class _Window:
    """Which places of each axis a slice takes, as Python's slices say; known beforehand or only at run time.

    The tensors ``begin`` and ``end`` are the last arguments of a kernel where they aren't constant.
    """

    def __init__(self, call: Call, rank: int) -> None:
        self._stride = call.value("stride", None) or [1] * rank
        self._begin_mask = call.value("begin_mask", None) or [False] * rank
        self._end_mask = call.value("end_mask", None) or [False] * rank
        self._squeeze = call.value("squeeze_mask", None) or [False] * rank
        for values in (self._stride, self._begin_mask, self._end_mask, self._squeeze):
            call.check(len(values) == rank, f"has a parameter of {len(values)} entries for rank {rank}")
        self.fixed: tuple[list[int], list[int]] | None = None
        begin, end = call.constant("begin"), call.constant("end")
        if begin is not None and end is not None:
            self.fixed = (begin.dense.tolist(), end.dense.tolist())
        else:
            call.tensor("begin")
            call.tensor("end")
        call.check(call.type("begin").shape == (rank,) == call.type("end").shape, "has a begin or end of another rank")

    def places(self, shape: Sequence[int], bounds: Sequence[Tensor]) -> list[int | range]:
        """The places of each axis: a number where the axis goes, and a range where it stays.

        Raises:
            IndexError: a place that is asked for alone is outside.
        """
        begin, end = self.fixed if self.fixed is not None else (bounds[0].tolist(), bounds[1].tolist())
        places: list[int | range] = []
        for axis, size in enumerate(shape):
            if self._squeeze[axis]:
                place = 0 if self._begin_mask[axis] else begin[axis]
                if not -size <= place < size:
                    raise IndexError(f"place {place} of axis {axis} is outside {size}")
                places.append(place % size)
                continue
            cut = slice(
                None if self._begin_mask[axis] else begin[axis],
                None if self._end_mask[axis] else end[axis],
                self._stride[axis],
            )
            places.append(range(*cut.indices(size)))
        return places


def _index(places: Sequence[int | range]) -> tuple[Any, ...] | None:
    """Places as an index that gives a view, or None where one runs backwards, which torch's slices can't."""
    index: list[Any] = []
    for place in places:
        if isinstance(place, int):
            index.append(place)
        elif place.step < 0:
            return None
        else:
            index.append(slice(place.start, max(place.stop, place.start), place.step))
    return tuple(index)


def _take(x: Tensor, places: Sequence[int | range]) -> Tensor:
    index = _index(places)
    if index is not None:
        return x[index]
    for axis in reversed(range(len(places))):
        place = places[axis]
        if isinstance(place, int):
            x = x.select(axis, place)
        else:
            x = x.index_select(axis, torch.tensor(list(place), dtype=torch.int64))
    return x


@op("slice_by_index", moves=True)
def _slice_by_index(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    window = _Window(call, len(x.shape))
    if window.fixed is not None and -1 not in x.shape:
        places = window.places(x.shape, ())
        index = _index(places)
        if index is not None:
            return lambda x: x[index]
    return lambda x, *bounds: _take(x, window.places(x.shape, bounds))


@op("slice_update", moves=True)
def _slice_update(call: Call) -> Kernel:
    x, update = call.tensor("x"), call.tensor("update")
    call.same("x", "update")
    window = _Window(call, len(x.shape))
    call.check(bool(update.shape), "has an update of rank 0")

    def put(x: Tensor, update: Tensor, *bounds: Tensor) -> Tensor:
        places = window.places(x.shape, bounds)
        sizes = tuple(len(place) for place in places if not isinstance(place, int))
        if tuple(update.shape) != sizes:
            # Nothing is broadcast: a slice that runs over the end must not pass for a smaller one.
            raise IndexError(f"an update of sizes {list(update.shape)} for a slice of sizes {list(sizes)}")
        whole = x.clone()
        index = _index(places)
        if index is not None:
            whole[index] = update
            return whole
        turned = [axis for axis, place in enumerate(p for p in places if not isinstance(p, int)) if place.step < 0]
        forward = [place[::-1] if isinstance(place, range) and place.step < 0 else place for place in places]
        whole[_index(forward)] = update.flip(turned)
        return whole

    return put


@op("slice_by_size", moves=True)
def _slice_by_size(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    sizes = call.value("size")
    rank = len(x.shape)
    call.check(len(sizes) == rank, "has another number of sizes than dimensions")
    begin = call.constant("begin")
    if begin is None:
        call.tensor("begin")
    fixed = None if begin is None else begin.dense.tolist()

    def cut(x: Tensor, *bounds: Tensor) -> Tensor:
        starts = fixed if fixed is not None else bounds[0].tolist()
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            length = x.shape[axis] - start if size == -1 else size
            if start < 0 or start + length > x.shape[axis]:
                raise IndexError(f"places {start} to {start + length} of axis {axis} are outside {x.shape[axis]}")
            if length != x.shape[axis]:
                x = x.narrow(axis, start, length)
        return x

    return cut


@op("split", moves=True)
def _split(call: Call) -> Kernel:
    x = call.tensor("x")
    axis = axis_of(call, int(call.value("axis")), len(x.shape))
    sizes = call.value("split_sizes", None)
    count = call.value("num_splits", None)
    if sizes is None:
        call.check(count is not None and x.shape[axis] % count == 0, f"splits {x.shape[axis]} into {count}")
        sizes = [x.shape[axis] // count] * count
    call.check(count is None or count == len(sizes), "has another num_splits than split_sizes")
    call.check(sum(sizes) == x.shape[axis] and len(sizes) == len(call.outputs), "has sizes that aren't its input's")
    parts: Callable[[Tensor], Any] = lambda x: torch.split(x, sizes, dim=axis)  # noqa: E731  typed, for mypy
    return parts if len(sizes) > 1 else lambda x: x
