"""TFLite builds of one small model, made when a test first asks for them, and ways to spoil what a build makes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.report.schema import Report
from needle_export.targets.tflite.session import Loop
from needle_export.targets.tflite.store import WeightStore

GEOMETRY = SMALL.with_layers(5)
QUIET = NullProgress()
CONTEXT, BUCKETS = 48, (8, 16)

Dist = tuple[Path, Report]


def options(checkpoint: Path, out: Path, **changes: Any) -> BuildOptions:
    """A build of the small model: two prefill lengths, no latency."""
    asked = {"target": "tflite", "context": CONTEXT, "buckets": BUCKETS, "bench": False, **changes}
    return BuildOptions(str(checkpoint), out, **asked)


class Builds:
    """One checkpoint and its builds by scheme."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "five.safetensors"
        write_sample(self.checkpoint, GEOMETRY, 3)
        self._made: dict[str, Dist] = {}

    def __getitem__(self, weights: str) -> Dist:
        if weights not in self._made:
            out = self.folder / weights
            self._made[weights] = out, pipeline.build(options(self.checkpoint, out, weights=weights), QUIET)
        return self._made[weights]

    def copy(self, weights: str, out: Path) -> Path:
        """A copy that a test may spoil."""
        shutil.copytree(self[weights][0], out)
        return out


Wrong = Callable[[np.ndarray], np.ndarray]


def every_other_row(factor: float) -> Wrong:
    """Not a common factor: the norm behind a projection would take it out again."""

    def wrong(array: np.ndarray) -> np.ndarray:
        rows = 1 + (factor - 1) * (np.arange(len(array)) % 2)
        return array * rows.astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))

    return wrong


def store_wrongly(monkeypatch: pytest.MonkeyPatch, weight: str, wrong: Wrong) -> list[str]:
    """Damage a float32 weight on its way into the file; the list tells afterwards whether there was one."""
    stored, met = WeightStore._float, []

    def damaged(self: WeightStore, given: Any, data: np.ndarray, reason: str) -> Any:
        if given.name == f"net.{weight}":
            met.append(given.name)
            data = np.ascontiguousarray(wrong(data))
        return stored(self, given, data, reason)

    monkeypatch.setattr(WeightStore, "_float", damaged)
    return met


def scale_wrongly(monkeypatch: pytest.MonkeyPatch, weight: str, factor: float) -> list[str]:
    """Multiply every other scale of a quantised matrix by a factor."""
    int8, met = WeightStore._int8, []

    def damaged(self: WeightStore, given: Any, data: np.ndarray, factors: np.ndarray | None) -> Any:
        if given.name == f"net.{weight}":
            met.append(given.name)
            ones = np.ones(len(data), np.float32) if factors is None else factors
            factors = every_other_row(factor)(ones)
        return int8(self, given, data, factors)

    monkeypatch.setattr(WeightStore, "_int8", damaged)
    return met


def forget_writes(monkeypatch: pytest.MonkeyPatch, parts: Collection[str]) -> None:
    """A host that doesn't write new rows into states of these kinds."""

    def forgetful(method: Callable[..., None]) -> Callable[..., None]:
        def append(self: Loop, *arguments: Any) -> None:
            names = [s["name"] for s in self.state if s["kind"] in parts]
            before = {name: self.inputs[name].copy() for name in names}
            method(self, *arguments)
            for name, array in before.items():
                self.inputs[name][...] = array

        return append

    for name in ("_append", "_append_one"):
        monkeypatch.setattr(Loop, name, forgetful(getattr(Loop, name)))
