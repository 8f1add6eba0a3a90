"""Decode of ONNX artifacts that differ in the format of their caches alone, in one run.

    python -m tests.benchmarks.onnx_caches [--geometry published] [--rows 256,1024] [--weights fp32] [--rounds 15]

All come from one random checkpoint, are lowered without being verified, and are timed in turn, round by round, each in
a process of its own, so that ratios hold when the machine's speed drifts. Context: the most rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.compile import Compiler
from needle_export.config.options import CACHES, SCHEMES
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.targets.base import LoweringOptions
from needle_export.targets.onnx.target import NEWEST, OnnxTarget
from tests.benchmarks.onnx import FOLDER, round_ms, start


def main() -> None:
    """Lower one artifact a format, time them in turn, print ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=("published", "small"), default="published")
    parser.add_argument("--rows", default="256,1024", help="cache rows in use, one run for each")
    parser.add_argument("--weights", choices=SCHEMES["onnx"], default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows = [int(n) for n in options.rows.split(",")]
    FOLDER.mkdir(parents=True, exist_ok=True)
    checkpoint = FOLDER / f"{options.geometry}.safetensors"
    if not checkpoint.exists():
        write_sample(checkpoint, {"published": PUBLISHED, "small": SMALL}[options.geometry], 0)
    folders = lowered(checkpoint, max(rows), options.weights)
    for count in rows:
        steppers = {form: start("ours", folder, count, 1) for form, folder in folders.items()}
        times: dict[str, list[float]] = {form: [] for form in steppers}
        for _ in range(options.rounds):
            for form, stepper in steppers.items():
                times[form].append(round_ms(stepper))
        for stepper in steppers.values():
            stepper.communicate()
        first, *others = times
        told = [f"{first} {np.median(times[first]):.2f} ms"]
        for form in others:
            ratios = [a / b for a, b in zip(times[form], times[first], strict=True)]
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            told.append(f"{form} {middle:.2f} of that (quartiles {low:.2f}, {high:.2f})")
        print(f"{count} of {max(rows)} rows in use, {options.weights}: {'; '.join(told)}", flush=True)


def lowered(checkpoint: Path, context: int, weights: str) -> dict[str, Path]:
    """A folder for each format of caches."""
    source, rules, target = read_checkpoint(checkpoint), Rules(weights), OnnxTarget()
    folders = {}
    for form in CACHES["onnx"]:
        folder = folders[form] = FOLDER / f"caches-{checkpoint.stem}-{context}-{weights}-{form}"
        if (folder / "prefill.onnx").exists():
            continue
        folder.mkdir(exist_ok=True)
        compiler = Compiler(source, context, NullProgress())
        compiler.use_caches(form)
        compiler.fold_into_matrices = target.folds_into_matrices(rules)
        lowering = LoweringOptions(rules, context, NEWEST, compiler.max_chunk, {})
        target.compile(compiler, compiler.stored, source.geometry.head_vocab, folder, lowering)
    return folders


if __name__ == "__main__":
    main()
