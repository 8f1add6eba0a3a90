"""What the signatures of a finished file have to do, op by op, as LiteRT runs them on a CPU.

Halves are widened when the file is loaded, so that a matrix in fp16 is read as float32. A cache is read whole, however
few of its rows are in use: shapes are fixed. Letters: T new positions, S rows of a cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needle_export.errors import BadInput
from needle_export.measure.work import OpWork, Phase, Prompt, Work, gathered
from needle_export.targets.ports import CONTRACT_KEY, entry_name
from needle_export.targets.tflite.analysis import Graph, Op, TensorInfo, metadata, read_graph
from needle_export.targets.tflite.blocks import BLOCK
from needle_export.targets.tflite.contract import FILE_NAME
from needle_export.targets.tflite.session import plan

#: Ops that widen a constant when the file is loaded.
_WIDENS = "DEQUANTIZE"

#: By the file's names.
_DTYPES = {"float16": "fp16", "int8": "int8", "int4": "int4"}


def read_work(folder: Path, position: int, prompts: tuple[int, ...]) -> Work:
    """The work of an artifact; see :class:`targets.base.TellsWork`."""
    path = folder / FILE_NAME
    graphs = {graph.name: graph for graph in read_graph(path)}
    try:
        contract: dict[str, Any] = json.loads(metadata(path, CONTRACT_KEY) or "")
        buckets = sorted(int(b) for b in contract["buckets"])
        caches = frozenset(s["name"] for s in contract["state"] if s["kind"] in ("keys", "values"))
        phases = {
            tokens: _phase(graphs[entry_name(tokens)], tokens, caches)
            for tokens in (1, *buckets)
        }
    except (KeyError, TypeError, ValueError):
        raise BadInput("doesn't carry this tool's contract", where=str(path), fix="build it again") from None
    return Work(
        "tflite",
        position,
        phases[1],
        tuple(Prompt(n, tuple(phases[size] for _, size in plan(buckets, n))) for n in sorted(prompts)),
    )


def _phase(graph: Graph, tokens: int, caches: frozenset[str]) -> Phase:
    state = {at for name, at in graph.inputs.items() if name in caches}
    rows = max((graph.tensors[at].shape[1] for at in state), default=0)
    return Phase(graph.name, tokens, rows, gathered(read_ops(graph, state)))


def read_ops(graph: Graph, state: set[int]) -> Iterator[OpWork]:
    """The work of every op of a graph; ``state`` are the tensors of its caches."""
    widened: dict[int, TensorInfo] = {}

    def info(at: int) -> TensorInfo:
        return widened.get(at, graph.tensors[at])

    for op in graph.ops:
        places = [at for at in op.inputs if at >= 0]
        values = [info(at) for at in places]
        made = [graph.tensors[at] for at in op.outputs]
        if op.name == _WIDENS and values[0].constant:
            whole = made[0]
            widened[op.outputs[0]] = TensorInfo(whole.name, whole.shape, whole.dtype, -1, True, whole.bytes, "")
            continue
        held = sum(v.bytes for at, v in zip(places, values, strict=True) if at in state)
        moved = sum(v.bytes for at, v in zip(places, values, strict=True) if not v.constant and at not in state)
        moved += sum(v.bytes for v in made)
        weights = sum(_stored(v) for v in values if v.constant)
        table = _table(op, values)
        if table is not None:
            rows = math.prod(values[1 - values.index(table)].shape)
            weights += rows * (_stored(table) // table.shape[0]) - _stored(table)
        yield OpWork(op.name, 1, weights, held, moved, _macs(op, values, made), _dtype(values))


def _stored(constant: TensorInfo) -> int:
    """Bytes of a constant, the scales of its blocks among them, which are halves."""
    blocks = math.prod(constant.shape) // BLOCK if constant.quantized == "blockwise" else 0
    return constant.bytes + 2 * blocks


def _table(op: Op, values: list[TensorInfo]) -> TensorInfo | None:
    """The constant that an op reads some rows of, or None."""
    table = {"EMBEDDING_LOOKUP": 1, "GATHER": 0}.get(op.name)
    return values[table] if table is not None and values[table].constant else None


def _macs(op: Op, values: list[TensorInfo], made: list[TensorInfo]) -> int:
    """Multiply-adds of a product or a convolution; 0 of what goes element by element."""
    count = math.prod(made[0].shape) if made else 0
    if op.name == "FULLY_CONNECTED":
        return count * values[1].shape[-1]
    if op.name == "BATCH_MATMUL":
        # [.., M, K] or, transposed, [.., K, M].
        return count * math.prod(values[0].shape[-2:]) // made[0].shape[-2]
    if op.name == "CONV_2D":
        return count * math.prod(values[1].shape[1:])
    if op.name == "DEPTHWISE_CONV_2D":
        return count * math.prod(values[1].shape[1:3])
    return 0


def _dtype(values: list[TensorInfo]) -> str:
    """Of the largest constant that isn't float32, else of float32."""
    narrow = [v for v in values if v.dtype in _DTYPES and v.constant]
    return _DTYPES[max(narrow, key=lambda v: v.bytes).dtype] if narrow else "fp32"
