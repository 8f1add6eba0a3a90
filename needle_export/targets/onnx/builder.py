"""Writes ONNX nodes for a program: typed values with tracked shapes, reshapes only where they are due.

An FX value and its ONNX value hold the same elements in the same order, but not always under the same
shape: views cost nothing until an op needs a certain shape. A dimension None is T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.convenience

from needle_export.config.rules import Rules
from needle_export.graph.program import FxNode, Program, Weight, layer_of
from needle_export.targets.claims import tensor_name
from needle_export.targets.constants import short_name, too_large
from needle_export.targets.onnx.store import Stored, Weights

Dims = tuple[int | None, ...]

MICROSOFT = "com.microsoft"

#: Weights with fewer elements stay float32 where halves are asked for.
_SMALL = 1 << 13

#: The same where integers are asked for, as there these are more of the file.
_TINY = 1 << 9

#: Matrices with fewer elements stay floats where integers are asked for: rounding their input would cost more than the
#: bytes.
MATRIX = 1 << 12

_FEW = "small: a cast would cost more than the bytes"
_HALVED = ("small: half precision, as rounding its input would cost more than the bytes",
           "half precision: it is no matrix whose rows divide into blocks of 16 or more columns")

#: Constants up to this size are stored in the graph itself.
_INLINE_BYTES = 64


@dataclass(frozen=True)
class Ref:
    """An ONNX value and the shape it has there."""

    value: ir.Value
    dims: Dims


@dataclass(frozen=True)
class Features:
    """Which ops a graph may use.

    Attributes:
        opset: of the standard domain.
        attention: ``Attention``, ``RotaryEmbedding`` and ``RMSNormalization`` (opset 23).
        contrib: ONNX Runtime's own ops, which the newest profile uses where they are faster.
        lp_normalization: whether runtimes of this opset have it. ONNX Runtime implemented the form of
            opset 22 long after the rest of opset 23, so that profile goes without.
    """

    opset: int
    attention: bool
    contrib: bool
    lp_normalization: bool


def features(opset: int) -> Features:
    """The features of a supported opset."""
    return {
        24: Features(24, attention=True, contrib=True, lp_normalization=True),
        23: Features(23, attention=True, contrib=False, lp_normalization=False),
        21: Features(21, attention=False, contrib=False, lp_normalization=True),
    }[opset]


class Builder:
    """One ONNX graph under construction."""

    def __init__(
        self, program: Program, store: Weights, feature: Features, rules: Rules, data_name: str
    ) -> None:
        self.program = program
        self.store = store
        self.feature = feature
        self.rules = rules
        self.data_name = data_name
        self.rows = program.rows
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.env: dict[FxNode, Ref | tuple[Ref, ...]] = {}
        self.memo: dict[object, Any] = {}
        self.layer = -1
        #: What a folded weight can be made of at load time; nothing unless whoever lowers says how.
        self.at_load: Callable[[Builder, Weight, tuple[int, ...]], ir.Value | None] = lambda *_: None
        self._count = 0

    # --- nodes -------------------------------------------------------------------------------------

    def op(self, kind: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Append a node; returns its output, or a tuple of them."""
        self._count += 1
        place = f"layers.{self.layer}/" if self.layer >= 0 else ""
        attrs = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
        node = ir.Node(domain, kind, inputs, attrs, num_outputs=outputs, name=f"{place}{kind}_{self._count}")
        for index, value in enumerate(node.outputs):
            value.name = f"v{self._count}" if outputs == 1 else f"v{self._count}_{index}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def constant(self, array: npt.ArrayLike, dtype: Any = None) -> ir.Value:
        """A small constant, shared by value."""
        data = np.asarray(array, dtype=dtype)
        key = (data.dtype.str, data.shape, data.tobytes())
        if key not in self.memo:
            name = f"c{len(self.initializers)}"
            if data.nbytes <= _INLINE_BYTES:
                self.memo[key] = self._initializer(name, ir.tensor(data, name=name))
            else:
                stored = self.store.add(name, data, ())
                self.memo[key] = self._external(name, stored.offset, ir.DataType.from_numpy(data.dtype), data.shape)
        value: ir.Value = self.memo[key]
        return value

    def _initializer(self, name: str, tensor: Any) -> ir.Value:
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.initializers[name] = value
        return value

    def _external(self, name: str, offset: int, kind: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        while name in self.initializers:
            name += "_"
        tensor = ir.ExternalTensor(
            self.data_name,
            offset,
            math.ceil(math.prod(shape) * kind.itemsize),
            kind,
            shape=ir.Shape(shape),
            name=name,
            base_dir=str(self.store.path.parent),
        )
        return self._initializer(name, tensor)

    def part(
        self, stored: Stored, shape: tuple[int, ...], name: str = "", kind: ir.DataType | None = None
    ) -> ir.Value:
        """The first bytes of what is stored under a shape.

        Args:
            name: if it isn't to be the stored one's.
            kind: likewise.
        """
        name, kind = name or stored.name, kind or ir.DataType.from_numpy(np.dtype(stored.kind))
        key = ("part", stored.offset, name, shape, kind)
        if key not in self.memo:
            self.memo[key] = self._external(name, stored.offset, kind, shape)
        value: ir.Value = self.memo[key]
        return value

    # --- weights -----------------------------------------------------------------------------------

    def weight(self, node: FxNode) -> ir.Value:
        """A weight as float32 (or integers), ready for arithmetic."""
        weight = self.program.weights[node.name]
        return self.array(weight, weight.value.contiguous().numpy())

    def array(self, weight: Weight, data: npt.NDArray[Any], name: str = "") -> ir.Value:
        """A weight's values in a layout of the caller's, as float32 (or integers), ready for arithmetic.

        Args:
            name: of the constant; the weight's if left out.
        """
        value = self.at_load(self, weight, data.shape)
        return self._widened(*self.stored(weight, data, name=name)) if value is None else value

    def matrix(self, node: FxNode, *, transpose: bool = False) -> ir.Value:
        """A matrix as float32, under the name by which it is found in the file and compared."""
        value = None
        if not transpose:
            weight = self.program.weights[node.name]
            value = self.at_load(self, weight, tuple(weight.value.shape))
        return self._widened(*self.raw_matrix(node, transpose=transpose)) if value is None else value

    def narrows(self, weight: Weight) -> bool:
        """Whether its scheme stores a weight of this size in less than float32."""
        scheme = self.rules.of(weight.parts)
        return scheme != "fp32" and weight.value.numel() >= (_SMALL if scheme == "fp16" else _TINY)

    def _widened(self, value: ir.Value, halved: bool) -> ir.Value:
        if not halved:
            return value
        key = ("cast", value.name)
        if key not in self.memo:
            layer, self.layer = self.layer, -1
            self.memo[key] = self.op("Cast", value, to=int(ir.DataType.FLOAT))
            self.layer = layer
        cast: ir.Value = self.memo[key]
        return cast

    def raw_matrix(self, node: FxNode, *, transpose: bool = False) -> tuple[ir.Value, bool]:
        """A matrix as it is stored, and whether that is half precision."""
        weight = self.program.weights[node.name]
        tensor = weight.value.t() if transpose else weight.value
        return self.stored(weight, tensor.contiguous().numpy(), transposed=transpose, name=matrix_name(weight))

    def stored(
        self, weight: Weight, data: npt.NDArray[Any], *, transposed: bool = False, name: str = ""
    ) -> tuple[ir.Value, bool]:
        """Put a weight's data in the file (once) and return the value and whether it is half precision.

        ``transposed`` tells two layouts of a square matrix apart; other layouts differ in shape.

        Args:
            name: of the constant; the weight's if left out.

        Raises:
            Unsupported: a value is beyond half precision, where that is asked for.
        """
        reason, scheme = "", self.rules.of(weight.parts)
        if scheme != "fp32" and data.dtype == np.float32:
            reason = _why_float(weight, scheme)
            if not reason:
                with np.errstate(over="ignore"):  # told in the next line
                    data = data.astype(np.float16)
                if not np.isfinite(data).all():
                    raise too_large(weight, "a value is beyond half precision")
                reason = "" if scheme == "fp16" else _HALVED[weight.value.numel() >= MATRIX]
                reason = f"half precision: {weight.uncoded}" if weight.uncoded else reason
        key = ("weight", id(weight.value), data.shape, data.dtype.str, transposed, name)
        if key in self.memo:
            hit: ir.Value = self.memo[key]
            return hit, data.dtype == np.float16
        plain = short_name(weight.name)
        stored = self.store.add(plain, data, weight.parts, reason)
        self.memo[key] = self._external(name or plain, stored.offset, ir.DataType.from_numpy(data.dtype), data.shape)
        return self.memo[key], data.dtype == np.float16

    def small(self, weight: Weight) -> ir.Value:
        """A few numbers of a weight that was made for one op, in float32."""
        name, data = short_name(weight.name), weight.value.numpy()
        reason = _FEW if self.rules.of(weight.parts) != "fp32" else ""
        return self.part(self.store.add(name, data, weight.parts, reason), data.shape)

    def number(self, node: FxNode) -> float:
        """The value of a scalar weight."""
        return float(self.program.weights[node.name].value)

    # --- shapes ------------------------------------------------------------------------------------

    def dims_of(self, node: FxNode) -> Dims:
        """The logical shape of an FX node."""
        return tuple(d if isinstance(d, int) else None for d in node.meta["val"].shape)

    def ref(self, node: FxNode) -> Ref:
        """What an FX node became."""
        if self.program.weight_of(node) is not None:
            return Ref(self.weight(node), self.dims_of(node))
        found = self.env[node]
        if isinstance(found, tuple):
            raise TypeError(f"{node.name} has several results")
        return found

    def get(self, node: FxNode, dims: Dims | None = None) -> ir.Value:
        """An FX node's value in a wanted shape (default: its logical one)."""
        return self.shaped(self.ref(node), self.dims_of(node) if dims is None else dims)

    def shaped(self, ref: Ref, dims: Dims) -> ir.Value:
        """The same elements under another shape."""
        if ref.dims == dims:
            return ref.value
        key = ("reshape", ref.value, dims)
        if key not in self.memo:
            target = [-1 if d is None else d for d in dims]
            if target.count(-1) > 1:
                raise ValueError(f"a reshape to {dims} has two unknown sizes")
            self.memo[key] = self.op("Reshape", ref.value, self.constant(target, np.int64))
        value: ir.Value = self.memo[key]
        return value

    @staticmethod
    def numel(dims: Dims) -> int:
        """Elements per T."""
        return math.prod(d for d in dims if d is not None)

    def put(self, node: FxNode, value: ir.Value, dims: Dims | None = None) -> None:
        """Record what an FX node became."""
        self.env[node] = Ref(value, self.dims_of(node) if dims is None else dims)

    def at(self, node: FxNode) -> None:
        """Name the nodes that follow after the block of an FX node."""
        self.layer = layer_of(node)


def matrix_name(weight: Weight, rows: int | None = None) -> str:
    """What the constant of a matrix is called, or of its first rows; ``readback`` finds it by that."""
    cut = "" if rows is None else f"[:{rows}]"
    return tensor_name(f"{short_name(weight.name)}{cut}", weight.folded)


def _why_float(weight: Weight, scheme: str) -> str:
    """Why a weight stays float32 where halves, or integers, are asked for; empty if it doesn't."""
    if weight.folded:
        return "constants were folded into it, so its values are not the checkpoint's halves"
    if weight.value.numel() < (_SMALL if scheme == "fp16" else _TINY):
        return _FEW
    return ""
