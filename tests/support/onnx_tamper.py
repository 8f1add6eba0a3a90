"""Artifacts of one small model as the ONNX target writes them, and ways to spoil their matrices afterwards."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.measure.weights import Compared, compare
from needle_export.targets.base import LoweringOptions
from needle_export.targets.onnx.contract import DATA_NAME, FILES
from needle_export.targets.onnx.target import OnnxTarget

#: Wide enough for what the small model leaves in float32: halves of lanes, and with integers of taps and Kronecker
#: factors, which are cut. Rows of its tables divide into blocks of 16.
WIDE = dataclasses.replace(
    SMALL, d_model=576, num_heads=2, num_kv_heads=1, out_vocab=200, engram_sub_dim=144, engram_layers=(0, 1)
)
CONTEXT = 24
OUT_PROJ = "stack/layers/block/self_attn/out_proj/kernel"
QKV = "q_proj+k_proj+v_proj+gate_proj"


class Artifacts:
    """One checkpoint, and what is written of it by scheme and opset when a test first asks; nothing is run.

    Args:
        change: of the tensors, before they are written.
    """

    def __init__(self, folder: Path, change: Callable[[dict[str, Any]], None] = lambda tensors: None) -> None:
        self.folder = folder
        self.path = folder / "wide.safetensors"
        tensors = dict(make_sample(WIDE, 4))
        change(tensors)
        write_checkpoint(self.path, WIDE, tensors)
        self._programs: dict[tuple[bool, int | None], Any] = {}
        # Its weights are never rounded, so that programs of it serve every scheme.
        self._tracer = self._compiler()
        self._made: dict[tuple[str, int], tuple[Path, Any]] = {}

    def _compiler(self) -> Compiler:
        return Compiler(read_checkpoint(self.path), CONTEXT, NullProgress())

    def get(self, weights: str, opset: int = 24) -> tuple[Path, Mapping[tuple[str, int], Any]]:
        """The folder, and the matrices that it must hold."""
        if (weights, opset) not in self._made:
            out, target, compiler = self.folder / f"{weights}-{opset}", OnnxTarget(), self._compiler()
            out.mkdir()
            rules = Rules(weights)
            fold = target.folds_into_matrices(rules)
            lowering = LoweringOptions(rules, CONTEXT, opset, compiler.max_chunk, {})
            compiled = target.compile(_Traced(self, fold), compiler.states, WIDE.head_vocab, out, lowering)
            compiler.use_stored_weights(compiled.weights, target.activations(rules))
            self._made[weights, opset] = out, compiler.matrices()
        return self._made[weights, opset]

    def program(self, fold: bool, rows: int | None) -> Any:
        """Traced once for all."""
        if (fold, rows) not in self._programs:
            self._tracer.fold_into_matrices = fold
            self._programs[fold, rows] = self._tracer.program(rows)
        return self._programs[fold, rows]

    def compared(self, weights: str, opset: int = 24, spoiled: Path | None = None) -> Compared:
        """What a comparison finds."""
        folder, reference = self.get(weights, opset)
        return compare(OnnxTarget().read_matrices(spoiled or folder), reference)

    def fault(self, weights: str, copy: Path, how: Callable[[Spoiled], Any], opset: int = 24) -> str:
        """What it finds in a copy that was spoiled."""
        shutil.copytree(self.get(weights, opset)[0], copy)
        how(Spoiled(copy))
        return str(self.compared(weights, opset, copy).fault())


class _Traced:
    """Programs of artifacts, as a target asks for them."""

    def __init__(self, artifacts: Artifacts, fold: bool) -> None:
        self.artifacts, self.fold = artifacts, fold

    def program(self, rows: int | None) -> Any:
        """One that was made before."""
        return self.artifacts.program(self.fold, rows)

    def head_program(self, name: str) -> Any:
        """None: the target has no heads."""
        raise AssertionError(name)


class Spoiled:
    """A finished artifact under a test's hands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def change(self, name: str, how: Callable[[np.ndarray], Any]) -> None:
        """Change the bytes behind a constant in place, as an array of its shape."""
        array = self._map(name)
        how(array)
        array.flush()

    def read(self, name: str) -> np.ndarray:
        """A copy of a constant."""
        return np.array(self._map(name))

    def _map(self, name: str) -> Any:
        tensor = next(t for t in self._load("decode").graph.initializer if t.name == name)
        told = {entry.key: entry.value for entry in tensor.external_data}
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(self.folder / DATA_NAME, kind, "r+", int(told.get("offset", 0)), tuple(tensor.dims))

    def graphs(self, how: Callable[[Any], Any], *phases: str) -> None:
        """Change graphs; both if none is named."""
        for phase in phases or tuple(FILES):
            model = self._load(phase)
            how(model.graph)
            onnx.save(model, self.folder / FILES[phase])

    def exchange(self, one: str, other: str, *phases: str) -> None:
        """Whatever reads one constant reads the other, and so do their scales."""
        names = {one: other, other: one, f"{one}.scales": f"{other}.scales", f"{other}.scales": f"{one}.scales"}

        def swap(graph: Any) -> None:
            for node in graph.node:
                for index, name in enumerate(node.input):
                    node.input[index] = scaled(names, name)

        self.graphs(swap, *phases)

    def _load(self, phase: str) -> Any:
        return onnx.load(self.folder / FILES[phase], load_external_data=False)


def scaled(names: Mapping[str, str], name: str) -> str:
    """What takes the place of a constant, or of its scales, which are called after the plain name."""
    plain = {k.replace("rows(", "").replace(")", ""): v.replace("rows(", "").replace(")", "") for k, v in names.items()}
    return names.get(name, plain.get(name, name))


def reader(graph: Any, name: str) -> Any:
    """The one node that reads a constant."""
    (found,) = [n for n in graph.node if name in n.input]
    return found


def setting(node: Any, name: str) -> Any:
    """An attribute of a node."""
    return next(a for a in node.attribute if a.name == name)


def flip(*at: int) -> Callable[[np.ndarray], None]:
    """The last bit of one element."""

    def change(array: np.ndarray) -> None:
        array.view(f"u{array.itemsize}")[at] ^= 1

    return change


def exchange_rows(a: int, b: int) -> Callable[[np.ndarray], None]:
    """Two rows of an array."""

    def change(array: np.ndarray) -> None:
        array[[a, b]] = array[[b, a]]

    return change


def spoil_finished(monkeypatch: pytest.MonkeyPatch, how: Callable[[Spoiled], None]) -> None:
    """Every build's files are changed after they are written, and before anything looks at them again."""
    right = OnnxTarget.compile

    def compiled(self: OnnxTarget, programs: Any, states: Any, head_vocab: int, folder: Path, lowering: Any) -> Any:
        result = right(self, programs, states, head_vocab, folder, lowering)
        how(Spoiled(folder))
        return result

    monkeypatch.setattr(OnnxTarget, "compile", compiled)
