"""Traced programs and compiled artifacts of sample weights, for several tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from needle_export.checkpoint.checkpoint import Checkpoint, read_checkpoint, standard_permutations
from needle_export.checkpoint.geometry import Geometry
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.graph.program import Program
from needle_export.graph.trace import trace
from needle_export.model.network import Needle
from needle_export.model.state import empty_state, state_specs
from needle_export.model.step import Step, parameter_sources
from needle_export.targets.base import Compiled, LoweringOptions
from needle_export.targets.onnx.target import OnnxTarget
from needle_export.targets.tflite.target import TfliteTarget


def needle(geometry: Geometry, seed: int = 0) -> Needle:
    """The reference model with lively random weights."""
    permutations = standard_permutations(geometry.hada_n, geometry.split_permutations)
    return Needle(geometry, make_sample(geometry, seed), permutations).eval()


def traced(net: Needle, context: int, rows: int | None) -> Program:
    """The cached step, traced and not yet rewritten."""
    step = Step(net, context)
    state = empty_state(state_specs(net.geometry, context))
    return trace(step, state, parameter_sources(step), rows, 16)


def step_inputs(net: Needle, context: int, rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs of a step somewhere in a sequence, in contract order."""
    generator = torch.Generator().manual_seed(seed)
    values: list[torch.Tensor] = [
        torch.randint(1, net.geometry.vocab_size, (rows,), generator=generator),
        torch.tensor([3]),
    ]
    for spec in state_specs(net.geometry, context):
        if spec.dtype == "int64":
            values.append(torch.randint(1, net.geometry.vocab_size, spec.shape, generator=generator))
        else:
            values.append(torch.randn(spec.shape, generator=generator))
    return values


def sample_checkpoint(folder: Path, geometry: Geometry, seed: int = 0) -> Checkpoint:
    """A sample written to a file and read back."""
    path = folder / f"sample-{seed}.safetensors"
    write_sample(path, geometry, seed)
    return read_checkpoint(path)


def compile_onnx(
    checkpoint: Checkpoint, folder: Path, context: int, *, opset: int = 24, weights: str = "fp32", cache: str = "fp32"
) -> tuple[Compiler, Compiled]:
    """Lower a checkpoint into a folder, without verifying."""
    compiler = Compiler(checkpoint, context, NullProgress())
    compiler.use_caches(cache)
    target = OnnxTarget()
    compiler.fold_into_matrices = target.folds_into_matrices(Rules(weights))
    options = LoweringOptions(Rules(weights), context, opset, compiler.max_chunk, {})
    compiled = target.compile(
        compiler, compiler.stored, checkpoint.geometry.head_vocab, folder, options
    )
    return compiler, compiled


def compile_tflite(
    checkpoint: Checkpoint, folder: Path, context: int, buckets: tuple[int, ...], *, weights: str = "fp32"
) -> tuple[Compiler, Compiled]:
    """As :func:`compile_onnx`, with a prefill of each length."""
    compiler = Compiler(checkpoint, context, NullProgress())
    target = TfliteTarget()
    compiler.fold_into_matrices = target.folds_into_matrices(Rules(weights))
    options = LoweringOptions(Rules(weights), context, None, compiler.max_chunk, {}, buckets)
    compiled = target.compile(compiler, compiler.states, checkpoint.geometry.head_vocab, folder, options)
    return compiler, compiled


def tokens(geometry: Geometry, count: int, seed: int = 0) -> np.ndarray:
    """Seeded token ids without padding, [count] int64."""
    return np.random.default_rng(seed).integers(1, geometry.vocab_size, count, dtype=np.int64)
