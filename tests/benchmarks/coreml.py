"""Core ML packages of one random checkpoint: their sizes, what building them takes, what rounding costs.

    python -m tests.benchmarks.coreml [--geometry published] [--context 1024] [--weights fp16,int4] [--json]

Each package is built in a process of its own, with the usual prefill lengths, and verified there as every build is.
Times are the evaluator's, which runs a package op by op in torch: they say how long a verification takes, and nothing
about a device. ``equal`` and ``SQNR`` are those of the report's forced steps with every op rounded to the type that it
declares, against the reference with the same stored numbers in float32; of random weights, predictions are close to
ties.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from needle_export.checkpoint.geometry import PUBLISHED, SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import SCHEMES
from needle_export.measure.latency import host
from tests.benchmarks.onnx import FOLDER


def main() -> None:
    """Build all packages one after the other, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=("published", "small"), default="published")
    parser.add_argument("--context", type=int, default=1024, help="positions that the caches hold, at least 80")
    parser.add_argument("--weights", default=",".join(SCHEMES["coreml"]), help="with commas between")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.context < 80:
        parser.error("--context is below 80")
    FOLDER.mkdir(parents=True, exist_ok=True)
    checkpoint = FOLDER / f"{options.geometry}.safetensors"
    if not checkpoint.exists():
        write_sample(checkpoint, {"published": PUBLISHED, "small": SMALL}[options.geometry], 0)
    result = {
        "host": host(),
        "geometry": options.geometry,
        "context": options.context,
        "command": shlex.join(["python", "-m", "tests.benchmarks.coreml", *sys.argv[1:]]),
        "packages": {
            weights: make(checkpoint, options.context, weights)
            for weights in dict.fromkeys(w.strip() for w in options.weights.split(",") if w.strip())
        },
    }
    print(json.dumps(result, indent=1) if options.json else table(result))


def make(checkpoint: Path, context: int, weights: str) -> dict[str, Any]:
    """Have a process build a package and run it; its facts.

    Raises:
        SystemExit: it failed.
    """
    folder = FOLDER / f"coreml-{checkpoint.stem}-{context}-{weights}"
    asked = [str(checkpoint), str(folder), str(context), weights]
    command = [sys.executable, "-m", "tests.benchmarks.coreml_make", *asked]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"building {weights} failed:\n{process.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['geometry']} geometry, context {result['context']}, {result['host']}",
        f"command: {result['command']}",
        "",
        f"{'':9}{'bytes':>13}{'a parameter':>12}{'ops':>7}{'prefill':>8}{'built in':>10}{'peak':>9}"
        f"{'a step':>11}{'prefill_64':>12}{'equal':>8}{'SQNR':>10}{'scheme loss':>13}",
    ]
    for name, row in result["packages"].items():
        rounded, loss = row["rounded"], row["scheme_loss"]
        equal = f"{rounded['argmax_equal']}/{rounded['steps']}"
        lost = f"{loss['max_abs']:.1e}" if loss else "-"
        lines.append(
            f"{name:9}{row['bytes']:>13,}{row['bytes_per_parameter']:>12.4f}{row['ops']:>7,}{row['prefill_ops']:>8,}"
            f"{row['build_s']:>8.1f} s{row['build_peak_rss_bytes'] / 1e9:>6.2f} GB{row['evaluator_ms']:>8.0f} ms"
            f"{row['evaluator_prefill_64_ms']:>9.0f} ms{equal:>8}{rounded['sqnr_db']:>7.1f} dB{lost:>13}"
        )
    lines += ["", "peak: of building and running together; a step, prefill_64: of the evaluator, not of a device"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
