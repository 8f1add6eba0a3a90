"""The matrices of a finished artifact as its graphs use them: what each op multiplies by, or reads rows of.

Everything is read from the files; what a matrix is called there is the one thing that was known when it was written.

Dimension letters: O outputs (rows of a matrix), I inputs (its columns), S sites whose matrices are stacked, K columns
that share a scale, C channels, R reach of a convolution's kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput
from needle_export.targets.claims import is_coded, is_norms, parse_name, split_every
from needle_export.targets.matrices import Place, ReadMatrix, RowsOf, coded_form
from needle_export.targets.onnx.contract import DATA_NAME
from needle_export.targets.onnx.decoder import FILES
from needle_export.targets.onnx.readcodes import Nodes, Numbers, Strange

#: As the builder names nodes: the block first.
_BLOCK = re.compile(r"layers\.(\d+)/")

_FIX = "build it again"


@dataclass(frozen=True)
class _Constant:
    """An initializer: where its bytes are.

    Attributes:
        dtype: NumPy's.
        span: first byte and length in the weight file, or the bytes themselves.
    """

    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int] | bytes

    def load(self, folder: Path) -> NDArray[Any]:
        """Its elements: read, not mapped, since pages of a map would stay in memory until somebody else needs it."""
        kind = np.dtype(self.dtype)
        if isinstance(self.span, bytes):
            return np.frombuffer(self.span, kind).reshape(self.shape)
        start, length = self.span
        return np.fromfile(folder / DATA_NAME, kind, length // kind.itemsize, offset=start).reshape(self.shape)


@dataclass(frozen=True)
class _Use:
    """How ops read a constant; the same way in both graphs is the same use.

    Attributes:
        layout: ``rows`` [O, I], ``columns`` [.., I, O], ``taps`` of a kernel, ``blocks`` of integers, ``codes``, or
            ``unread``.
        rows: which of the first axis, or None for all.
        every: steps between taps.
        factor: that the op multiplies its product by.
        scales: of blocks, or norms of codes, [O, I / K].
        bits, size: of a level of blocks, and K.
        levels: of codes, of every byte, [256, indices in a byte].
        fault: why it isn't a matrix.
    """

    claim: RowsOf
    folded: bool
    constant: _Constant
    layout: str = "rows"
    rows: tuple[int, int] | None = None
    every: int = 1
    factor: float | None = None
    scales: _Constant | None = None
    bits: int = 0
    size: int = 0
    levels: _Constant | None = None
    fault: str = ""


def read_matrices(folder: Path) -> Iterator[ReadMatrix]:
    """Every matrix of an artifact that is named as one, or stored in less than float32; once for each way to read it.

    One at a time: no more than the largest is held in memory.

    Raises:
        BadInput: a file isn't there or is damaged.
    """
    found: dict[_Use, list[Place]] = {}
    for phase, name in FILES.items():
        for use, place in _Graph(folder, folder / name, phase).uses():
            found.setdefault(use, []).append(place)
    for use, places in found.items():
        yield from _matrices(use, tuple(places), folder)


def _matrices(use: _Use, places: tuple[Place, ...], folder: Path) -> Iterator[ReadMatrix]:
    """What a use reads: a matrix, or one for each site."""
    if use.fault:
        yield ReadMatrix(use.claim, use.folded, np.empty((0, 0), np.int8), None, places, use.fault)
        return
    if use.layout == "unread":
        yield ReadMatrix(use.claim, use.folded, np.empty((0, 0), np.int8), None, places)
        return
    data = use.constant.load(folder)
    if use.layout == "codes":
        yield _codes(use, places, data, folder)
        return
    if use.layout == "blocks":
        assert use.scales is not None
        values, scales = _levels(data.reshape(use.constant.shape[0], -1), use.bits), use.scales.load(folder)
        form, held = f"int{use.bits}x{use.size}", data.nbytes + scales.nbytes
        scales = scales.reshape(len(values), -1)
        yield ReadMatrix(use.claim, use.folded, values, scales, places, form=form, own=True, bytes=held)
        return
    if use.layout == "taps":
        kernel = data.reshape(-1, data.shape[-1])
        between = np.arange(kernel.shape[1])[::-1] % use.every != 0
        fault = "its kernel isn't 0 between the taps" if kernel[:, between].any() else ""
        yield ReadMatrix(use.claim, use.folded, kernel[:, :: -use.every], None, places, fault)
        return
    matrices = [data] if data.ndim == 2 else list(data)
    for site, matrix in enumerate(matrices):
        claim = use.claim if data.ndim == 2 else replace(use.claim, site=site)
        values = matrix.T if use.layout == "columns" else matrix
        if use.rows is not None:
            start, stop = use.rows
            values, claim = values[start:stop], replace(claim, start=claim.start + start, stop=claim.start + stop)
        factors = None if use.factor is None else np.full(len(values), use.factor, np.float32)
        yield ReadMatrix(claim, use.folded, values, factors, places, own=True, bytes=values.nbytes)


def _codes(use: _Use, places: tuple[Place, ...], packed: NDArray[np.uint8], folder: Path) -> ReadMatrix:
    """Levels and norms, as the graph multiplies them."""
    assert use.scales is not None and use.levels is not None
    levels, norms = use.levels.load(folder), use.scales.load(folder).astype(np.float32)
    values, claim, held = levels[packed].reshape(len(packed), -1), use.claim, packed.nbytes + norms.nbytes // 2
    if use.factor is not None:
        norms = norms * np.float32(use.factor)
    if use.rows is not None:
        start, stop = use.rows
        held = held * (stop - start) // len(packed)
        values, norms = values[start:stop], norms[start:stop]
        claim = replace(claim, start=claim.start + start, stop=claim.start + stop)
    return ReadMatrix(claim, False, values, norms, places, form=coded_form(use.size), own=True, bytes=held)


def _levels(raw: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Unsigned levels as ones about 0, [O, I]; as many to a byte as fit, the first in its lowest bits."""
    if bits == 8:
        return (raw ^ np.uint8(128)).view(np.int8)
    each = 8 // bits
    levels = np.empty((len(raw), each * raw.shape[1]), np.int8)
    for place in range(each):
        levels[:, place::each] = raw >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    levels -= np.int8(1 << (bits - 1))
    return levels


