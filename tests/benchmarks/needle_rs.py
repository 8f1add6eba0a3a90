"""Our artifacts against needle-rs on the 4-bit container of the same weights, in one run.

    python -m tests.benchmarks.needle_rs [--target onnx,tflite] [--weights int4] [--rows 256] [--built] [--json]

The container is written by the package's own exporter, from the same random checkpoint that our artifacts are built
from. needle-rs reads it and runs on one thread; so do ours. All are timed in turn, round by round, each in a process of
its own that is started several times, each first in turn: physical pages move a process by a tenth for as long as it
lives. A token of needle-rs is what a longer answer takes above a shorter one to the same prompt, of about as many
tokens as our caches have rows in use. Its weights are not ours: codebooks and rotated groups there, symmetric integers
here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.measure.latency import host
from needle_export.report.schema import load_report
from tests.benchmarks.onnx import FOLDER, STEPS, build_ours, round_ms
from tests.benchmarks.tflite import build_ours as build_tflite

STARTS, ROUNDS = 5, 5
#: Of an answer of needle-rs above a shorter one. Reading the prompt takes as long as a hundred and varies by some.
RS_STEPS = 100
RS = "needle-rs"


def main() -> None:
    """Make everything, time it in turn, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="onnx", help="of our artifacts, with commas between: onnx, tflite")
    parser.add_argument("--weights", default="int4", help="of our artifacts, with commas between")
    parser.add_argument("--rows", type=int, default=256, help="cache rows, all in use")
    parser.add_argument("--built", action="store_true", help="time what an earlier run has built, as it is")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    checkpoint, container = FOLDER / "published.safetensors", FOLDER / "published-4.cact"
    if not checkpoint.exists():
        write_sample(checkpoint, PUBLISHED, 0)
    if not container.exists():
        write_container(container)
    made: dict[str, tuple[Path, int]] = {RS: (container, container.stat().st_size)}
    for target in options.target.split(","):
        for weights in options.weights.split(","):
            made[f"{target} {weights}"] = build(target, weights, checkpoint, options.rows, options.built)
    os.sync()
    names = list(made)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(STARTS):
        first = turn % len(names)
        steppers = {n: start(n, made[n][0], options.rows) for n in names[first:] + names[:first]}
        for _ in range(ROUNDS):
            for name, stepper in steppers.items():
                times[name].append(round_ms(stepper))
        for stepper in steppers.values():
            stepper.communicate()
    result = {
        "host": host(),
        "threads": 1,
        "rows": options.rows,
        "command": f"python -m tests.benchmarks.needle_rs {' '.join(sys.argv[1:])}".strip(),
        "models": {
            name: {
                "decode_ms": float(np.median(times[name])),
                "times_its_speed": ratio(times[RS], times[name]),
                "bytes": made[name][1],
            }
            for name in names
        },
    }
    print(json.dumps(result, indent=1) if options.json else table(result))


def write_container(path: Path) -> None:
    """The checkpoint at 4 bits with a throw-away tokenizer, by the package's own writer."""
    from needle.model.export import write_export

    from tests.support import oracle
    from tests.support.tokenizers import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(Path(folder))
        tree, config = oracle.to_tree(make_sample(PUBLISHED, 0)), oracle.oracle_config(PUBLISHED)
        write_export(tree, config, path, tokenizer=tokenizer, kv_window=PUBLISHED.kv_window)


def build(target: str, weights: str, checkpoint: Path, rows: int, built: bool) -> tuple[Path, int]:
    """Our artifact in a folder, and its bytes.

    Args:
        built: leave one that is there as it is.
    """
    onnx, stem = target == "onnx", f"{checkpoint.stem}-{rows}"
    folder = FOLDER / (f"ours-{stem}-24-{weights}" if onnx else f"tflite-ours-{stem}-{weights}")
    if not (built and (folder / "report.json").is_file()):
        made = build_ours(checkpoint, rows, 24, weights) if onnx else build_tflite(checkpoint, rows, weights)
        folder = made[0]
    return folder, load_report(folder).artifacts[0].size.total_bytes


def start(name: str, path: Path, rows: int) -> subprocess.Popen[str]:
    """A process that holds one of the models."""
    module = ["tests.benchmarks.stepper", "ours", str(path), str(rows), "1", str(STEPS)]
    if name.startswith("tflite"):
        vocab = str(PUBLISHED.vocab_size)
        module = ["tests.benchmarks.tflite_stepper", "ours", str(path), str(rows), "1", str(STEPS), vocab]
    if name == RS:
        module = ["tests.benchmarks.needle_rs_stepper", str(path), str(rows), str(RS_STEPS)]
    return subprocess.Popen([sys.executable, "-m", *module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ratio(others: list[float], times: list[float]) -> dict[str, float]:
    """Of two models' rounds, pair by pair."""
    ratios = [a / b for a, b in zip(others, times, strict=True)]
    return {"median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios)}


def prompt_of(words: int) -> str:
    """A query of so many words, the same every time."""
    rng = random.Random(0)
    return " ".join(rng.choice(("turn", "on", "the", "lights", "and", "call", "mum", "seven")) for _ in range(words))


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"published geometry, {result['rows']} cache rows, 1 thread, {result['host']}",
        f"command: {result['command']}",
        "",
        f"{'':14}{'decode':>12}{'tokens/s':>10}{'x needle-rs':>13}{'rounds':>18}{'bytes':>14}",
    ]
    for name, row in result["models"].items():
        times = row["times_its_speed"]
        lines.append(
            f"{name:14}{row['decode_ms']:>9.2f} ms{1e3 / row['decode_ms']:>10,.0f}{times['median']:>13.2f}"
            f"{times['min']:>10.2f} to {times['max']:.2f}{row['bytes']:>14,}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
