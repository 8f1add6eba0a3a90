"""Core ML builds of one small model, made when a test first asks for them, and what lies in their packages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.compile import Compiler
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.graph.program import Program
from needle_export.report.schema import Report
from needle_export.targets.coreml.contract import FILE_NAME
from needle_export.targets.coreml.evaluate import FunctionInfo, Package, load_package

GEOMETRY = SMALL
QUIET = NullProgress()
CONTEXT, BUCKETS = 48, (8, 16)

Dist = tuple[Path, Report]


def options(checkpoint: Path, out: Path, **changes: Any) -> BuildOptions:
    """A build of the small model: two prefill lengths, half precision."""
    asked = {"target": "coreml", "context": CONTEXT, "buckets": BUCKETS, "weights": "fp16", "bench": False, **changes}
    return BuildOptions(str(checkpoint), out, **asked)


class Builds:
    """One checkpoint and its builds by what they were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "three.safetensors"
        write_sample(self.checkpoint, GEOMETRY, 3)
        self._made: dict[tuple[Any, ...], Dist] = {}
        self._programs: dict[tuple[Any, ...], tuple[Program, Any, Any]] = {}

    def get(self, weights: str = "fp16", **changes: Any) -> Dist:
        """A build with these options, for all tests that ask for the same."""
        key = (weights, *sorted(changes.items()))
        if key not in self._made:
            out = self.folder / f"dist-{len(self._made)}"
            self._made[key] = out, self.build(out, weights=weights, **changes)
        return self._made[key]

    def build(self, out: Path, **changes: Any) -> Report:
        """A build of a test's own, of programs that were traced once for all."""
        with self.sharing():
            return pipeline.build(options(self.checkpoint, out, **changes), QUIET)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Builds don't trace what was traced before; a lowering only reads a program."""
        right = Compiler.program

        def program(compiler: Compiler, rows: int | None) -> Program:
            key = (rows, compiler.context, compiler.fold_into_matrices, compiler.scheme)
            phase = {1: "decode", None: "prefill"}.get(rows, f"prefill_{rows}")
            if key not in self._programs:
                made = right(compiler, rows)
                # A copy: the compiler rounds its own parameters in place afterwards.
                kept = {name: replace(w, value=w.value.clone()) for name, w in made.weights.items()}
                self._programs[key] = replace(made, weights=kept), compiler.places[phase], compiler.left[phase]
            found, compiler.places[phase], compiler.left[phase] = self._programs[key]
            # The reference exchanges weights of its own program.
            return replace(found, weights=dict(found.weights))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Compiler, "program", program)
            yield

    def copy(self, to: Path, weights: str = "fp16", **changes: Any) -> Path:
        """A copy that a test may spoil."""
        shutil.copytree(self.get(weights, **changes)[0], to)
        return to


def package(dist: Path, name: str = FILE_NAME) -> Package:
    """The package of a build."""
    return load_package(dist / name)


def functions(dist: Path) -> Iterator[tuple[int, FunctionInfo]]:
    """All functions of a package with their rows T."""
    for function in package(dist).functions.values():
        yield function.inputs["tokens"].shape[0], function


def constants(function: FunctionInfo) -> dict[str, Any]:
    """What ops of constants made, by name: the values of ``const``."""
    return {op.outputs[0][0]: op.inputs["val"][0] for op in function.ops if op.type == "const"}


def uses(function: FunctionInfo, *types: str) -> list[Any]:
    """All ops of some types."""
    return [op for op in function.ops if op.type in types]


def types_of(function: FunctionInfo) -> dict[str, Any]:
    """Declared types of everything that a function makes or is given."""
    made = {name: declared for op in function.ops for name, declared in op.outputs}
    return {**function.inputs, **function.states, **made}


def patched(monkeypatch: pytest.MonkeyPatch, target: object, change: Callable[[Any, Any], Any]) -> None:
    """Another lowering of an op: ``change`` is given the builder and the node."""
    from needle_export.targets.coreml import lower

    assert target in lower._LOWERINGS
    monkeypatch.setitem(lower._LOWERINGS, target, change)
