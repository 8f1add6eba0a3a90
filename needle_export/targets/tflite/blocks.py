"""4-bit matrices with a scale for each run of 32 columns, which the converter can't write: put into its finished file.

The converter carries such a matrix as int8, its levels and scales packed behind each other; here that becomes what the
runtime reads: a tensor of INT4 whose quantisation names a second tensor, of half-precision scales [O, I / 32].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.targets.constants import digest
from needle_export.targets.tflite.analysis import RUNTIME_KEY, mapped

#: Columns that share a scale: the fewest that XNNPACK's kernel takes.
BLOCK = 32

#: Versions of ops that read such a matrix, by name. tflite-runtime 2.14 knows neither and refuses the file; under the
#: numbers that it knows, its products are 0 without a word. The converter's own rule has 4 for any lookup in an INT4
#: table, and nothing for a product of a float with one; 13 is the first of a product with INT4 that came after 2.14.
_VERSIONS = {"FULLY_CONNECTED": 13, "EMBEDDING_LOOKUP": 4}

#: The first TensorFlow Lite that knows these versions, as the converter has it for EMBEDDING_LOOKUP 4.
_RUNTIME = "2.18.0"


@dataclass(frozen=True)
class Packed:
    """A matrix [O, I] in blocks.

    Attributes:
        levels: two a byte, the first in the lower half: uint8 [O, I / 2].
        scales: float16 [O, I / 32].
    """

    levels: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @classmethod
    def of(cls, values: NDArray[np.int8], scales: NDArray[np.float16]) -> Packed:
        """Of levels -8 to 7 [O, I]."""
        low, high = values[:, 0::2].view(np.uint8) & 15, values[:, 1::2].view(np.uint8) & 15
        return cls(np.ascontiguousarray(low | high << 4), np.ascontiguousarray(scales))

    def carried(self) -> NDArray[np.int8]:
        """Levels and scales as one int8 array [O, I], with nothing behind: equal only where both are."""
        rows, half = self.levels.shape
        carrier = np.zeros((rows, 2 * half), np.int8)
        carrier[:, :half] = self.levels.view(np.int8)
        carrier[:, half : half + 2 * self.scales.shape[1]] = self.scales.view(np.int8)
        return carrier


def unpack(levels: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Levels int8 [O, I] of uint8 [O, I / 2]."""
    values = np.empty((len(levels), 2 * levels.shape[1]), np.int8)
    # Shifted up as unsigned and down as signed, which repeats the sign.
    values[:, 0::2] = (levels << 4).view(np.int8) >> 4
    values[:, 1::2] = levels.view(np.int8) >> 4
    return values


def put_blocks(path: Path, carried: Mapping[str, Packed]) -> None:
    """Replace carriers in a file by the matrices that they carry, and store equal constants once.

    Args:
        path: of the file, which is written anew.
        carried: by digest of the carrier.
    """
    from ai_edge_litert import schema_py_generated as schema

    with mapped(path) as (data, _):
        model = schema.ModelT.InitFromPackedBuf(bytearray(data))
    writer = _Writer(model, carried)
    writer.convert()
    path.write_bytes(pack(writer.model))


