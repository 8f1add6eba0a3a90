"""The matrices of a finished file as its graphs use them: what each op multiplies by, and what multiplies behind it.

Everything is read from the file; what a matrix is called there is the one thing that was known when it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.targets.claims import parse_name
from needle_export.targets.matrices import Place, ReadMatrix, RowsOf
from needle_export.targets.tflite.analysis import Graph, Op, mapped, read_graph, span_of
from needle_export.targets.tflite.blocks import BLOCK, unpack
from needle_export.targets.tflite.layouts import EACH, FLAT, TAPS, split_layout
from needle_export.targets.tflite.quantization import blocks_of

#: Ops that read a matrix row by row, as their second input: [O, I] or a table.
_PRODUCT, _LOOKUP = "FULLY_CONNECTED", "EMBEDDING_LOOKUP"

#: One that reads a widened matrix row by row as its first.
_LEFT = "BATCH_MATMUL"

#: Ops that read constants of other layouts: by layout, op and which of its inputs (None: either).
_READERS: dict[str, dict[str, int | None]] = {
    FLAT: {"MUL": None, "ADD": None},
    EACH: {"MUL": None},
    TAPS: {"MUL": None, "DEPTHWISE_CONV_2D": 1},
}

#: How elements lie in the file; of int4, two in each.
_DTYPES = {"int4": np.uint8, "int8": np.int8, "float16": np.float16, "float32": np.float32}

#: As the builder names ops: the block first.
_BLOCK = re.compile(r"layers\.(\d+)/")

_Span = tuple[int, int]


def read_matrices(path: Path) -> Iterator[ReadMatrix]:
    """Every matrix of a file that is named as one, or stored in less than float32; once for each use with other scales.

    One at a time: no more than the largest is held in memory.

    Raises:
        BadInput: the file isn't there, isn't a TFLite model, or is damaged.
    """
    found: dict[tuple[Any, ...], _Use] = {}
    graphs = read_graph(path)
    with mapped(path) as (data, model):
        for number, graph in enumerate(graphs):
            # A signature's graph has the place of its signature, which may not be the subgraph's.
            subgraph = model.Subgraphs(model.SignatureDefs(number).SubgraphIndex())
            spans = [span_of(data, model.Buffers(t.buffer)) for t in graph.tensors]
            for use in _Reader(graph, spans, subgraph).uses():
                stored = (use.shape, use.dtype, use.values, use.layout)
                key = (use.claim, use.folded, *stored, use.own, use.scales, use.fault)
                if key in found:
                    found[key].places += use.places
                else:
                    found[key] = use
    for use in found.values():
        values, scales, behind, form = np.empty((0, 0), np.int8), None, None, ""
        bits = 4 if use.dtype == "int4" else 0
        if not use.fault:
            values = _laid_out(_load(path, use.values, use.dtype), use)
            scales = None if use.scales is None else _load(path, use.scales, "float32")
        if not use.fault and use.own is not None:
            values, behind = unpack(values.view(np.uint8)), scales
            scales = _load(path, use.own, "float16").reshape(use.shape[0], -1).astype(np.float32)
            form = f"int4x{values.shape[1] // scales.shape[1]}"
        yield ReadMatrix(use.claim, use.folded, values, scales, tuple(use.places), use.fault, behind, bits, form)


def _load(path: Path, span: _Span, dtype: str) -> NDArray[Any]:
    """Read, not mapped: pages of a map would stay in memory until somebody else needs it."""
    kind = np.dtype(_DTYPES[dtype])
    return np.fromfile(path, kind, span[1] // kind.itemsize, offset=span[0])


def _laid_out(values: NDArray[Any], use: _Use) -> NDArray[Any]:
    """Values as rows [O, I]; of taps, as the reference has them: the earliest first, a row for each channel."""
    if use.layout == FLAT:
        return values.reshape(1, -1)
    if use.layout == TAPS:
        return np.ascontiguousarray(values.reshape(-1, use.shape[-1])[::-1].T)
    return values.reshape(use.shape[0], -1)


def _misread(layout: str, op: Op, read: int) -> str:
    """What is wrong with an op that reads a constant of a layout, or nothing."""
    places = _READERS[layout]
    if op.name in places and places[op.name] in (None, op.inputs.index(read)):
        return ""
    return f"{op.name} reads it, not as {'an operand' if layout == FLAT else layout}"


@dataclass
class _Use:
    """A matrix, its own scales and those behind the op by their places in the file, and the ops that use them so."""

    claim: RowsOf
    folded: bool
    shape: tuple[int, ...]
    dtype: str
    values: _Span
    own: _Span | None = None
    scales: _Span | None = None
    fault: str = ""
    places: list[Place] = field(default_factory=list)
    layout: str = ""


class _Reader:
    """One graph.

    Args:
        spans: of each tensor's constant data; (0, 0) where it has none.
        subgraph: the same in the file, for what a graph's tensors don't tell.
    """

    def __init__(self, graph: Graph, spans: list[_Span], subgraph: Any) -> None:
        self.graph = graph
        self.spans = spans
        self.subgraph = subgraph
        self.readers: dict[int, list[Op]] = {}
        self.makers: dict[int, Op] = {}
        for op in graph.ops:
            for tensor in dict.fromkeys(op.inputs):
                self.readers.setdefault(tensor, []).append(op)
            for tensor in op.outputs:
                self.makers[tensor] = op

    def uses(self) -> Iterator[_Use]:
        """Each op that reads a matrix."""
        for index, tensor in enumerate(self.graph.tensors):
            if not tensor.constant:
                continue
            if tensor.dtype == "float16":
                # Widened by an op of its own, whose result carries the name.
                for wide in self.readers.get(index, []):
                    yield from self._of(index, wide.outputs[0] if wide.name == "DEQUANTIZE" else index)
            elif tensor.dtype in ("int4", "int8") or parse_name(tensor.name):
                yield from self._of(index, index)

    def _of(self, stored: int, read: int) -> Iterator[_Use]:
        """Uses of a constant under another tensor, which is itself or what widens it."""
        constant = self.graph.tensors[stored]
        named, layout = split_layout(self.graph.tensors[read].name)
        claim, folded = parse_name(named) or (RowsOf((named,)), False)
        for op in self.readers.get(read, []):
            use = _Use(claim, folded, constant.shape, constant.dtype, self.spans[stored])
            use.places.append(self._place(op))
            use.layout = layout
            if layout:
                use.fault = _misread(layout, op, read)
            elif stored != read and op.name == _LEFT and op.inputs[0] == read and len(constant.shape) == 2:
                pass  # a widened factor on the left
            elif len(constant.shape) != 2 or op.name not in (_PRODUCT, _LOOKUP) or op.inputs[1] != read:
                use.fault = f"{op.name} reads it, not as a matrix of rows"
            elif constant.dtype == "int4":
                use.own = self._blocks(stored, constant.shape)
                use.scales = self._scales(op, constant.shape[0])
                if use.own is None:
                    use.fault = f"its tensor has no half-precision scale for every {BLOCK} columns"
            elif constant.dtype == "int8" and not self._bare(stored):
                use.fault = "its tensor has a scale other than 1, or a zero point"
            else:
                use.scales = self._scales(op, constant.shape[0])
                if use.scales is None and constant.dtype == "int8":
                    use.fault = "no MUL behind the op applies scales of its rows"
            yield use

    def _place(self, op: Op) -> Place:
        name = self.graph.tensors[op.outputs[0]].name
        block = _BLOCK.search(name)
        return Place(f"{name} of {self.graph.name}", int(block.group(1)) if block else -1)

    def _bare(self, index: int) -> bool:
        """Whether a tensor's own quantisation is the identity."""
        own = self.subgraph.Tensors(index).Quantization()
        if own is None or own.ScaleLength() != 1 or own.ZeroPointLength() > 1:
            return False
        return bool(own.Scale(0) == 1.0 and (own.ZeroPointLength() == 0 or own.ZeroPoint(0) == 0))

    def _blocks(self, index: int, shape: tuple[int, ...]) -> _Span | None:
        """Where the scales of a matrix in blocks lie, if its quantisation is of that form."""
        own = blocks_of(self.subgraph.Tensors(index))
        if own is None or own.size != BLOCK or own.zero_points >= 0 or own.axis or len(shape) != 2 or shape[1] % BLOCK:
            return None
        scales = self.graph.tensors[own.scales]
        if not scales.constant or scales.dtype != "float16" or scales.shape != (shape[0], shape[1] // BLOCK):
            return None
        return self.spans[own.scales]

    def _scales(self, op: Op, rows: int) -> _Span | None:
        """Where the factors lie that multiply the rows' results, if a MUL alone reads them and has a factor a row.

        Of a table that is a MUL with what a second lookup of the same indices gives.
        """
        result = op.outputs[0]
        behind = self.readers.get(result, [])
        if len(behind) != 1 or behind[0].name != "MUL" or result in self.graph.outputs.values():
            return None
        factors = [i for i in behind[0].inputs if i != result]
        if len(factors) != 1:
            return None  # its square
        factor = factors[0]
        if op.name == _LOOKUP:
            second = self.makers.get(factor)
            if second is None or second.name != _LOOKUP or second.inputs[0] != op.inputs[0]:
                return None
            factor = second.inputs[1]
        tensor = self.graph.tensors[factor]
        wanted = (rows, 1) if op.name == _LOOKUP else (rows,)
        if not tensor.constant or tensor.dtype != "float32" or tensor.shape != wanted:
            return None
        return self.spans[factor]
