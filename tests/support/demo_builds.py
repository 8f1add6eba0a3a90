"""The model that comes along, cut to two layers, built for each target with the smallest weights.

So a build takes seconds, and still answers nearly nine requests of ten rightly.
"""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path

from needle_export import demo, pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.companions import load_tools
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.generate.schemas import Tool
from needle_export.model.network import Needle
from needle_export.model.session import ReferenceSession

LAYERS, WEIGHTS = 2, "int4"

#: Room for the demo's tools, and for an answer; a request of some hundred words is too long.
CONTEXT = 512


class DemoBuilds:
    """Builds by target, made when a test first asks for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, target: str) -> Path:
        """A published folder, for all tests to read."""
        out = self.folder / target
        if not out.is_dir():
            options = BuildOptions("demo:", out, target, weights=WEIGHTS, layers=LAYERS, context=CONTEXT, bench=False)
            pipeline.build(options, NullProgress())
        return out

    def copy(self, target: str, to: Path) -> Path:
        """A copy that a test may spoil."""
        shutil.copytree(self.get(target), to)
        return to

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The demo's."""
        return load_tools(demo.files().tools)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The demo's."""
        return load_tokenizer(demo.files().tokenizer)

    @cached_property
    def reference(self) -> ReferenceSession:
        """The same rung in float32, its weights not rounded."""
        c = slice_ladder(read_checkpoint(demo.files().checkpoint), LAYERS)
        return ReferenceSession(Needle(c.geometry, c.tensors, c.permutations).eval(), CONTEXT)