class _Writer:
    """A model as objects, on its way into a file again."""

    def __init__(self, model: Any, carried: Mapping[str, Packed]) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema = schema
        self.model = model
        self.carriers: dict[int, Packed] = {}
        self.scales: dict[int, int] = {}
        for index, buffer in enumerate(model.buffers):
            if buffer.data is not None and len(buffer.data):
                found = carried.get(digest(buffer.data))
                if found is not None:
                    self.carriers[index] = found

    def convert(self) -> None:
        """Tensors, ops, constants, and the note of the oldest runtime."""
        for index in [*self.carriers]:
            self.scales[index] = self._buffer(self.carriers[index].scales)
        for graph in self.model.subgraphs:
            self._convert_graph(graph)
        for index, packed in self.carriers.items():
            self.model.buffers[index].data = packed.levels.reshape(-1)
        self._share()
        for entry in self.model.metadata or ():
            if entry.name == RUNTIME_KEY.encode() and self.carriers:
                self.model.buffers[entry.buffer].data = np.frombuffer(_RUNTIME.encode().ljust(16, b"\0"), np.uint8)

    def _convert_graph(self, graph: Any) -> None:
        types = self.schema.TensorType
        scales: dict[int, int] = {}
        changed = set()
        for at, tensor in enumerate([*graph.tensors]):
            if tensor.buffer not in self.carriers or tensor.type != types.INT8:
                continue
            changed.add(at)
            if tensor.buffer not in scales:
                packed = self.carriers[tensor.buffer]
                made = self.schema.TensorT()
                made.name = tensor.name + b".scales"
                made.shape, made.type = list(packed.scales.shape), types.FLOAT16
                made.buffer = self.scales[tensor.buffer]
                graph.tensors.append(made)
                scales[tensor.buffer] = len(graph.tensors) - 1
            blocks = self.schema.BlockwiseQuantizationT()
            blocks.scales, blocks.zeroPoints, blocks.blockSize = scales[tensor.buffer], -1, BLOCK
            tensor.type = types.INT4
            tensor.quantization = self.schema.QuantizationParametersT()
            tensor.quantization.details = blocks
            tensor.quantization.detailsType = self.schema.QuantizationDetails.BlockwiseQuantization
            tensor.quantization.quantizedDimension = 0
        for op in graph.operators:
            if len(op.inputs) > 1 and op.inputs[1] in changed:
                op.opcodeIndex = self._newer(op.opcodeIndex)

    def _newer(self, index: int) -> int:
        """The op of an index in the version that reads 4-bit blocks."""
        codes, builtins = self.model.operatorCodes, self.schema.BuiltinOperator
        number = codes[index].builtinCode
        version = next(v for name, v in _VERSIONS.items() if getattr(builtins, name) == number)
        for at, code in enumerate(codes):
            if (code.builtinCode, code.version) == (number, version):
                return at
        code = self.schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = number
        code.version = version
        codes.append(code)
        return len(codes) - 1

    def _buffer(self, array: NDArray[Any]) -> int:
        buffer = self.schema.BufferT()
        buffer.data = array.reshape(-1).view(np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def _share(self) -> None:
        """Tensors whose constants are equal read one buffer; metadata keep theirs."""
        first: dict[str, int] = {}
        for graph in self.model.subgraphs:
            for tensor in graph.tensors:
                buffer = self.model.buffers[tensor.buffer]
                if buffer.data is None or not len(buffer.data):
                    continue
                kept = first.setdefault(digest(buffer.data), tensor.buffer)
                if kept != tensor.buffer:
                    tensor.buffer = kept
        used = {tensor.buffer for graph in self.model.subgraphs for tensor in graph.tensors}
        used |= {entry.buffer for entry in self.model.metadata or ()}
        for index, buffer in enumerate(self.model.buffers):
            if index not in used:
                buffer.data = None


def pack(model: Any) -> bytes:
    """A model's objects in bytes; data of buffers at multiples of 16, as the schema demands and its code doesn't."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    def packed(self: Any, builder: Any) -> Any:
        where = None
        if self.data is not None and len(self.data):
            count = len(self.data)
            builder.StartVector(1, count, 16)
            builder.head -= count
            builder.Bytes[builder.head : builder.head + count] = self.data.tobytes()
            where = builder.EndVector()
        schema.BufferStart(builder)
        if where is not None:
            schema.BufferAddData(builder, where)
        return schema.BufferEnd(builder)

    aligned = type("Aligned", (schema.BufferT,), {"Pack": packed})
    for buffer in model.buffers:
        buffer.__class__ = aligned
    size = sum(len(b.data) for b in model.buffers if b.data is not None)
    builder = flatbuffers.Builder(size + (1 << 22))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
