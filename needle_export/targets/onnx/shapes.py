"""Types and sizes of every value of a graph, with its symbolic sizes given: what a call would hold, and nothing is run.

Standard ops are inferred by the onnx package, op by op; ONNX Runtime's own have rules here. Small values that follow
from constants and sizes are computed on the way, since shapes of others depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from needle_export.errors import BadInput, Unsupported

#: Elements up to which a value is computed.
_SMALL = 4096

#: Bytes an element takes, by the format's number of its type.
_WIDTH: dict[int, int] = {
    onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.FLOAT: 4, onnx.TensorProto.DOUBLE: 8, onnx.TensorProto.BOOL: 1,
    onnx.TensorProto.INT8: 1, onnx.TensorProto.UINT8: 1, onnx.TensorProto.INT32: 4, onnx.TensorProto.INT64: 8,
    onnx.TensorProto.UINT32: 4, onnx.TensorProto.UINT64: 8, onnx.TensorProto.INT16: 2, onnx.TensorProto.UINT16: 2,
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A value: its type as the format numbers it, sizes, and whether it follows from constants alone."""

    kind: int
    shape: tuple[int, ...]
    constant: bool = False

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """That it takes in memory."""
        return self.elements * _WIDTH[self.kind]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


class Shapes:
    """Every value of a model.

    Args:
        model: loaded without its weights.
        sizes: of symbolic dimensions, by input and then by the dimension's name.
        where: the file, for messages.

    Attributes:
        values: by name.
        known: those that were computed.
    """

    def __init__(self, model: onnx.ModelProto, sizes: Callable[[str], Mapping[str, int]], where: str) -> None:
        self._opsets, self._where = list(model.opset_import), where
        self._version = {o.domain: o.version for o in self._opsets}
        self.values: dict[str, Value] = {}
        self.known: dict[str, NDArray[Any]] = {}
        for tensor in model.graph.initializer:
            self.values[tensor.name] = Value(tensor.data_type, tuple(tensor.dims), True)
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                self.known[tensor.name] = numpy_helper.to_array(tensor)
        for given in model.graph.input:
            kind, own = given.type.tensor_type, sizes(given.name)
            dims = tuple(own[d.dim_param] if d.dim_param else d.dim_value for d in kind.shape.dim)
            self.values[given.name] = Value(kind.elem_type, dims)
        for node in model.graph.node:
            try:
                self._node(node)
            except KeyError as missing:
                raise BadInput(f"node {node.name!r} reads {missing}, which nothing makes", where=where) from None

    def _node(self, node: onnx.NodeProto) -> None:
        inputs = [self.values[name] for name in node.input if name]
        constant = all(value.constant for value in inputs)
        made = self._own(node) if node.domain else self._standard(node)
        for name, (kind, shape) in made.items():
            self.values[name] = Value(kind, shape, constant)
        self._compute(node)

    def _standard(self, node: onnx.NodeProto) -> dict[str, tuple[int, tuple[int, ...]]]:
        given = {name: self.values[name] for name in node.input if name}
        types = {name: helper.make_tensor_type_proto(v.kind, v.shape) for name, v in given.items()}
        data = {n: numpy_helper.from_array(self.known[n], n) for n in given if n in self.known}
        try:
            schema = onnx.defs.get_schema(node.op_type, self._version[""])
            found = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=self._opsets)
        except (shape_inference.InferenceError, onnx.defs.SchemaError) as fault:
            raise self._strange(node, str(fault).splitlines()[0]) from None
        made = {}
        for name, kind in found.items():
            dims = kind.tensor_type.shape.dim
            if not kind.tensor_type.HasField("shape") or any(not d.HasField("dim_value") for d in dims):
                raise self._strange(node, f"the shape of {name!r} depends on values")
            made[name] = (kind.tensor_type.elem_type, tuple(int(d.dim_value) for d in dims))
        return made

    def _own(self, node: onnx.NodeProto) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Outputs of ONNX Runtime's own ops, after its documentation (docs/ContribOperators.md there)."""
        first, given = self.values[node.input[0]], attributes(node)
        kind, shape = first.kind, first.shape
        if node.op_type == "MatMulNBits":
            shape = (*shape[:-1], int(given["N"]))
        elif node.op_type == "FusedMatMul":
            shape = self._fused_product(node, given)
        elif node.op_type == "GatherBlockQuantized":
            data, scales = first, self.values[node.input[2]]
            width = data.shape[-1] * (8 // int(given.get("bits", 4)) if data.kind == onnx.TensorProto.UINT8 else 1)
            kind, shape = scales.kind, (*self.values[node.input[1]].shape, *data.shape[1:-1], width)
        elif node.op_type == "CausalConvWithState":
            taps = self.values[node.input[1]].shape[-1]
            return {n: (kind, s) for n, s in zip(node.output, (shape, (*shape[:-1], taps - 1)), strict=False) if n}
        elif node.op_type == "SkipSimplifiedLayerNormalization":
            return {name: (kind, shape) for name in node.output if name}
        elif node.op_type != "QuickGelu":
            raise self._strange(node, f"{node.domain} has other ops than are known here")
        return {node.output[0]: (kind, shape)}

    def _fused_product(self, node: onnx.NodeProto, given: Mapping[str, Any]) -> tuple[int, ...]:
        left, right = (self.operand(node, side) for side in (0, 1))
        return (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])

    def operand(self, node: onnx.NodeProto, side: int) -> tuple[int, ...]:
        """The shape of an operand of a product [.., M, K] or [.., K, N], as it is multiplied."""
        shape, given = list(self.values[node.input[side]].shape), attributes(node)
        letter = "AB"[side]
        # With transBatch the first axis becomes the last but one, and the others move up.
        if given.get(f"transBatch{letter}"):
            shape.insert(-1, shape.pop(0))
        if given.get(f"trans{letter}"):
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    def _compute(self, node: onnx.NodeProto) -> None:
        """Compute a small value whose inputs are known, and the sizes that a graph asks for."""
        if node.op_type == "Shape":
            given, shape = attributes(node), self.values[node.input[0]].shape
            self.known[node.output[0]] = np.array(shape[given.get("start", 0) : given.get("end", None)], np.int64)
            return
        names = [n for n in node.input if n]
        small = all(self.values[n].elements <= _SMALL for n in (*names, *(o for o in node.output if o)))
        if node.domain or not names or not small or not all(n in self.known for n in names):
            return
        feeds = {n: self.known[n] for n in names}
        results: list[Any] = list(ReferenceEvaluator(node).run(None, feeds))
        self.known.update(zip(node.output, results, strict=False))

    def _strange(self, node: onnx.NodeProto, why: str) -> Unsupported:
        return Unsupported(f"the work of {node.op_type} node {node.name!r} isn't known: {why}", where=self._where)
