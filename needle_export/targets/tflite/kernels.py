"""Small graphs whose time in LiteRT tells how fast it is here; see :mod:`targets.kernels`.

The file is written op by op with the format's own objects, so that no converter is needed and nothing is optimised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.measure.work import Phase, gathered
from needle_export.targets.kernels import WIDTH, Chain, Kernel, Out
from needle_export.targets.ports import DECODE
from needle_export.targets.tflite.analysis import read_graph
from needle_export.targets.tflite.blocks import BLOCK, Packed, pack
from needle_export.targets.tflite.work import read_ops

#: Versions of a product, by its matrix; 13 is the first with 4-bit blocks.
_PRODUCT = {"fp32": 1, "int8": 3, "int4": 13}


def open_kernel(kernel: Kernel, folder: Path) -> tuple[Callable[[], object], Phase]:
    """A kernel in an interpreter of its own, with one thread: what runs it once, and the work that it does.

    Args:
        folder: to write its file into.
    """
    from ai_edge_litert.interpreter import Interpreter

    graph = _Graph(kernel)
    start = graph.value((kernel.rows, WIDTH))
    path = folder / "kernel.tflite"
    path.write_bytes(pack(graph.model(start, graph.build(start))))
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    given = np.random.default_rng(0).standard_normal(start.shape, np.float32)
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], given)
    ops = gathered(read_ops(read_graph(path)[0], set()))
    return interpreter.invoke, Phase(kernel.kind, kernel.rows, 0, ops)


class _Graph(Chain):
    """One signature as the objects of a file."""

    def __init__(self, kernel: Kernel) -> None:
        from ai_edge_litert import schema_py_generated as schema

        super().__init__(kernel)
        self.schema = schema
        self.whole = schema.ModelT()
        self.whole.version, self.whole.operatorCodes, self.whole.buffers = 3, [], [schema.BufferT()]
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []

    def model(self, start: Out, end: Out) -> Any:
        """The whole."""
        self.graph.inputs, self.graph.outputs = [start.name], [end.name]
        signature = self.schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = DECODE.encode(), 0
        signature.inputs, signature.outputs = [self._port(b"x", start)], [self._port(b"y", end)]
        self.whole.subgraphs, self.whole.signatureDefs = [self.graph], [signature]
        return self.whole

    def _port(self, name: bytes, value: Out) -> Any:
        port = self.schema.TensorMapT()
        port.name, port.tensorIndex = name, value.name
        return port

    def value(self, shape: tuple[int, ...], data: NDArray[Any] | None = None, kind: str = "FLOAT32") -> Out:
        """A tensor, constant if it has data."""
        made = self.schema.TensorT()
        made.name, made.shape = f"t{len(self.graph.tensors)}".encode(), list(shape)
        made.type, made.buffer = getattr(self.schema.TensorType, kind), 0
        if data is not None:
            held = self.schema.BufferT()
            held.data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            self.whole.buffers.append(held)
            made.buffer = len(self.whole.buffers) - 1
        self.graph.tensors.append(made)
        return Out(len(self.graph.tensors) - 1, shape)

    def _op(
        self, name: str, shape: tuple[int, ...], *inputs: Any, options: str = "", version: int = 1, **fields: Any
    ) -> Out:
        """An op; inputs are values, and arrays for constants."""
        made = self.schema.OperatorT()
        made.opcodeIndex = self._code(getattr(self.schema.BuiltinOperator, name), version)
        given = [i if isinstance(i, Out) else self._constant(i) for i in inputs]
        result = self.value(shape)
        made.inputs, made.outputs = [v.name for v in given], [result.name]
        if options:
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
            made.builtinOptions = getattr(self.schema, f"{options}T")()
            for key, field in fields.items():
                setattr(made.builtinOptions, key, field)
        self.graph.operators.append(made)
        return result

    def _code(self, number: int, version: int) -> int:
        codes = [(c.builtinCode, c.version) for c in self.whole.operatorCodes]
        if (number, version) not in codes:
            code = self.schema.OperatorCodeT()
            code.builtinCode, code.version = number, version
            code.deprecatedBuiltinCode = min(number, 127)
            self.whole.operatorCodes.append(code)
            codes.append((number, version))
        return codes.index((number, version))

    def _constant(self, array: NDArray[Any]) -> Out:
        return self.value(array.shape, array, "INT32" if array.dtype == np.int32 else "FLOAT32")

    def _product(self, x: Out, weight: Any, width: int, *bias: NDArray[Any], version: int = 1) -> Out:
        return self._op("FULLY_CONNECTED", (*x.shape[:-1], width), x, weight, *bias, version=version,
                        options="FullyConnectedOptions", keepNumDims=True)

    def matrix(self, x: Out) -> Out:
        """See :class:`Chain`."""
        dtype = self.kernel.dtype
        weight = self._by_row() if dtype == "int8" else self._in_blocks() if dtype == "int4" else None
        return self._product(x, self.random(WIDTH, WIDTH) if weight is None else weight, WIDTH, version=_PRODUCT[dtype])

    def _by_row(self) -> Out:
        made = self.value((WIDTH, WIDTH), self.rng.integers(-127, 128, (WIDTH, WIDTH), np.int8), "INT8")
        own = self.schema.QuantizationParametersT()
        own.scale, own.zeroPoint = np.full(WIDTH, 12**0.5 / 254 / WIDTH**0.5, np.float32), np.zeros(WIDTH, np.int64)
        own.quantizedDimension = 0
        self.graph.tensors[made.name].quantization = own
        return made

    def _in_blocks(self) -> Out:
        scales = np.full((WIDTH, WIDTH // BLOCK), 12**0.5 / 16 / WIDTH**0.5, np.float16)
        held = Packed.of(self.rng.integers(-8, 8, (WIDTH, WIDTH), np.int8), scales)
        blocks = self.schema.BlockwiseQuantizationT()
        blocks.scales, blocks.zeroPoints = self.value(scales.shape, scales, "FLOAT16").name, -1
        blocks.blockSize = BLOCK
        made = self.value((WIDTH, WIDTH), held.levels, "INT4")
        own = self.schema.QuantizationParametersT()
        own.details, own.detailsType = blocks, self.schema.QuantizationDetails.BlockwiseQuantization
        own.quantizedDimension = 0
        self.graph.tensors[made.name].quantization = own
        return made

    def dense(self, x: Out, width: int) -> Out:
        """See :class:`Chain`."""
        return self._product(x, self.random(x.shape[-1], width).T, width, np.zeros(width, np.float32))

    def right(self, x: Out, width: int) -> Out:
        """See :class:`Chain`."""
        return self._product(x, self.random(x.shape[-1], width).T, width)

    def left(self, x: Out, height: int) -> Out:
        """See :class:`Chain`."""
        rows, inner, width = x.shape
        factor = np.broadcast_to(self.random(inner, height).T, (1, height, inner))
        return self._op("BATCH_MATMUL", (rows, height, width), factor, x, options="BatchMatMulOptions")

    def multiplied(self, x: Out, y: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("BATCH_MATMUL", (*x.shape[:-1], y.shape[-1]), x, y, options="BatchMatMulOptions")

    def norm(self, x: Out) -> Out:
        """See :class:`Chain`."""
        square = self._op("MUL", x.shape, x, x, options="MulOptions")
        mean = self._reduced("MEAN", square, -1)
        root = self._op("RSQRT", mean.shape, self.biased(mean))
        return self.scaled(self._op("MUL", x.shape, x, root, options="MulOptions"))

    def _reduced(self, kind: str, x: Out, axis: int) -> Out:
        shape = list(x.shape)
        shape[axis] = 1
        where = np.array([len(shape) + axis], np.int32)
        return self._op(kind, tuple(shape), x, where, options="ReducerOptions", keepDims=True)

    def softmax(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("SOFTMAX", x.shape, x, options="SoftmaxOptions", beta=1.0)

    def balanced(self, x: Out, halves: int) -> Out:
        """See :class:`Chain`."""
        for half in range(halves):
            x = self._op("DIV", x.shape, x, self._reduced("SUM", x, -1 - half % 2), options="DivOptions")
        return x

    def scaled(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("MUL", x.shape, x, np.full(x.shape[-1], 1.01, np.float32), options="MulOptions")

    def biased(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("ADD", x.shape, x, np.full(x.shape[-1], 0.01, np.float32), options="AddOptions")

    def added(self, x: Out, y: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("ADD", x.shape, x, y, options="AddOptions")

    def sigmoid(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("LOGISTIC", x.shape, x)

    def gated(self, x: Out, y: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("MUL", x.shape, x, self.sigmoid(y), options="MulOptions")

    def gelu(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self.gated(x, x)

    def permuted(self, x: Out) -> Out:
        """See :class:`Chain`."""
        order = self.rng.permutation(x.shape[-1]).astype(np.int32)
        return self._op("GATHER", x.shape, x, order, options="GatherOptions", axis=len(x.shape) - 1)

    def reshaped(self, x: Out, *shape: int) -> Out:
        """See :class:`Chain`."""
        return self._op("RESHAPE", shape, x, np.array(shape, np.int32), options="ReshapeOptions", newShape=list(shape))

    def pieces(self, x: Out, first: int) -> tuple[Out, Out]:
        """See :class:`Chain`."""
        rows, width = x.shape
        cuts = []
        for begin, size in ((0, first), (first, width - first)):
            places = np.array([0, begin], np.int32), np.array([rows, size], np.int32)
            cuts.append(self._op("SLICE", (rows, size), x, *places, options="SliceOptions"))
        return cuts[0], cuts[1]
