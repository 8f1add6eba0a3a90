"""What the graphs of a finished artifact have to do, op by op, as ONNX Runtime runs them on a CPU.

Nodes that depend on weights alone run when the model is loaded, and their results stand for weights: fp16 matrices are
float32 by then. Letters: T new positions, S rows bound of a cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from needle_export.errors import BadInput
from needle_export.measure.work import OpWork, Phase, Prompt, Work, gathered, pieces
from needle_export.targets.onnx.contract import CHUNK_KEY, STATE_KEY
from needle_export.targets.onnx.decoder import FILES, ROW_STEP
from needle_export.targets.onnx.shapes import Shapes, Value, attributes

#: Ops that give other sizes to the bytes that they are given.
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"})

#: Ops that write rows into a cache that is bound as input and output, and leave the rest.
_WRITES = frozenset({"ScatterND", "ScatterElements", "TensorScatter"})

#: Ops that read the rows of a table that their second input names.
_LOOKUPS = frozenset({"Gather", "GatherBlockQuantized"})

#: Types by the format's number; what isn't among them is moved and not multiplied.
_DTYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.UINT8: "int8",
}


def read_work(folder: Path, position: int, prompts: tuple[int, ...]) -> Work:
    """The work of an artifact; see :class:`targets.base.TellsWork`."""
    graphs = {phase: _Graph(folder / name) for phase, name in FILES.items()}
    decode, prefill = graphs["decode"], graphs["prefill"]

    def call(before: int, tokens: int) -> Phase:
        return decode.phase("decode", 1, before) if tokens == 1 else prefill.phase("prefill", tokens, before)

    chunk = int(prefill.meta(CHUNK_KEY))
    return Work(
        "onnx",
        position,
        decode.phase("decode", 1, position),
        tuple(Prompt(n, tuple(call(*piece) for piece in pieces(n, chunk))) for n in sorted(prompts)),
    )


class _Graph:
    """One graph file, read without its weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.model = onnx.load(str(path), load_external_data=False)
        except FileNotFoundError:
            raise BadInput("this file of the artifact is missing", where=str(path), fix="build it again") from None
        except Exception:  # protobuf has exceptions of its own, one for each of its implementations
            raise BadInput("this isn't an ONNX model", where=str(path), fix="build it again") from None
        try:
            self.rows = {s["name"]: int(s["rows"]) for s in json.loads(self.meta(STATE_KEY)) if s["cache"]}
        except (KeyError, TypeError, ValueError):
            raise BadInput("the model's metadata is damaged", where=str(path), fix="build it again") from None

    def meta(self, key: str) -> str:
        """Metadata by its key."""
        for entry in self.model.metadata_props:
            if entry.key == key:
                return str(entry.value)
        raise BadInput("the model doesn't carry this tool's metadata", where=str(self.path), fix="build it again")

    def phase(self, name: str, tokens: int, before: int) -> Phase:
        """A call with ``tokens`` new tokens behind ``before`` earlier ones."""
        bound = -(-(before + tokens) // ROW_STEP) * ROW_STEP

        def sizes(given: str) -> Mapping[str, int]:
            rows = min(bound, self.rows.get(given, bound))
            return {"T": tokens, "S": rows, "W": rows}

        shapes = Shapes(self.model, sizes, str(self.path))
        return Phase(name, tokens, bound, gathered(read_ops(self.model.graph.node, shapes, frozenset(self.rows))))


def read_ops(nodes: Any, shapes: Shapes, caches: frozenset[str]) -> Iterator[OpWork]:
    """The work of every node that a call runs; ``caches`` are inputs that outlive it."""
    state = set(caches)
    for node in nodes:
        names = [name for name in node.input if name]
        values = [shapes.values[name] for name in names]
        if all(v.constant for v in values):
            continue  # done when the model is loaded
        made = [shapes.values[name] for name in node.output if name]
        lasting = bool(names) and names[0] in state and node.op_type in _VIEWS | _WRITES
        if lasting:
            state.update(node.output)
        weights = held = moved = 0
        if node.op_type in _VIEWS or node.op_type == "Shape":
            pass
        elif node.op_type in _LOOKUPS and values[0].constant:
            weights, moved = _rows(values, names), values[1].bytes + made[0].bytes
        elif node.op_type in _WRITES and lasting:
            moved = sum(v.bytes for v in values[1:]) + values[-1].bytes
        else:
            weights = sum(v.bytes for v in values if v.constant)
            held = sum(v.bytes for n, v in zip(names, values, strict=True) if n in state)
            moved = sum(v.bytes for n, v in zip(names, values, strict=True) if not v.constant and n not in state)
            moved += sum(v.bytes for v in made)
        yield OpWork(node.op_type, 1, weights, held, moved, _macs(node, shapes), _dtype(node, values))


def _rows(values: list[Value], names: list[str]) -> int:
    """Bytes that a lookup reads: a row for each index, of the table and of all that lies beside it by row."""
    count, table = values[1].elements, values[0]
    beside = [v for v in values[2:] if v.constant and v.shape[:1] == table.shape[:1]]
    return sum(count * v.bytes // v.shape[0] for v in (table, *beside))


def _macs(node: onnx.NodeProto, shapes: Shapes) -> int:
    """Multiply-adds of a product, a convolution or an attention; 0 of what goes element by element."""
    made = shapes.values[node.output[0]].elements
    kind, given = node.op_type, attributes(node)
    if kind == "MatMulNBits":
        return made * int(given["K"])
    if kind in ("MatMul", "FusedMatMul", "Gemm"):
        return made * shapes.operand(node, 0)[-1]
    if kind in ("Conv", "CausalConvWithState"):
        return made * math.prod(shapes.values[node.input[1]].shape[1:])
    if kind == "Attention":
        keys = shapes.values[node.input[1]].shape
        # Of queries with keys, and of what comes of them with values: as many rows of keys for each.
        return (shapes.values[node.input[0]].elements + made) * keys[-2 if len(keys) == 4 else 1]
    return 0


def _dtype(node: onnx.NodeProto, values: list[Value]) -> str:
    if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
        return "int8" if int(attributes(node).get("bits", 4)) == 8 else "int4"
    return next((_DTYPES[v.kind] for v in values if v.kind in _DTYPES), "fp32")
