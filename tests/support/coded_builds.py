"""Artifacts of one small model with matrices in codebook form, for both targets that have it; nothing is run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from needle_export.checkpoint.checkpoint import Checkpoint, read_checkpoint
from needle_export.checkpoint.geometry import SMALL, Geometry
from needle_export.checkpoint.sample import make_sample
from needle_export.codebooks import Codebooks
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.measure.weights import Compared, compare
from needle_export.targets import find_target
from needle_export.targets.base import Compiled, LoweringOptions
from tests.support.containers import container_bytes

CONTEXT, BUCKETS = 24, (8,)

Made = tuple[Path, Mapping[tuple[str, int], Any], Compiled]


def write_container(path: Path, geometry: Geometry = SMALL, seed: int = 2, **layout: Any) -> Checkpoint:
    """A container of a sample, read back."""
    path.write_bytes(container_bytes(geometry, make_sample(geometry, seed), **{"group": 8, **layout}))
    return read_checkpoint(path)


def compiled(checkpoint: Checkpoint, out: Path, name: str, rules: Rules) -> Made:
    """An artifact, the matrices that it must hold, and what it stored."""
    target: Any = find_target(name)
    compiler = Compiler(checkpoint, CONTEXT, NullProgress())
    compiler.use_formats(Codebooks(checkpoint, rules), target.folds_into_matrices(rules))
    out.mkdir(parents=True)
    system = "ios18" if name == "coreml" else None
    opset = 24 if name == "onnx" else None
    buckets = BUCKETS if target.fixed_shapes else ()
    lowering = LoweringOptions(rules, CONTEXT, opset, compiler.max_chunk, {}, buckets, (), system)
    made = target.compile(compiler, compiler.states, checkpoint.geometry.head_vocab, out, lowering)
    compiler.use_stored_weights(made.weights, target.activations(rules), target.half(rules))
    return out, compiler.matrices(), made


class Coded:
    """Of one container, an artifact for each target and scheme when a test first asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoint = folder, write_container(folder / "small.cact")
        self._made: dict[tuple[str, str], Made] = {}

    def get(self, target: str, weights: str = "codebook") -> Made:
        """See :func:`compiled`."""
        if (target, weights) not in self._made:
            out = self.folder / target / weights
            self._made[target, weights] = compiled(self.checkpoint, out, target, Rules(weights))
        return self._made[target, weights]

    def compared(self, target: str, weights: str = "codebook", spoiled: Path | None = None) -> Compared:
        """What a comparison finds."""
        folder, reference, _ = self.get(target, weights)
        return compare(find_target(target).read_matrices(spoiled or folder), reference)

    def fault(self, target: str, copy: Path, how: Callable[[Path], Any]) -> str:
        """What it finds in a copy that was spoiled."""
        shutil.copytree(self.get(target)[0], copy)
        how(copy)
        return str(self.compared(target, spoiled=copy).fault())


def unpacked(checkpoint: Checkpoint, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Levels before the rotation [O, I] and norms [O, G] as the container has them."""
    packed = checkpoint.packed[name]
    return packed.codebook[packed.indices()], packed.norms.astype(np.float32)
