"""A process that builds one Core ML package and runs it in the evaluator, so that its peak memory is its own.

    python -m tests.benchmarks.coreml_make CHECKPOINT FOLDER CONTEXT WEIGHTS

The facts are printed as JSON, on the last line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from needle_export import pipeline
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.measure.latency import peak_rss
from needle_export.targets.coreml.target import CoremlTarget

PROMPT, STEPS = 64, 16


def build(checkpoint: Path, folder: Path, context: int, weights: str) -> dict[str, Any]:
    """Build with the usual prefill lengths; what it took, and what the report says."""
    start = time.perf_counter()
    options = BuildOptions(str(checkpoint), folder, target="coreml", weights=weights, context=context, bench=False)
    report = pipeline.build(options, NullProgress())
    (artifact,) = report.artifacts
    rounded = artifact.parity["rounded"]
    return {
        "build_s": time.perf_counter() - start,
        "build_peak_rss_bytes": peak_rss(),
        "ops": artifact.nodes.decode,
        "prefill_ops": artifact.nodes.prefill,
        "bytes": artifact.size.total_bytes,
        "bytes_per_parameter": artifact.size.total_bytes / report.checkpoint.parameters,
        "max_abs": artifact.parity["max_abs"],
        "rounded": rounded,
        "scheme_loss": artifact.parity["scheme_loss"],
    }


def run(folder: Path) -> dict[str, float]:
    """Median time of a step in the evaluator behind a prompt, and of that prompt, once all constants are there."""
    runner = CoremlTarget().open(folder)
    ids = np.random.default_rng(0).integers(1, runner.host.vocab, PROMPT + STEPS)
    times: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(2):
        runner.reset()
        begin = time.perf_counter()
        runner.feed(ids[:PROMPT])
        times["prefill"].append(time.perf_counter() - begin)
        for at in range(PROMPT, PROMPT + STEPS):
            begin = time.perf_counter()
            runner.feed(ids[at : at + 1])
            times["decode"].append(time.perf_counter() - begin)
    # The first call of each function plans it and decompresses its constants.
    return {
        "evaluator_ms": float(np.median(times["decode"][1:])) * 1e3,
        "evaluator_prefill_64_ms": times["prefill"][-1] * 1e3,
    }


def main() -> None:
    """Make what is asked for."""
    checkpoint, folder, context, weights = sys.argv[1:]
    facts = build(Path(checkpoint), Path(folder), int(context), weights)
    print(json.dumps({**facts, **run(Path(folder))}))


if __name__ == "__main__":
    main()
