"""Matrices of integers that a runtime makes floats of when it loads them: for runtimes whose integer products are slow.

ONNX Runtime multiplies by packed levels with kernels of their own where it has some for the processor. In WebAssembly
it has none: there MatMulNBits unpacks the whole matrix at every call. So the graphs are rewritten: nodes of constants
alone unpack a matrix, which the runtime folds once, and a product is one of float32. ``weights.bin`` stays as it is,
byte for byte. Tables that rows are gathered from stay packed.

Inputs of such products aren't rounded, as they are by the kernels for processors.

Dimension letters: O outputs, I inputs, R runs of a row that share a scale, P levels in a byte.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.onnx.contract import CHUNK_KEY, CONTEXT_KEY, DATA_NAME, FILES, STATE_KEY

#: The domain of ONNX Runtime's own ops.
_MICROSOFT = "com.microsoft"

#: Inputs of MatMulNBits by place.
_MATRIX, _SCALES, _BIAS = 1, 2, 5


@dataclass(frozen=True)
class Contract:
    """What a host must know to call the graphs of an artifact.

    Attributes:
        context: positions at most.
        max_chunk: tokens of a call of the graph for prompts, at most.
        vocab: tokens that have logits.
        state: the layout of the state, as it rides in the graphs.
        files: names of the graphs by phase, and of their ``weights``.
        widened: how many products of the graph for one token had their matrix widened.
    """

    context: int
    max_chunk: int
    vocab: int
    state: tuple[dict[str, Any], ...]
    files: dict[str, str]
    widened: int


def widen(folder: Path, out: Path) -> Contract:
    """Write both graphs of an artifact to ``out``, their matrices of integers widened.

    A graph without such matrices is copied byte for byte. ``weights.bin`` is for the caller to copy.

    Raises:
        BadInput: the graphs aren't an artifact of ours.
        Unsupported: the package onnx isn't installed, or a product has zero points of its own or an order of columns.
    """
    try:
        import onnx
    except ImportError as missing:
        raise Unsupported("the package onnx isn't installed",
                          fix="install it with: pip install 'needle-export[onnx]'") from missing
    widened = 0
    for name in reversed(FILES.values()):
        try:
            model = onnx.load(str(folder / name), load_external_data=False)
            widened = _widen(model.graph)
        except Unsupported:
            raise
        except Exception as fault:  # protobuf's own, and whatever a damaged graph leads to
            raise BadInput("the graph can't be read", where=str(folder / name), fix="build it again") from fault
        if widened:
            (out / name).write_bytes(model.SerializeToString(deterministic=True))
        else:
            shutil.copyfile(folder / name, out / name)
    meta = {entry.key: entry.value for entry in model.metadata_props}
    try:
        return Contract(
            context=int(meta[CONTEXT_KEY]), max_chunk=int(meta[CHUNK_KEY]),
            vocab=next(o.type.tensor_type.shape.dim[1].dim_value for o in model.graph.output if o.name == "logits"),
            state=tuple(json.loads(meta[STATE_KEY])), files={**FILES, "weights": DATA_NAME}, widened=widened,
        )
    except (KeyError, ValueError, IndexError, StopIteration) as fault:
        raise BadInput("the model doesn't carry this tool's metadata", where=str(folder),
                       fix="build it again") from fault


def _widen(graph: Any) -> int:
    widening = _Widening(graph)
    nodes = list(graph.node)
    del graph.node[:]
    rest: list[Any] = []
    for node in nodes:
        rest += widening.product(node) if (node.domain, node.op_type) == (_MICROSOFT, "MatMulNBits") else [node]
    graph.node.extend([*widening.nodes, *rest])
    return widening.count


class _Widening:
    """The rewriting of one graph.

    Attributes:
        nodes: of constants alone; they belong in front of all others.
        count: of products.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes: list[Any] = []
        self.count = 0
        self._constants: dict[tuple[Any, ...], str] = {}

    def product(self, node: Any) -> list[Any]:
        """A product with a matrix in floats, in the place of one with integers."""
        from onnx import helper

        matrix = self._floats(node)
        self.count += 1
        out = node.output[0]
        bias = node.input[_BIAS] if len(node.input) > _BIAS else ""
        first = f"{out}.product" if bias else out
        nodes = [helper.make_node("MatMul", [node.input[0], matrix], [first], node.name)]
        if bias:
            nodes.append(helper.make_node("Add", [first, bias], [out], f"{node.name}.bias"))
        return nodes

    def _floats(self, node: Any) -> str:
        """The name of a product's matrix in floats, [I, O]."""
        from onnx import TensorProto, helper

        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        bits, size, rows, columns = (int(given[key]) for key in ("bits", "block_size", "N", "K"))
        if any(name for place, name in enumerate(node.input) if place > _SCALES and place != _BIAS):
            raise Unsupported("a product with zero points or an order of columns can't be widened", where=node.name,
                              fix="build it with --weights fp16")
        runs = columns // size
        # The levels of every byte, [256, P], the first in its lowest bits; unsigned ones about half their range.
        shifts = np.arange(8 // bits) * bits
        every = (np.arange(256)[:, None] >> shifts & 2**bits - 1) - 2 ** (bits - 1)
        bytes_ = self._op("Cast", node.input[_MATRIX], to=TensorProto.INT32)
        levels = self._op("Gather", self._constant(every.astype(np.float32)), bytes_, axis=0)
        apart = self._op("Reshape", levels, self._constant(np.array([rows, runs, size], np.int64)))
        units = self._op("Reshape", node.input[_SCALES], self._constant(np.array([rows, runs, 1], np.int64)))
        numbers = self._op("Mul", apart, units)
        whole = self._op("Reshape", numbers, self._constant(np.array([rows, columns], np.int64)))
        return self._op("Transpose", whole, perm=[1, 0])

    def _op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"widened.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def _constant(self, value: Any) -> str:
        from onnx import numpy_helper

        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = f"widened.constant.{len(self._constants)}"
            self.graph.initializer.append(numpy_helper.from_array(value, self._constants[key]))
        return self._constants[key]