@dataclass
class _Graph:
    """One graph of the artifact.

    Raises:
        BadInput: its file isn't there or is damaged.
    """

    folder: Path
    path: Path
    phase: str
    constants: dict[str, _Constant] = field(default_factory=dict)
    readers: dict[str, list[tuple[Any, int]]] = field(default_factory=dict)
    nodes: Any = None

    def __post_init__(self) -> None:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no stubs

        try:
            graph = onnx.load(str(self.path), load_external_data=False).graph
        except FileNotFoundError as fault:
            raise BadInput("this file of the artifact is missing", where=str(self.path), fix=_FIX) from fault
        except DecodeError as fault:
            raise BadInput("this is no ONNX model", where=str(self.path), fix=_FIX) from fault
        for tensor in graph.initializer:
            self.constants[tensor.name] = self._constant(tensor)
        for node in graph.node:
            for index, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((node, index))
        self.nodes = Nodes(graph.node, self.readers, self._ints, _attributes)

    def _ints(self, name: str) -> list[int] | None:
        """Of a small constant."""
        constant = self.constants.get(name)
        if constant is None or not isinstance(constant.span, bytes) or np.dtype(constant.dtype).kind != "i":
            return None
        return [int(n) for n in constant.load(self.folder).reshape(-1)]

    def _constant(self, tensor: Any) -> _Constant:
        from onnx import TensorProto, helper, numpy_helper

        kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        shape = tuple(int(d) for d in tensor.dims)
        each = 2 if tensor.data_type == TensorProto.UINT4 else 1
        if tensor.data_location != TensorProto.EXTERNAL:
            return _Constant(kind.str, shape, numpy_helper.to_array(tensor).tobytes())
        told = {entry.key: entry.value for entry in tensor.external_data}
        file = self.folder / DATA_NAME
        start, length = int(told.get("offset", 0)), -(-math.prod(shape) * kind.itemsize // each)
        if told.get("location") != DATA_NAME or not file.is_file() or start + length > file.stat().st_size:
            where = f"{self.path}, {tensor.name}"
            raise BadInput("the weight file doesn't hold this tensor", where=where, fix=_FIX)
        return _Constant(kind.str, shape, (start, length))

    def uses(self) -> Iterator[tuple[_Use, Place]]:
        """Each op that reads a matrix."""
        for name, constant in self.constants.items():
            plain, every = split_every(name.rstrip("_"))
            named = parse_name(plain)
            kind = np.dtype(constant.dtype)
            # A vector in half precision is no matrix.
            low = kind == np.uint8 or (kind == np.float16 and sum(d > 1 for d in constant.shape) > 1)
            if (named is None and not low) or is_norms(name):
                continue
            claim, folded = named or (RowsOf((name,)), False)
            use = _Use(claim, folded, constant, every=every)
            if not is_coded(name):
                yield from self._follow(use, name)
                continue
            for made in self.nodes.numbers(name):
                if isinstance(made, Numbers):
                    yield from self._coded(use, made)
                else:
                    yield replace(use, fault=made[1]), self._place(made[0])

    def _coded(self, use: _Use, made: Numbers) -> Iterator[tuple[_Use, Place]]:
        """The uses of indices of which numbers were made."""
        levels, norms = self.constants.get(made.levels), self.constants.get(made.norms)
        rows, columns = len(use.constant.shape) and use.constant.shape[0], use.constant.shape[-1]
        node = made.first
        try:
            if levels is None or levels.dtype != "<f4" or len(levels.shape) != 2 or levels.shape[0] != 256:
                raise Strange("its levels are no float32 table of every byte")
            groups = columns * levels.shape[1] // made.group
            if norms is None or norms.dtype != "<f2" or norms.shape != (rows, groups) or use.constant.dtype != "|u1":
                raise Strange(f"its rows have no half-precision norm for each {made.group} columns")
            use = replace(use, layout="codes", scales=norms, levels=levels, size=made.group)
            if made.looked_up:
                yield use, self._place(node)
                return
            for node, how, site in self.nodes.places(made):
                if site != -1 and site != use.claim.site:
                    raise Strange(f"it lies in place of site {site}")
                if how == "slice":
                    yield from self._follow(replace(use, rows=self._cut(use, node)), node.output[0])
                else:
                    yield (self._read(use, node, 1) if how == "rows" else use), self._place(node)
        except Strange as fault:
            yield replace(use, fault=str(fault)), self._place(node)

    def _follow(self, use: _Use, name: str) -> Iterator[tuple[_Use, Place]]:
        """The uses of a value that is a constant, widened or cut."""
        for node, index in self.readers.get(name, []):
            if node.op_type == "Cast" and use.constant.dtype == "<f2":
                yield from self._follow(use, node.output[0])
                continue
            try:
                if node.op_type == "Reshape" and use.every > 1 and index == 0 and len(use.constant.shape) == 3:
                    spread = self._spread(use, node)
                    yield from self._follow(replace(use, every=1), spread)
                    continue
                if node.op_type == "Slice" and index == 0:
                    yield from self._follow(replace(use, rows=self._cut(use, node)), node.output[0])
                    continue
                read = self._read(use, node, index)
            except Strange as fault:
                # What constants meet at load time isn't compared; whatever reads it need not be a product.
                read = replace(use, layout="unread") if use.folded else replace(use, fault=str(fault))
            yield read, self._place(node)

    def _place(self, node: Any) -> Place:
        block = _BLOCK.match(node.name)
        return Place(f"{node.name} of {self.phase}", int(block.group(1)) if block else -1)

    def _spread(self, use: _Use, node: Any) -> str:
        """The kernel that taps [C, 1, R] or [1, C, R] become with zeros between, by Reshape, Pad and so on.

        Raises:
            Strange: these ops do something else.
        """
        first, second, count = use.constant.shape
        channels = first * second
        length = (count - 1) * use.every + 1
        steps: list[tuple[str, list[list[int]]]] = [
            ("Reshape", [[channels, count, 1]]),
            ("Pad", [[0, 0, 0, 0, 0, use.every - 1]]),
            ("Reshape", [[first, second, count * use.every]]),
            ("Slice", [[0], [length], [2]]),
        ]
        for step, (kind, wanted) in enumerate(steps):
            if step:
                readers = self.readers.get(node.output[0], [])
                node = readers[0][0] if len(readers) == 1 else None
            held = [] if node is None else [self.constants.get(name) for name in node.input[1:]]
            found = [c.load(self.folder).reshape(-1).tolist() for c in held if c is not None]
            if node is None or node.op_type != kind or node.attribute or found != wanted:
                raise Strange(f"{kind} doesn't spread its taps by {use.every}")
        return str(node.output[0])

    def _cut(self, use: _Use, node: Any) -> tuple[int, int]:
        """The rows that a Slice takes of the first axis."""
        bounds = [self.constants.get(name) for name in node.input[1:]]
        if use.rows is not None or len(bounds) != 3 or any(b is None or not isinstance(b.span, bytes) for b in bounds):
            raise Strange(f"{node.op_type} cuts it, not by three constants")
        start, stop, axis = (int(b.load(self.folder).reshape(-1)[0]) for b in bounds if b is not None)
        if axis != 0 or not 0 <= start < stop <= use.constant.shape[0]:
            raise Strange(f"{node.op_type} cuts it, not to rows that it has")
        return start, stop

    def _read(self, use: _Use, node: Any, index: int) -> _Use:
        """What a node makes of the constant.

        Raises:
            Strange: it isn't read as a matrix.
        """
        given, dims = _attributes(node), len(use.constant.shape)
        strange = Strange(f"{node.op_type} reads it, not as a matrix of rows")
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            return self._blocks(use, node, index, given)
        if use.layout == "codes":
            if node.op_type != "Gemm" or index != 1 or not given.get("transB", 0) or given.get("beta", 1.0) != 1.0:
                raise strange
            return replace(use, factor=float(given.get("alpha", 1.0)))
        if np.dtype(use.constant.dtype).kind != "f":
            raise strange
        if node.op_type == "MatMul" and use.rows is None:
            if index == 1 and dims in (2, 3):
                return replace(use, layout="columns")
            if index == 0 and dims == 2:
                return use
        if node.op_type == "Gather" and index == 0 and dims == 2 and given.get("axis", 0) == 0:
            return use
        if node.op_type == "Gemm" and index == 1 and dims == 2 and not given.get("transA", 0):
            layout = "rows" if given.get("transB", 0) else "columns"
            if (layout == "rows" or use.rows is None) and given.get("beta", 1.0) == 1.0:
                return replace(use, layout=layout, factor=float(given.get("alpha", 1.0)))
        if use.rows is None and dims == 3 and self._is_convolution(use.constant.shape, node, index, given):
            return replace(use, layout="taps")
        raise strange

    def _is_convolution(self, shape: tuple[int, ...], node: Any, index: int, given: dict[str, Any]) -> bool:
        """Whether a node multiplies a window of every channel by a kernel: [C, 1, R], or [1, C, R] by hand."""
        if node.op_type == "Conv":
            plain = set(given.get("strides", [1])) | set(given.get("dilations", [1])) == {1}
            return index == 1 and shape[1] == 1 and given.get("group") == shape[0] and plain
        if node.op_type == "CausalConvWithState":
            return index == 1 and shape[1] == 1
        behind = [reader for reader, _ in self.readers.get(node.output[0], [])]
        summed = len(behind) == 1 and behind[0].op_type == "ReduceSum"
        return node.op_type == "Mul" and shape[0] == 1 and summed

    def _blocks(self, use: _Use, node: Any, index: int, given: dict[str, Any]) -> _Use:
        """Levels and scales of one of ONNX Runtime's own ops."""
        product = node.op_type == "MatMulNBits"
        bits, size = int(given.get("bits", 4)), int(given.get("block_size", 0 if product else 128))
        inputs = list(node.input)
        # Zero points, and the order of columns: this tool writes neither.
        if any(inputs[3:5] if product else inputs[3:4]) or given.get("weight_prepacked", 0):
            raise Strange(f"{node.op_type} has more than levels and scales")
        if index != (1 if product else 0) or use.constant.dtype != "|u1" or bits not in (2, 4, 8) or size < 1:
            raise Strange(f"{node.op_type} reads it, not as levels of 2, 4 or 8 bits")
        rows, scales = use.constant.shape[0], self.constants.get(inputs[2])
        columns = math.prod(use.constant.shape[1:]) * 8 // bits
        if product and (given.get("N"), given.get("K")) != (rows, columns):
            raise Strange(f"{node.op_type} has other sizes than its levels")
        if not product and (given.get("gather_axis", 0), given.get("quantize_axis", 1)) != (0, 1):
            raise Strange(f"{node.op_type} reads something else than rows")
        if scales is None or scales.dtype != "<f4" or columns % size or scales.shape != (rows, columns // size):
            raise Strange(f"{node.op_type} has no float32 scale for every {size} columns")
        return replace(use, layout="blocks", scales=scales, bits=bits, size=size)


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
