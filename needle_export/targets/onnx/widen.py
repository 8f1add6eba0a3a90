"""Matrices of integers that a host makes floats of when it loads them: for runtimes whose integer products are slow.

ONNX Runtime multiplies by packed levels with kernels of their own where it has some for the processor. In WebAssembly
it has none: there MatMulNBits unpacks the whole matrix at every call. So the graphs are rewritten to multiply by
matrices of float32 in a second file of weights, ``widened.bin``, which nobody stores: the host unpacks it from
``weights.bin``, which stays as it is, byte for byte. Tables that rows are gathered from stay packed.

Nodes of constants that unpack would do without a host's help, but the runtime keeps what each of them made until all
are folded: at the published geometry that took 1.6 GB.

Inputs of such products aren't rounded, as they are by the kernels for processors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.onnx.contract import CHUNK_KEY, CONTEXT_KEY, DATA_NAME, STATE_KEY
from needle_export.targets.onnx.decoder import FILES

#: The file that a host makes.
WIDENED_NAME = "widened.bin"

#: The domain of ONNX Runtime's own ops.
_MICROSOFT = "com.microsoft"

#: Inputs of MatMulNBits by place.
_MATRIX, _SCALES, _BIAS = 1, 2, 5


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] to unpack, all places in bytes.

    Its numbers are ``(level - 2 ** (bits - 1)) * scale`` in float32; levels are unsigned, as many to a byte as fit, the
    first in the lowest bits; ``block`` columns of a row share a scale.

    Attributes:
        levels: where they begin in ``weights.bin``.
        scales: float32, where they begin there.
        floats: where the numbers belong in ``widened.bin``.
    """

    levels: int
    scales: int
    floats: int
    rows: int
    columns: int
    bits: int
    block: int


@dataclass(frozen=True)
class Contract:
    """What a host must know to call the graphs of an artifact.

    Attributes:
        context: positions at most.
        max_chunk: tokens of a call of the graph for prompts, at most.
        vocab: tokens that have logits.
        state: the layout of the state, as it rides in the graphs.
        files: names of the graphs by phase, of their ``weights``, and of the ``widened`` ones.
        matrices: what ``widened.bin`` is made of; nothing where the graphs have no use for it.
    """

    context: int
    max_chunk: int
    vocab: int
    state: tuple[dict[str, Any], ...]
    files: dict[str, str]
    matrices: tuple[Matrix, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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
    widening = _Widening()
    for name in FILES.values():
        try:
            model = onnx.load(str(folder / name), load_external_data=False)
            if not model.graph.node:
                raise ValueError("it is empty")
            changed = widening.graph(model.graph)
        except Unsupported:
            raise
        except Exception as fault:  # protobuf's own, and whatever a damaged graph leads to
            raise BadInput("the graph can't be read", where=str(folder / name), fix="build it again") from fault
        if changed:
            (out / name).write_bytes(model.SerializeToString(deterministic=True))
        else:
            shutil.copyfile(folder / name, out / name)
    meta = {entry.key: entry.value for entry in model.metadata_props}
    try:
        return Contract(
            context=int(meta[CONTEXT_KEY]), max_chunk=int(meta[CHUNK_KEY]),
            vocab=next(o.type.tensor_type.shape.dim[1].dim_value for o in model.graph.output if o.name == "logits"),
            state=tuple(json.loads(meta[STATE_KEY])),
            files={**FILES, "weights": DATA_NAME, "widened": WIDENED_NAME}, matrices=tuple(widening.matrices.values()),
        )
    except (KeyError, ValueError, IndexError, StopIteration) as fault:
        raise BadInput("the model doesn't carry this tool's metadata", where=str(folder),
                       fix="build it again") from fault


def unpack(folder: Path, matrices: Sequence[Matrix]) -> None:
    """Write ``widened.bin`` beside ``weights.bin``, as a host does in memory; then any ONNX Runtime runs the graphs."""
    weights = np.fromfile(folder / DATA_NAME, np.uint8)
    with (folder / WIDENED_NAME).open("wb") as handle:
        for m in matrices:
            handle.seek(m.floats)
            count = m.rows * m.columns
            stream = weights[m.levels : m.levels + count * m.bits // 8]
            shifts = np.arange(0, 8, m.bits, dtype=np.uint8)
            levels = (stream[:, None] >> shifts & np.uint8(2**m.bits - 1)).astype(np.float32) - 2 ** (m.bits - 1)
            scales = weights[m.scales : m.scales + count // m.block * 4].view(np.float32)
            handle.write((levels.reshape(-1, m.block) * scales[:, None]).tobytes())


class _Widening:
    """The rewriting of graphs that share their weights.

    Attributes:
        matrices: by what they are unpacked from.
    """

    def __init__(self) -> None:
        self.matrices: dict[tuple[int, ...], Matrix] = {}
        self._end = 0

    def graph(self, graph: Any) -> bool:
        """Rewrite a graph in place; whether there was anything to rewrite."""
        held = {tensor.name: tensor for tensor in graph.initializer}
        nodes = list(graph.node)
        if not any(node.op_type == "MatMulNBits" for node in nodes):
            return False
        del graph.node[:]
        new: dict[str, Any] = {}
        for node in nodes:
            integers = (node.domain, node.op_type) == (_MICROSOFT, "MatMulNBits")
            graph.node.extend(self._product(node, held, new) if integers else [node])
        used = {name for node in graph.node for name in node.input}
        kept = [tensor for tensor in held.values() if tensor.name in used]
        del graph.initializer[:]
        graph.initializer.extend([*kept, *new.values()])
        return True

    def _product(self, node: Any, held: dict[str, Any], new: dict[str, Any]) -> list[Any]:
        """A product with a matrix in floats, in the place of one with integers."""
        from onnx import helper

        if any(name for place, name in enumerate(node.input) if place > _SCALES and place != _BIAS):
            raise Unsupported("a product with zero points or an order of columns can't be widened", where=node.name,
                              fix="build it with --weights fp16")
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        rows, columns, bits, block = (int(given[key]) for key in ("N", "K", "bits", "block_size"))
        places = _place(held[node.input[_MATRIX]]), _place(held[node.input[_SCALES]])
        key = (*places, rows, columns, bits, block)
        if key not in self.matrices:
            self.matrices[key] = Matrix(*places, self._end, rows, columns, bits, block)
            self._end += rows * columns * 4
        matrix = self.matrices[key]
        name = f"widened.{matrix.floats}"
        new[name] = _tensor(name, matrix)
        out = node.output[0]
        bias = node.input[_BIAS] if len(node.input) > _BIAS else ""
        first = f"{out}.product" if bias else out
        nodes = [helper.make_node("FusedMatMul", [node.input[0], name], [first], node.name, domain=_MICROSOFT,
                                  transB=1)]
        if bias:
            nodes.append(helper.make_node("Add", [first, bias], [out], f"{node.name}.bias"))
        return nodes


def _place(tensor: Any) -> int:
    """Where a tensor begins in ``weights.bin``."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    if where.get("location") != DATA_NAME:
        raise ValueError(f"{tensor.name} isn't in {DATA_NAME}")
    return int(where.get("offset", "0"))


def _tensor(name: str, matrix: Matrix) -> Any:
    from onnx import TensorProto

    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[matrix.rows, matrix.columns],
                         data_location=TensorProto.EXTERNAL)
    place = {"location": WIDENED_NAME, "offset": matrix.floats, "length": matrix.rows * matrix.columns * 4}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor
