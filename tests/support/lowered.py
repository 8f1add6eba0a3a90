"""Artifacts that are lowered and not verified: the same files as a build's, in a fraction of its time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from needle_export import pipeline
from needle_export.checkpoint.geometry import Geometry
from needle_export.codebooks import Codebooks
from needle_export.compile import Compiler
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.measure.ledger import ledger_from_parts
from needle_export.measure.work import Work, decode_position
from needle_export.provenance import metadata
from needle_export.targets import find_target
from needle_export.targets.base import LoweringOptions, TellsWork

#: Length of the prompt that is told of, in tokens.
PROMPT = 64


@dataclass(frozen=True)
class Lowered:
    """What a target wrote.

    Attributes:
        geometry: of the rung.
        total: bytes of all files.
        by_role: of them, those of weights.
        overhead: the rest.
        kept: of weights, bytes of those that are floats where the scheme asks for less.
        state: bytes by part.
        work: of a decode step and of a prompt of 64 tokens, where that fits.
    """

    geometry: Geometry
    total: int
    by_role: dict[str, int]
    overhead: int
    kept: int
    state: dict[str, int]
    work: Work


def lowered(options: BuildOptions) -> Lowered:
    """Run a build up to the target's files, and tell how large they are."""
    progress = NullProgress()
    checkpoint, _, _ = pipeline.load(options, progress)
    compiler = Compiler(checkpoint, options.context, progress, options.heads)
    compiler.use_caches(options.cache_form)
    target = find_target(options.target)
    multiple = target.chunk_multiple(compiler.states, options.os)
    compiler.use_formats(Codebooks(checkpoint, options.schemes), target.folds_into_matrices(options.schemes))
    lowering = LoweringOptions(
        options.schemes, options.context, options.opset, compiler.max_chunk, metadata(checkpoint, options),
        pipeline._buckets(options, compiler, multiple) if target.fixed_shapes else (), options.heads, options.os,
    )
    geometry = checkpoint.geometry
    with TemporaryDirectory() as name:
        folder = Path(name)
        compiled = target.compile(compiler, compiler.stored, geometry.head_vocab, folder, lowering)
        total = sum((folder / f).stat().st_size for f in compiled.files)
        assert isinstance(target, TellsWork)
        prompts = (PROMPT,) if options.context >= PROMPT else ()
        work = target.work(folder, decode_position(options.context), prompts)
    parts = ((w.bytes, [(s.role, s.elements) for s in w.shares]) for w in compiled.weights if w.shares)
    kept = sum(w.bytes for w in compiled.weights if w.kept_float)
    return Lowered(geometry, total, *ledger_from_parts(parts, total), kept, compiler.state_bytes()[1], work)
