"""Ways to spoil the matrices of a finished TFLite file, found by what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.targets.tflite.analysis import mapped, span_of
from needle_export.targets.tflite.contract import FILE_NAME
from needle_export.targets.tflite.layouts import location
from needle_export.targets.tflite.quantization import blocks_of
from needle_export.targets.tflite.target import TfliteTarget

QKV = "q_proj+k_proj+v_proj+gate_proj[0:416]"


@dataclass
class Bytes:
    """Bytes of a file that are written back when they are changed."""

    path: Path
    start: int
    kind: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """A copy."""
        return np.array(np.memmap(self.path, self.kind, "r", self.start, self.shape))

    def change(self, how: Callable[[np.ndarray], Any]) -> None:
        """Change an array of them in place."""
        array = np.memmap(self.path, self.kind, "r+", self.start, self.shape)
        how(array)
        array.flush()


class Spoiled:
    """A finished file under a test's hands."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def matrix(self, name: str, kind: str = "i1") -> Bytes:
        """The stored values [O, I] of the matrix of this name."""
        with mapped(self.path) as (data, model):
            tensor = self._tensor(model, f"rows({name})")
            return self._bytes(data, model, tensor, kind)

    def levels(self, name: str) -> Bytes:
        """The bytes [O, I / 2] of the 4-bit matrix of this name, two levels each."""
        found = self.matrix(name, "u1")
        rows, columns = found.shape
        return Bytes(found.path, found.start, "u1", (rows, columns // 2))

    def block_scales(self, name: str) -> Bytes:
        """The halves [O, I / 32] that scale the 4-bit matrix of this name."""
        with mapped(self.path) as (data, model):
            own = blocks_of(self._tensor(model, f"rows({name})"))
            assert own is not None
            return self._bytes(data, model, model.Subgraphs(0).Tensors(own.scales), "f2")

    def halves(self, name: str, layout: str = "") -> Bytes:
        """The halves, in the shape that they have there, that are widened into the constant of this name and layout."""
        with mapped(self.path) as (data, model):
            graph = model.Subgraphs(0)
            wide = self._index(graph, location(name, layout))
            maker = next(o for o in self._ops(graph) if wide in o.OutputsAsNumpy())
            return self._bytes(data, model, graph.Tensors(int(maker.Inputs(0))), "f2")

    def scales(self, name: str) -> Bytes:
        """The scales [O] of the MUL behind the product with the matrix of this name."""
        with mapped(self.path) as (data, model):
            graph = model.Subgraphs(0)
            matrix = self._index(graph, f"rows({name})")
            product = self._reader(graph, matrix)
            multiply = self._reader(graph, product.Outputs(0))
            factor = next(i for i in multiply.InputsAsNumpy() if i != product.Outputs(0))
            return self._bytes(data, model, graph.Tensors(int(factor)), "f4")

    def exchange_operands(self, one: str, other: str, scales: bool = False) -> None:
        """The products with two matrices each read the other's, in decode; the MUL behind them too, if asked."""
        with mapped(self.path) as (_, model):
            graph = model.Subgraphs(0)
            products = [self._reader(graph, self._index(graph, f"rows({name})")) for name in (one, other)]
            places = [[self._place(op, 1) for op in products]]
            if scales:
                behind = [self._reader(graph, op.Outputs(0)) for op in products]
                both = zip(behind, products, strict=True)
                places.append([self._place(mul, int(mul.Inputs(0) == op.Outputs(0))) for mul, op in both])
        with self.path.open("r+b") as file:
            for first, second in places:
                held = []
                for place in (first, second):
                    file.seek(place)
                    held.append(file.read(4))
                for place, index in zip((first, second), reversed(held), strict=True):
                    file.seek(place)
                    file.write(index)

    def tensor_scale(self, name: str, scale: float) -> None:
        """The scale of the tensor itself."""
        with mapped(self.path) as (_, model):
            own = self._tensor(model, f"rows({name})").Quantization()
            place = own._tab.Vector(own._tab.Offset(8))
        with self.path.open("r+b") as file:
            file.seek(place)
            file.write(np.float32(scale).tobytes())

    def _index(self, graph: Any, name: str) -> int:
        return next(i for i in range(graph.TensorsLength()) if graph.Tensors(i).Name().decode() == name)

    def _tensor(self, model: Any, name: str) -> Any:
        return model.Subgraphs(0).Tensors(self._index(model.Subgraphs(0), name))

    def _reader(self, graph: Any, tensor: int) -> Any:
        return next(o for o in self._ops(graph) if tensor in o.InputsAsNumpy())

    def _place(self, op: Any, number: int) -> int:
        """Where in the file an op's input stands: the second field of its table."""
        return int(op._tab.Vector(op._tab.Offset(6))) + 4 * number

    def _ops(self, graph: Any) -> list[Any]:
        return [graph.Operators(i) for i in range(graph.OperatorsLength())]

    def _bytes(self, data: Any, model: Any, tensor: Any, kind: str) -> Bytes:
        start, _ = span_of(data, model.Buffers(tensor.Buffer()))
        return Bytes(self.path, start, kind, tuple(int(d) for d in tensor.ShapeAsNumpy()))


def spoil_finished(monkeypatch: pytest.MonkeyPatch, how: Callable[[Spoiled], None]) -> None:
    """Every build's file is changed after it is written, and before anything looks at it again."""
    right = TfliteTarget.compile

    def compiled(self: TfliteTarget, programs: Any, states: Any, head_vocab: int, folder: Path, lowering: Any) -> Any:
        result = right(self, programs, states, head_vocab, folder, lowering)
        how(Spoiled(folder / FILE_NAME))
        return result

    monkeypatch.setattr(TfliteTarget, "compile", compiled)


def exchange(one: np.ndarray, a: Any, b: Any) -> None:
    """Two parts of an array."""
    one[a], one[b] = one[b].copy(), one[a].copy()
