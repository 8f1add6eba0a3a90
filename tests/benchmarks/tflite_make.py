"""A process that makes one of the models, so that its peak memory is its own.

    python -m tests.benchmarks.tflite_make plain CHECKPOINT FOLDER ROWS
    python -m tests.benchmarks.tflite_make ours|alone CHECKPOINT FOLDER ROWS WEIGHTS

The facts of the making are printed as JSON, on the last line.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from torch import Tensor

from needle_export import pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.layout import parameter_count
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.graph import reference as ref
from needle_export.measure.latency import peak_rss
from needle_export.model.network import Needle
from needle_export.model.state import empty_state, state_specs
from tests.benchmarks.tflite_stepper import PlainModel

CHECKED = 24
#: Largest deviation of logits and state that the plain model may have from the reference.
TOLERANCE = 1e-4
HISTORY = "token_history"


class PlainStep(torch.nn.Module):
    """The reference's one-token step with positional state, the n-grams hashed by the host."""

    def __init__(self, net: Needle, rows: int) -> None:
        super().__init__()
        self.net, self.rows = net, rows

    def forward(
        self, tokens: Tensor, position: Tensor, hashed: Tensor | None, valid: Tensor | None, **state: Tensor
    ) -> dict[str, Tensor]:
        """tokens [1], position [1], n-gram rows and their validity [1, N] -> logits, next state."""
        with patch.object(ref, "ngram_rows", lambda tokens, history, *_: (hashed, valid, history)):
            logits, following = self.net.step(tokens, position, {HISTORY: tokens, **state}, self.rows)
        return {"logits": logits, **{f"{name}_next": following[name] for name in state}}


def convert_plain(checkpoint: Path, folder: Path, rows: int) -> dict[str, Any]:
    """Convert the plain step into a folder, and check it there.

    Raises:
        SystemExit: it doesn't compute what the reference computes.
    """
    import litert_torch

    source = read_checkpoint(checkpoint)
    net = Needle(source.geometry, source.tensors, source.permutations).eval()
    specs = state_specs(source.geometry, rows)
    inputs: dict[str, Tensor] = {n: torch.zeros(1, dtype=torch.int64) for n in ("tokens", "position")}
    state = empty_state(specs)
    inputs |= ngrams(net, 5, 0, state)
    state.pop(HISTORY, None)
    start = time.perf_counter()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = litert_torch.convert(PlainStep(net, rows).eval(), sample_kwargs={**inputs, **state})
    file = folder / "decode.tflite"
    model.export(str(file))
    facts = {
        "build_s": time.perf_counter() - start,
        "build_peak_rss_bytes": peak_rss(),
        "ops": count_ops(file),
        "bytes": file.stat().st_size,
        "bytes_per_parameter": file.stat().st_size / parameter_count(source.geometry),
        "versions": {name: version(name) for name in ("litert-torch", "ai-edge-litert", "torch")},
        "caches": [s.name for s in specs if s.cache],
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    facts["max_abs_error"] = deviation(net, folder, rows)
    if not facts["max_abs_error"] < TOLERANCE:
        (folder / "facts.json").unlink()
        raise SystemExit(f"the plain model is {facts['max_abs_error']:.2e} off the reference: not worth timing")
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def ngrams(net: Needle, token: int, position: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The n-gram rows of one token and their validity, as the host hands them in."""
    engram = net.engram
    if engram is None:
        return {"hashed": torch.zeros(1, 0, dtype=torch.int64), "valid": torch.zeros(1, 0)}
    history = state[HISTORY] if engram.dilation > 1 else torch.zeros(0, dtype=torch.int64)
    hashed, valid, _ = ref.ngram_rows(
        torch.tensor([token]), history, torch.tensor([position]), engram.seeds, engram.orders, engram.slots
    )
    return {"hashed": hashed, "valid": valid}


def deviation(net: Needle, folder: Path, rows: int) -> float:
    """Largest difference to the reference's logits and state over cached steps, each side feeding its own state."""
    model = PlainModel(folder, 1)
    model.clear()
    state = empty_state(state_specs(net.geometry, rows))
    tokens = np.random.default_rng(1).integers(1, net.geometry.vocab_size, CHECKED)
    worst = 0.0
    for position, token in enumerate(tokens.tolist()):
        host = ngrams(net, token, position, state)
        with torch.no_grad():
            logits, state = net.step(torch.tensor([token]), torch.tensor([position]), state, rows)
        model.step(token, position, host["hashed"].numpy(), host["valid"].numpy())
        worst = max(worst, float(np.abs(model.logits() - logits.numpy()).max()))
    for name, value in model.state().items():
        worst = max(worst, float(np.abs(value - state[name].numpy()).max()))
    return worst


def count_ops(file: Path) -> int:
    """Operators in a model's first graph, as they are in the file."""
    interpreter = Interpreter(str(file), experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    return len(interpreter._get_ops_details())


def build_ours(checkpoint: Path, folder: Path, rows: int, weights: str, alone: bool = False) -> dict[str, Any]:
    """Our artifact in a folder, with the usual prefills or without any, and what building took."""
    start = time.perf_counter()
    options = BuildOptions(
        str(checkpoint),
        folder,
        target="tflite",
        weights=weights,
        context=rows,
        buckets=() if alone else None,
        bench=False,
    )
    report = pipeline.build(options, NullProgress())
    artifact = report.artifacts[0]
    return {
        "build_s": time.perf_counter() - start,
        "build_peak_rss_bytes": peak_rss(),
        "ops": artifact.nodes.decode,
        "bytes": artifact.size.total_bytes,
        "bytes_per_parameter": artifact.size.total_bytes / report.checkpoint.parameters,
    }


def main() -> None:
    """Make what is asked for."""
    kind, checkpoint, folder, rows, *weights = sys.argv[1:]
    if kind in ("ours", "alone"):
        facts = build_ours(Path(checkpoint), Path(folder), int(rows), *weights, alone=kind == "alone")
    else:
        facts = convert_plain(Path(checkpoint), Path(folder), int(rows))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
