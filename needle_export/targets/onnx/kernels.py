"""Small graphs whose time in ONNX Runtime tells how fast it is here; see :mod:`targets.kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from needle_export.config.options import IR_VERSIONS, OPSETS
from needle_export.measure.work import Phase, gathered
from needle_export.targets.kernels import WIDTH, Chain, Kernel, Out
from needle_export.targets.onnx.shapes import Shapes
from needle_export.targets.onnx.work import read_ops

#: Columns that share a scale, and bits, of integer matrices as builds have them.
_BLOCK, _BITS = 128, {"int8": 8, "int4": 4}

#: Of the graphs of builds.
_OPSET = OPSETS[-1]

_EPSILON = 1e-6


def open_kernel(kernel: Kernel) -> tuple[Callable[[], object], Phase]:
    """A kernel in a session of its own, with one thread: what runs it once, and the work that it does."""
    graph = _Graph(kernel)
    start = Out("x", (kernel.rows, WIDTH))
    end = graph.build(start)
    model = graph.model(start, end)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # as sessions of builds
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    value = np.random.default_rng(0).standard_normal(start.shape, np.float32)
    binding.bind_ortvalue_input(start.name, ort.OrtValue.ortvalue_from_numpy(value))
    binding.bind_ortvalue_output(end.name, ort.OrtValue.ortvalue_from_numpy(np.zeros(end.shape, np.float32)))
    ops = gathered(read_ops(model.graph.node, Shapes(model, lambda name: {}, kernel.kind), frozenset()))
    return lambda: session.run_with_iobinding(binding), Phase(kernel.kind, kernel.rows, 0, ops)


class _Graph(Chain):
    """Nodes and constants."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []

    def model(self, start: Out, end: Out) -> onnx.ModelProto:
        """The whole."""
        given = helper.make_tensor_value_info(start.name, TensorProto.FLOAT, start.shape)
        result = helper.make_tensor_value_info(end.name, TensorProto.FLOAT, end.shape)
        graph = helper.make_graph(self.nodes, "kernel", [given], [result], self.constants)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSIONS[_OPSET])

    def _constant(self, array: NDArray[Any]) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def _op(self, kind: str, shape: tuple[int, ...], *inputs: Any, domain: str = "", **attributes: Any) -> Out:
        """A node; inputs are values, and arrays for constants."""
        names = [i.name if isinstance(i, Out) else self._constant(i) for i in inputs]
        made = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, names, [made], domain=domain, **attributes))
        return Out(made, shape)

    def matrix(self, x: Out) -> Out:
        """See :class:`Chain`."""
        size = WIDTH
        if self.kernel.dtype not in _BITS:
            return self._op("MatMul", x.shape, x, self.random(size, size))
        bits = _BITS[self.kernel.dtype]
        levels = self.rng.integers(0, 256, (size, size // _BLOCK, _BLOCK * bits // 8), np.uint8)
        scales = np.full((size, size // _BLOCK), 12**0.5 / 2**bits / size**0.5, np.float32)
        numbers = {"K": size, "N": size, "bits": bits, "block_size": _BLOCK, "accuracy_level": 4}
        return self._op("MatMulNBits", x.shape, x, levels, scales, domain="com.microsoft", **numbers)

    def dense(self, x: Out, width: int) -> Out:
        """See :class:`Chain`."""
        bias = np.zeros(width, np.float32)
        return self._op("Gemm", (x.shape[0], width), x, self.random(x.shape[-1], width), bias)

    def right(self, x: Out, width: int) -> Out:
        """See :class:`Chain`."""
        return self._op("MatMul", (*x.shape[:-1], width), x, self.random(x.shape[-1], width))

    def left(self, x: Out, height: int) -> Out:
        """See :class:`Chain`."""
        rows, inner, width = x.shape
        factor = self.random(inner, height).T.copy()
        return self._op("MatMul", (rows, height, width), factor, x)

    def multiplied(self, x: Out, y: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("MatMul", (*x.shape[:-1], y.shape[-1]), x, y)

    def norm(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("RMSNormalization", x.shape, x, np.ones(x.shape[-1], np.float32), axis=-1, epsilon=_EPSILON)

    def softmax(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("Softmax", x.shape, x, axis=-1)

    def balanced(self, x: Out, halves: int) -> Out:
        """See :class:`Chain`."""
        for half in range(halves):
            x = self._op("LpNormalization", x.shape, x, axis=-1 - half % 2, p=1)
        return x

    def scaled(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("Mul", x.shape, x, np.full(x.shape[-1], 1.01, np.float32))

    def biased(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("Add", x.shape, x, np.full(x.shape[-1], 0.01, np.float32))

    def added(self, x: Out, y: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("Add", x.shape, x, y)

    def sigmoid(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("Sigmoid", x.shape, x)

    def gated(self, x: Out, y: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("Mul", x.shape, x, self.sigmoid(y))

    def gelu(self, x: Out) -> Out:
        """See :class:`Chain`."""
        return self._op("QuickGelu", x.shape, x, domain="com.microsoft", alpha=1.0)

    def permuted(self, x: Out) -> Out:
        """See :class:`Chain`."""
        order = np.broadcast_to(self.rng.permutation(x.shape[-1]), x.shape).astype(np.int64)
        return self._op("GatherElements", x.shape, x, order, axis=-1)

    def reshaped(self, x: Out, *shape: int) -> Out:
        """See :class:`Chain`."""
        return self._op("Reshape", shape, x, np.array(shape, np.int64))

    def pieces(self, x: Out, first: int) -> tuple[Out, Out]:
        """See :class:`Chain`."""
        sizes, lead = (first, x.shape[-1] - first), x.shape[:-1]
        names = [f"v{len(self.nodes)}_{i}" for i in (0, 1)]
        given = [x.name, self._constant(np.array(sizes, np.int64))]
        self.nodes.append(helper.make_node("Split", given, names, axis=-1))
        return Out(names[0], (*lead, sizes[0])), Out(names[1], (*lead, sizes[1]))
