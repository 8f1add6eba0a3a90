"""Writes MIL ops for a program: values with tracked shapes, reshapes only where they are due.

An FX value and its MIL value hold the same elements in the same order, but not always under the same
shape: views cost nothing until an op needs a certain shape. Floating-point values are in the package's float type,
unless a lowering widens them for a while.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from coremltools.converters.mil import Builder as MilOps
from coremltools.converters.mil.mil import types

from needle_export.graph.program import FxNode, Program, layer_of
from needle_export.targets.coreml.contract import STREAM
from needle_export.targets.coreml.names import block_name, number_name
from needle_export.targets.coreml.store import WeightStore
from needle_export.targets.views import Dims, Ref, Values


class Builder(Values):
    """One function under construction.

    Args:
        program: to lower.
        store: of the package's weights.
        rows: T.
        inputs: MIL inputs by name; states among them.
        stateful: whether caches are states of the package, or inputs that the host writes.
        sdpa: whether there is one op for attention (iOS 18 on).
    """

    def __init__(
        self,
        program: Program,
        store: WeightStore,
        rows: int,
        inputs: Mapping[str, Any],
        *,
        stateful: bool,
    ) -> None:
        super().__init__(program, rows)
        self.store = store
        self.inputs = inputs
        self.stateful = stateful
        #: What a call leaves for the next one, by the state's name: whole histories, or new rows where the host writes.
        self.left: dict[str, Ref] = {}
        self._streams = {node: index for index, node in program.streams.items()}
        self._place = "start"
        self._counts: Counter[str] = Counter()
        store.begin()

    @property
    def real(self) -> str:
        """The package's float type."""
        return "fp16" if self.store.half else "fp32"

    # --- ops ---------------------------------------------------------------------------------------

    def at(self, node: FxNode) -> None:
        """Name the ops that follow after an FX node and its block; those that end in a block's stream, after it."""
        kind = getattr(node.target, "_opname", None) or str(node.target).split(".")[-2:][0]
        layer = layer_of(node)
        self._place = block_name(layer) if layer >= 0 else f"{kind}_"
        if node in self._streams:
            self._place = f"{STREAM}{self._streams[node]:02d}_"

    def place(self, name: str) -> None:
        """Name the ops that follow."""
        self._place = f"{name}_"

    def _next(self) -> str:
        """A name for one op: its place and a number, in few characters within a block."""
        self._counts[self._place] += 1
        count = self._counts[self._place]
        return f"{self._place}{count if self._place.endswith('_') else number_name(count)}"

    def op(self, kind: str, *, name: str = "", **given: Any) -> Any:
        """Append one op; its result or results. Refs among the arguments stand for their values."""
        plain = {k: self._argument(v) for k, v in given.items()}
        made = getattr(MilOps, kind)(**plain, name=name or self._next())
        if isinstance(made, (list, tuple)):
            return tuple(Ref(m, tuple(int(d) for d in m.shape)) for m in made)
        return Ref(made, tuple(int(d) for d in made.shape))

    def _argument(self, given: Any) -> Any:
        """What MIL takes: values of Refs; numbers, words, axes and shapes as constants that the whole function shares.

        coremltools would make a constant for each use, a third of the specification's bytes. It does so for what an
        op has by default too, so defaults that it writes down are given here as well.
        """
        if isinstance(given, Ref):
            return given.value
        if isinstance(given, list) and given and isinstance(given[0], Ref):
            return [g.value for g in given]
        if isinstance(given, str):
            key = ("word", given)
            if key not in self.memo:
                self.memo[key] = self.store.word(given)
            return self.memo[key]
        if isinstance(given, (bool, int, float, list, np.ndarray, np.generic)):
            data = np.asarray(given)
            if data.dtype == np.int64:
                data = data.astype(np.int32)
            if data.dtype == np.float64:
                data = data.astype(np.float32)
            return self._shared(data)
        return given

    def _shared(self, data: npt.NDArray[Any]) -> Any:
        """One constant for all that have these bytes."""
        key = ("constant", data.dtype.str, data.shape, data.tobytes())
        if key not in self.memo:
            self.memo[key] = self.store.constant(data)
        return self.memo[key]

    def add(self, x: Ref, y: Any) -> Ref:
        """x + y."""
        return self.ref_of(self.op("add", x=x, y=self._given(y)))

    def mul(self, x: Ref, y: Any) -> Ref:
        """x * y."""
        return self.ref_of(self.op("mul", x=x, y=self._given(y)))

    def times(self, x: Ref, factor: float) -> Ref:
        """x times a number; in float32 where half precision doesn't hold the number."""
        if self.store.half and float(np.float16(factor)) != factor:
            return self.narrow(self.ref_of(self.op("mul", x=self.wide(x), y=np.float32(factor))))
        return self.mul(x, factor)

    def _given(self, y: Any) -> Any:
        """A Ref as it is, a number or an array in the float type."""
        return y if isinstance(y, Ref) else self.constant(y)

    def ref_of(self, made: Any) -> Ref:
        """The one result of an op."""
        assert isinstance(made, Ref)
        return made

    def unary(self, kind: str, x: Ref, **more: Any) -> Ref:
        """An op of one value."""
        return self.ref_of(self.op(kind, x=x, **more))

    def reduce(self, kind: str, x: Ref, *axes: int, keep: bool = True) -> Ref:
        """``reduce_<kind>`` over axes."""
        at = sorted(a % len(x.dims) for a in axes)
        return self.ref_of(self.op(f"reduce_{kind}", x=x, axes=at, keep_dims=keep))

    def matmul(self, x: Any, y: Any, *, transpose_y: bool = False) -> Ref:
        """Batched product."""
        return self.ref_of(self.op("matmul", x=x, y=y, transpose_x=False, transpose_y=transpose_y))

    def linear(self, x: Ref, weight: Any, bias: Any = None) -> Ref:
        """x [..., I] with a stored matrix [O, I] and a bias [O].

        Where there is none, coremltools would write zeros of its own for every op of every function; here all share
        one vector of them.
        """
        bias = self.constant(np.zeros(weight.shape[0])) if bias is None else bias
        return self.ref_of(self.op("linear", x=x, weight=weight, bias=bias))

    def wide(self, x: Ref) -> Ref:
        """In float32: once for all that read it, and of what was narrowed, what it was before, under x's shape."""
        if not self.store.half or x.value.dtype == types.fp32:
            return x
        key, whole = ("wide", x.value), self.memo.get(("shaped from", x.value))
        if whole is not None and ("wide", whole.value) in self.memo:
            return self.reshape(self.memo["wide", whole.value], x.dims)
        if key not in self.memo:
            self.memo[key] = self.ref_of(self.op("cast", x=x, dtype="fp32"))
        widened: Ref = self.memo[key]
        return widened

    def narrow(self, x: Ref) -> Ref:
        """Back in the package's float type. If all that reads it widens it again, the op is left out in the end."""
        if not self.store.half:
            return x
        narrowed = self.ref_of(self.op("cast", x=x, dtype="fp16"))
        self.memo["wide", narrowed.value] = x
        return narrowed

    def reshape(self, x: Ref, dims: Dims) -> Ref:
        """The same elements under another shape; nothing if it, or what it was made from, has it."""
        if math.prod(x.dims) != math.prod(dims):
            raise ValueError(f"{x.dims} doesn't fit into {dims}")
        x = self.memo.get(("shaped from", x.value), x)
        if x.dims == dims:
            return x
        key = ("reshape", x.value, dims)
        if key not in self.memo:
            self.memo[key] = self.op("reshape", x=x, shape=np.asarray(dims, np.int32))
            self.memo["shaped from", self.memo[key].value] = x
        shaped: Ref = self.memo[key]
        return shaped

    def transpose(self, x: Ref, order: Sequence[int]) -> Ref:
        """Axes in another order."""
        return self.ref_of(self.op("transpose", x=x, perm=list(order)))

    def slice(self, x: Ref, axis: int, start: int, size: int) -> Ref:
        """A range of one axis; nothing if it is all of it."""
        at = axis % len(x.dims)
        if start == 0 and size == x.dims[at]:
            return x
        begin = [start if i == at else 0 for i in range(len(x.dims))]
        end = [start + size if i == at else d for i, d in enumerate(x.dims)]
        return self.ref_of(self.op("slice_by_index", x=x, begin=begin, end=end))

    def cut(self, x: Ref, axis: int, sizes: Sequence[int]) -> tuple[Ref, ...]:
        """Pieces of one axis, by one op."""
        if len(sizes) == 1:
            return (x,)
        at = axis % len(x.dims)
        equal = {"num_splits": len(sizes)} if len(set(sizes)) == 1 else {"split_sizes": list(sizes)}
        made = self.op("split", x=x, axis=at, **equal)
        return tuple(made)

    def concat(self, values: Sequence[Ref], axis: int) -> Ref:
        """Behind each other along one axis."""
        if len(values) == 1:
            return values[0]
        return self.ref_of(self.op("concat", values=list(values), axis=axis % len(values[0].dims), interleave=False))

    def gather(self, x: Any, index: Any, axis: int) -> Ref:
        """Entries of one axis by indices."""
        return self.ref_of(self.op("gather", x=x, indices=index, axis=axis, batch_dims=0, validate_indices=False))

    # --- constants ---------------------------------------------------------------------------------

    def constant(self, array: npt.ArrayLike, dtype: Any = None) -> Ref:
        """A constant of no checkpoint tensor in the package's float type (or another), shared by value."""
        data = np.asarray(array, dtype=dtype or self.store.dtype)
        return Ref(self._shared(data), data.shape)

    def vector(self, node: FxNode, dims: Dims | None = None) -> Ref:
        """A small weight in the package's float type, under a shape."""
        weight = self.program.weights[node.name]
        key = ("vector", node.name, dims)
        if key not in self.memo:
            data = weight.value.numpy()
            data = data if dims is None else data.reshape(dims)
            self.memo[key] = Ref(self.store.plain(weight, data), data.shape)
        value: Ref = self.memo[key]
        return value
