"""Lowering with shapes tracked: values as they lie in a target, and the ATen ops that only look at them.

An FX value and the target's value hold the same elements in the same order, but not always under the same
shape: views cost nothing until an op needs a certain shape.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from needle_export.graph.program import FxNode, Program

Dims = tuple[int, ...]

aten = torch.ops.aten


@dataclass(frozen=True)
class Ref:
    """A target's value and the shape it has there."""

    value: Any
    dims: Dims


class Values(ABC):
    """What FX nodes became, in one graph of a target.

    Args:
        program: that is lowered.
        rows: T.
    """

    def __init__(self, program: Program, rows: int) -> None:
        self.program = program
        self.rows = rows
        #: An op of several results has a tuple, with None for those that nobody may ask for.
        self.env: dict[FxNode, Ref | tuple[Ref | None, ...]] = {}
        self.memo: dict[object, Any] = {}

    @abstractmethod
    def reshape(self, x: Ref, dims: Dims) -> Ref:
        """The same elements under another shape; nothing if it has it."""

    @abstractmethod
    def transpose(self, x: Ref, order: Sequence[int]) -> Ref:
        """Axes in another order."""

    @abstractmethod
    def slice(self, x: Ref, axis: int, start: int, size: int) -> Ref:
        """A range of one axis; nothing if it is all of it."""

    @abstractmethod
    def constant(self, array: npt.ArrayLike, dtype: Any = None) -> Ref:
        """A constant of no checkpoint tensor, shared by value."""

    @abstractmethod
    def vector(self, node: FxNode) -> Ref:
        """A small weight as floating point."""

    def dims_of(self, node: FxNode) -> Dims:
        """The logical shape of an FX node."""
        return tuple(int(d) for d in node.meta["val"].shape)

    def ref(self, node: FxNode) -> Ref:
        """What an FX node became."""
        if self.program.weight_of(node) is not None:
            return self.vector(node)
        found = self.env[node]
        if isinstance(found, tuple):
            raise TypeError(f"{node.name} has several results")
        return found

    def get(self, node: FxNode, dims: Dims | None = None) -> Ref:
        """An FX node's value in a wanted shape (default: its logical one)."""
        return self.reshape(self.ref(node), self.dims_of(node) if dims is None else dims)

    def put(self, node: FxNode, value: Ref) -> None:
        """Record what an FX node became."""
        self.env[node] = value

    def operand(self, node: FxNode, result: FxNode) -> Ref:
        """A value as it lies, where that has the result's shape already; else in its logical shape."""
        ref = self.ref(node)
        return ref if ref.dims == self.dims_of(result) else self.get(node)

    def sum_of_integers(self, n: FxNode, add: Callable[[Ref, Ref], Ref]) -> Ref:
        """Positions, or rows of tables, in 32 bits."""
        left, right = (self._integers(a) for a in n.args)
        # At one row, plus 0 .. 0.
        return left if self.rows == 1 and right is self.memo.get("arange") else add(left, right)

    def _integers(self, node: FxNode) -> Ref:
        weight = self.program.weight_of(node)
        return self.get(node) if weight is None else self.constant(weight.value.numpy(), np.int32)


def view(b: Values, n: FxNode) -> None:
    """Another shape of the same elements: nothing to emit."""
    b.env[n] = b.ref(n.args[0])


def permute(b: Values, n: FxNode) -> None:
    """Free where only axes of length 1 move."""
    value, order = n.args
    dims = b.dims_of(value)
    moved = [i for i in order if dims[i] != 1]
    if moved == sorted(moved):
        view(b, n)
    else:
        b.put(n, b.transpose(b.get(value), order))


def arange(b: Values, n: FxNode) -> None:
    """0 .. T-1, known when the graph is written."""
    b.memo["arange"] = b.constant(np.arange(n.args[0]), np.int32)
    b.put(n, b.memo["arange"])


def slice_(b: Values, n: FxNode) -> None:
    """A range of one axis; of a weight, nothing (the reader takes it from the weight)."""
    value, dim, start, end = n.args
    if b.program.weight_of(value) is not None:
        return
    dims = b.dims_of(value)
    b.put(n, b.slice(b.get(value), dim, start, min(end, dims[dim]) - start))


def select(b: Values, n: FxNode) -> None:
    """One index of one axis."""
    value, dim, index = n.args
    b.put(n, b.slice(b.get(value), dim, index, 1))


def getitem(b: Values, n: FxNode) -> None:
    """One result of several."""
    results = b.env[n.args[0]]
    if isinstance(results, Ref):
        raise TypeError(f"{n.args[0]} has one result")
    found = results[n.args[1]]
    if found is not None:
        b.env[n] = found


VIEWS: dict[object, Callable[[Any, FxNode], None]] = {
    operator.getitem: getitem,
    aten.reshape.default: view,
    aten.flatten.using_ints: view,
    aten.unsqueeze.default: view,
    aten.squeeze.dim: view,
    aten.permute.default: permute,
    aten.arange.default: arange,
    aten.slice.Tensor: slice_,
    aten.select.int: select,
}
