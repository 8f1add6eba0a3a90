"""Writes TFLite builtins for a program: values with tracked shapes, reshapes only where they are due.

An FX value and its TFLite value hold the same elements in the same order, but not always under the same
shape: views cost nothing until an op needs a certain shape. A method that is named after an
op emits that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from litert_converter.mlir import ir

from needle_export.graph.program import FxNode, Program, Weight, layer_of
from needle_export.targets.constants import is_constant
from needle_export.targets.tflite import halves
from needle_export.targets.tflite.store import Matrix, WeightStore
from needle_export.targets.views import Dims, Ref, Values

#: Stands for minus infinity in a mask: its exponential is 0 in float32 and it survives a cast to half.
MASKED = -1e9

#: Ops that end in the stream behind a block are called this, the block's number, and a running number.
STREAM = "stream_"


class Builder(Values):
    """One function (a signature's graph) under construction."""

    def __init__(self, program: Program, store: WeightStore, rows: int) -> None:
        super().__init__(program, rows)
        self.store = store
        #: New rows of every state, by the state's name: what the host appends.
        self.new_rows: dict[str, Ref] = {}
        self._streams = {node: index for index, node in program.streams.items()}
        self._place = ""
        self._count = 0
        self._f32, self._i1 = ir.F32Type.get(), ir.IntegerType.get_signless(1)

    # --- ops ---------------------------------------------------------------------------------------

    def at(self, node: FxNode) -> None:
        """Name the ops that follow after an FX node and its block; those that end in a block's stream, after it."""
        kind = getattr(node.target, "_opname", None) or str(node.target).split(".")[-2:][0]
        layer = layer_of(node)
        self._place = f"layers.{layer}/{kind}" if layer >= 0 else kind
        if node in self._streams:
            self._place = f"{STREAM}{self._streams[node]:02d}"

    def op(self, kind: str, inputs: Sequence[Any], dims: Dims, *, dtype: Any = None, **attributes: Any) -> Ref:
        """Append one op with one result."""
        (result,) = self.ops(kind, inputs, (dims,), dtype=dtype, **attributes)
        return result

    def ops(
        self, kind: str, inputs: Sequence[Any], dims: Sequence[Dims], *, dtype: Any = None, **attributes: Any
    ) -> tuple[Ref, ...]:
        """Append one op with several results."""
        self._count += 1
        element = dtype or self._f32
        types = [ir.RankedTensorType.get(d, element) for d in dims]
        values = [i.value if isinstance(i, Ref) else i for i in inputs]
        with ir.Location.name(f"{self._place}_{self._count}"):
            made = ir.Operation.create(
                f"tfl.{kind}",
                results=types,
                operands=values,
                attributes={name: _attribute(value) for name, value in attributes.items()},
            )
        return tuple(Ref(v, d) for v, d in zip(made.results, dims, strict=True))

    def binary(self, kind: str, x: Ref, y: Ref, *, dtype: Any = None) -> Ref:
        """An elementwise op of two values that broadcast."""
        element = dtype or ir.RankedTensorType(x.value.type).element_type
        fused = {"fused_activation_function": "NONE"} if kind in ("add", "sub", "mul", "div") else {}
        return self.op(kind, (x, y), np.broadcast_shapes(x.dims, y.dims), dtype=element, **fused)

    def compare(self, kind: str, x: Ref, y: Ref) -> Ref:
        """A comparison of integers: bool."""
        return self.binary(kind, x, y, dtype=self._i1)

    def unary(self, kind: str, x: Ref) -> Ref:
        """An elementwise op of one value."""
        return self.op(kind, (x,), x.dims)

    def add(self, x: Ref, y: Ref) -> Ref:
        """x + y."""
        return self.binary("add", x, y)

    def mul(self, x: Ref, y: Ref) -> Ref:
        """x * y."""
        return self.binary("mul", x, y)

    def reduce(self, kind: str, x: Ref, *axes: int, keep: bool = True) -> Ref:
        """``sum`` or ``mean`` over axes."""
        at = sorted(a % len(x.dims) for a in axes)
        dims = tuple(1 if i in at else d for i, d in enumerate(x.dims) if keep or i not in at)
        return self.op(kind, (x, self.constant(at, np.int32)), dims, keep_dims=keep)

    def softmax(self, x: Ref) -> Ref:
        """Over the last axis."""
        return self.op("softmax", (x,), x.dims, beta=1.0)

    def matmul(self, x: Ref, y: Ref, *, transpose_y: bool = False) -> Ref:
        """Batched: x [..., M, K] with y [..., K, N], or [..., N, K] transposed."""
        lead = np.broadcast_shapes(x.dims[:-2], y.dims[:-2])
        width = y.dims[-2] if transpose_y else y.dims[-1]
        return self.op(
            "batch_matmul",
            (x, y),
            (*lead, x.dims[-2], width),
            adj_x=False,
            adj_y=transpose_y,
            asymmetric_quantize_inputs=False,
        )

    def product(self, x: Ref, weight: Ref, bias: Ref | None = None) -> Ref:
        """x [..., I], or in another shape of as many elements as rows, with a constant weight [O, I]."""
        inner = weight.dims[1]
        fits = x.dims[-1] == inner
        return self.op(
            "fully_connected",
            (x, weight, self._nothing() if bias is None else bias),
            (*x.dims[:-1], weight.dims[0]) if fits else (math.prod(x.dims) // inner, weight.dims[0]),
            fused_activation_function="NONE",
            weights_format="DEFAULT",
            keep_num_dims=fits,
            # Read for int8 weights only: TFLite's own kernel then rounds inputs as XNNPACK does anyway.
            asymmetric_quantize_inputs=True,
        )

    def linear(self, x: Ref, matrix: Matrix, bias: tuple[Weight, npt.NDArray[np.float32]] | None = None) -> Ref:
        """x [..., I] with a stored matrix [O, I] and a bias [O]; where its rows have scales, one op more."""
        scales = matrix.scales
        if bias is None:
            product = self.product(x, matrix.operand)
            return product if scales is None else self.mul(product, self.constant(scales))
        weight, values = bias
        if scales is None:
            return self.product(x, matrix.operand, self.store.plain(weight, values, self._wide(weight, halves.BIAS)))
        if np.abs(scales).min() < np.finfo(np.float32).tiny:
            scaled = self.mul(self.product(x, matrix.operand), self.constant(scales))
            return self.add(scaled, self.store.plain(weight, values))
        if self.store.compact and is_constant(weight.parts) and (values == values[0]).all():
            # One number for all, which only behind the scales is still one.
            return self.add(self.mul(self.product(x, matrix.operand), self.constant(scales)), self.constant(values[0]))
        # Before the scales, so that the product can add it.
        addend = self.store.plain(weight, values / scales, self._wide(weight, halves.BIAS))
        product = self.product(x, matrix.operand, addend)
        return self.mul(product, self.constant(scales))

    def _wide(self, weight: Weight, reason: str) -> str:
        """Why a vector stays float32 at 4 bits, where others don't."""
        return reason if self.store.rules.of(weight.parts) == "int4" else ""

    def reshape(self, x: Ref, dims: Dims) -> Ref:
        """The same elements under another shape; nothing if it has it."""
        if x.dims == dims:
            return x
        if math.prod(x.dims) != math.prod(dims):
            raise ValueError(f"{x.dims} doesn't fit into {dims}")
        key = ("reshape", x.value, dims)
        if key not in self.memo:
            element = ir.RankedTensorType(x.value.type).element_type
            shape = self.constant(list(dims), np.int32)
            self.memo[key] = self.op("reshape", (x, shape), dims, dtype=element)
        shaped: Ref = self.memo[key]
        return shaped

    def transpose(self, x: Ref, order: Sequence[int]) -> Ref:
        """Axes in another order."""
        return self.op("transpose", (x, self.constant(list(order), np.int32)), tuple(x.dims[i] for i in order))

    def slice(self, x: Ref, axis: int, start: int, size: int) -> Ref:
        """A range of one axis; nothing if it is all of it."""
        at = axis % len(x.dims)
        if start == 0 and size == x.dims[at]:
            return x
        dims = tuple(size if i == at else d for i, d in enumerate(x.dims))
        begin = [start if i == at else 0 for i in range(len(dims))]
        element = ir.RankedTensorType(x.value.type).element_type
        return self.op(
            "slice", (x, self.constant(begin, np.int32), self.constant(list(dims), np.int32)), dims, dtype=element
        )

    def split(self, x: Ref, axis: int, count: int) -> tuple[Ref, ...]:
        """Equal pieces of one axis."""
        at = axis % len(x.dims)
        dims = tuple(d // count if i == at else d for i, d in enumerate(x.dims))
        return self.ops("split", (self.constant(at, np.int32), x), (dims,) * count, num_splits=np.int32(count))

    def cut(self, x: Ref, axis: int, sizes: Sequence[int]) -> tuple[Ref, ...]:
        """Pieces of one axis: two to four equal ones by one op, as XNNPACK takes that, others by one op each."""
        if 2 <= len(sizes) <= 4 and len(set(sizes)) == 1:
            return self.split(x, axis, len(sizes))
        starts = np.cumsum([0, *sizes[:-1]])
        return tuple(self.slice(x, axis, int(s), size) for s, size in zip(starts, sizes, strict=True))

    def concat(self, values: Sequence[Ref], axis: int) -> Ref:
        """Behind each other along one axis."""
        if len(values) == 1:
            return values[0]
        first = values[0].dims
        at = axis % len(first)
        dims = tuple(sum(v.dims[at] for v in values) if i == at else d for i, d in enumerate(first))
        element = ir.RankedTensorType(values[0].value.type).element_type
        return self.op(
            "concatenation", values, dims, dtype=element, axis=np.int32(at), fused_activation_function="NONE"
        )

    def gather(self, x: Ref, index: Ref, axis: int) -> Ref:
        """Entries of one axis by a vector of indices."""
        at = axis % len(x.dims)
        dims = (*x.dims[:at], *index.dims, *x.dims[at + 1 :])
        return self.op("gather", (x, index), dims, axis=np.int32(at), batch_dims=np.int32(0))

    def lookup(self, matrix: Matrix, index: Ref) -> Ref:
        """Rows of a table [N, D] by indices [M] int32; where they have scales, three ops."""
        table = matrix.operand
        rows = self.op("embedding_lookup", (index, table), (index.dims[0], table.dims[1]))
        if matrix.scales is None:
            return rows
        scales = self.constant(matrix.scales.reshape(-1, 1))
        return self.mul(rows, self.op("embedding_lookup", (index, scales), (index.dims[0], 1)))

    def to_float(self, x: Ref) -> Ref:
        """Integers or truth values as float32."""
        return self.op("cast", (x,), x.dims)

    def choose(self, condition: Ref, yes: Ref, no: Ref) -> Ref:
        """One value where a condition holds, another elsewhere."""
        dims = np.broadcast_shapes(condition.dims, yes.dims, no.dims)
        element = ir.RankedTensorType(yes.value.type).element_type
        return self.op("select_v2", (condition, yes, no), dims, dtype=element)

    def _nothing(self) -> Any:
        if "nothing" not in self.memo:
            made = ir.Operation.create(
                "tfl.no_value", results=[ir.NoneType.get()], attributes={"value": ir.UnitAttr.get()}
            )
            self.memo["nothing"] = made.result
        return self.memo["nothing"]

    # --- constants ---------------------------------------------------------------------------------

    def constant(self, array: npt.ArrayLike, dtype: Any = np.float32) -> Ref:
        """A constant of no checkpoint tensor, shared by value."""
        data = np.ascontiguousarray(np.asarray(array, dtype=dtype))
        data = data.reshape(np.shape(array))
        key = ("constant", data.dtype.str, data.shape, data.tobytes())
        if key not in self.memo:
            self.memo[key] = Ref(self.store.constant(data), data.shape)
        value: Ref = self.memo[key]
        return value

    def vector(self, node: FxNode, dims: Dims | None = None, factor: Any = None) -> Ref:
        """A small weight in float32, under a shape, times a factor."""
        weight = self.program.weights[node.name]
        key = ("vector", node.name, dims, None if factor is None else np.asarray(factor).tobytes())
        if key not in self.memo:
            data = weight.value.numpy()
            data = data if factor is None else (data * np.asarray(factor, np.float32)).astype(np.float32)
            data = data if dims is None else data.reshape(dims)
            reason = "" if factor is None else self._wide(weight, halves.FOLDED)
            self.memo[key] = self.store.plain(weight, np.ascontiguousarray(data), reason)
        value: Ref = self.memo[key]
        return value


def _attribute(value: Any) -> Any:
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F32Type.get(), value)
    if isinstance(value, (int, np.integer)):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), int(value))
    return ir.StringAttr.get(value)
