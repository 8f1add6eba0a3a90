"""Our ONNX artifact against the plain export of the same cached step, in one run.

    python -m tests.benchmarks.onnx [--geometry published] [--rows 256] [--context 256] [--opset 24]
                                    [--weights fp32] [--threads 1] [--json]

Both models come from one random checkpoint and are timed in turn, round by round, each in a process of its own,
so that their ratio holds when the machine's speed drifts. The plain model is ``torch.onnx.export`` of the
reference's one-token step; its state is bound to preallocated buffers too, inputs and outputs apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from needle_export import pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import SCHEMES, BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.measure.latency import host
from needle_export.model.network import Needle
from needle_export.model.state import empty_state, state_specs

ROUNDS, STEPS = 9, 20
FOLDER = Path("build/bench")


def main() -> None:
    """Build both, time them in turn, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=("published", "small"), default="published")
    parser.add_argument("--rows", type=int, default=256, help="cache rows in use")
    parser.add_argument("--context", type=int, help="rows that the caches have; as many as are in use if left out")
    parser.add_argument("--opset", type=int, choices=(21, 23, 24), default=24, help="of our artifact")
    parser.add_argument("--weights", choices=SCHEMES["onnx"], default="fp32", help="of our artifact")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = options.context or options.rows
    if context < options.rows:
        parser.error("--context is below --rows")
    geometry = {"published": PUBLISHED, "small": SMALL}[options.geometry]
    FOLDER.mkdir(parents=True, exist_ok=True)
    checkpoint = FOLDER / f"{options.geometry}.safetensors"
    if not checkpoint.exists():
        write_sample(checkpoint, geometry, 0)
    ours, build = build_ours(checkpoint, context, options.opset, options.weights)
    plain, export = export_plain(checkpoint, context)
    steppers = {
        name: start(name, folder, options.rows, options.threads) for name, folder in (("ours", ours), ("plain", plain))
    }
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(ROUNDS):
        for name, stepper in steppers.items():
            times[name].append(round_ms(stepper))
    for stepper in steppers.values():
        stepper.communicate()
    ratios = [a / b for a, b in zip(times["ours"], times["plain"], strict=True)]
    result = {
        "host": host(),
        "threads": options.threads,
        "geometry": options.geometry,
        "rows": options.rows,
        "context": context,
        "command": f"python -m tests.benchmarks.onnx {' '.join(sys.argv[1:])}".strip(),
        "ours": {"decode_ms": float(np.median(times["ours"])), **build},
        "plain": {"decode_ms": float(np.median(times["plain"])), **export},
        "ratio": {"median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios)},
    }
    print(json.dumps(result, indent=1) if options.json else table(result))


def start(name: str, folder: Path, rows: int, threads: int) -> subprocess.Popen[str]:
    """A process that holds one of the models."""
    command = [sys.executable, "-m", "tests.benchmarks.stepper", name, str(folder), str(rows), str(threads), str(STEPS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def round_ms(stepper: subprocess.Popen[str]) -> float:
    """Have a process time one round; median in milliseconds."""
    assert stepper.stdin is not None and stepper.stdout is not None
    stepper.stdin.write("\n")
    stepper.stdin.flush()
    return float(stepper.stdout.readline())


def build_ours(checkpoint: Path, rows: int, opset: int, weights: str) -> tuple[Path, dict[str, Any]]:
    """Our artifact in a folder, and what building took."""
    out = FOLDER / f"ours-{checkpoint.stem}-{rows}-{opset}-{weights}"
    start = time.perf_counter()
    report = pipeline.build(
        BuildOptions(str(checkpoint), out, context=rows, opset=opset, weights=weights, bench=False), NullProgress()
    )
    artifact = report.artifacts[0]
    return out, {
        "build_s": time.perf_counter() - start,
        "build_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "nodes": artifact.nodes.decode,
        "bytes": artifact.size.total_bytes,
        "bytes_per_parameter": artifact.size.total_bytes / report.checkpoint.parameters,
    }


class PlainStep(torch.nn.Module):
    """The reference's one-token step with positional state."""

    def __init__(self, net: Needle, rows: int) -> None:
        super().__init__()
        self.net, self.rows = net, rows
        self.names = tuple(s.name for s in state_specs(net.geometry, rows))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, state: list[torch.Tensor]) -> list[torch.Tensor]:
        """tokens [1], position [1] -> logits, next state."""
        logits, following = self.net.step(tokens, position, dict(zip(self.names, state, strict=True)), self.rows)
        return [logits, *following.values()]


def export_plain(checkpoint: Path, rows: int) -> tuple[Path, dict[str, Any]]:
    """The plain export in a folder (made once), and what it took."""
    folder = FOLDER / f"plain-{checkpoint.stem}-{rows}"
    facts = folder / "facts.json"
    if not facts.exists():
        folder.mkdir(exist_ok=True)
        source = read_checkpoint(checkpoint)
        step = PlainStep(Needle(source.geometry, source.tensors, source.permutations).eval(), rows)
        state = empty_state(state_specs(source.geometry, rows))
        start = time.perf_counter()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                step,
                (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), list(state.values())),
                dynamo=True,
                input_names=["tokens", "position", *state],
                output_names=["logits", *(f"{n}_next" for n in state)],
                verbose=False,
            )
        assert program is not None
        program.save(str(folder / "decode.onnx"), external_data=True)
        size = sum(f.stat().st_size for f in folder.iterdir())
        facts.write_text(
            json.dumps(
                {
                    "build_s": time.perf_counter() - start,
                    "nodes": len(program.model.graph),
                    "bytes": size,
                }
            )
        )
    return folder, json.loads(facts.read_text())


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['geometry']} geometry, {result['rows']} of {result['context']} cache rows in use,"
        f" {result['threads']} thread(s),"
        f" {result['host']}",
        f"command: {result['command']}",
        "",
        f"{'':8}{'decode':>12}{'nodes':>8}{'bytes':>14}{'built in':>10}",
    ]
    for name in ("ours", "plain"):
        row = result[name]
        lines.append(
            f"{name:8}{row['decode_ms']:>9.2f} ms{row['nodes']:>8,}{row['bytes']:>14,}{row['build_s']:>8.1f} s"
        )
    ratio = result["ratio"]
    lines += [
        "",
        f"decode, ours / plain: {ratio['median']:.3f} (rounds from {ratio['min']:.3f} to {ratio['max']:.3f})",
        f"bytes a parameter: {result['ours']['bytes_per_parameter']:.4f};"
        f" peak memory of this process while building: {result['ours']['build_peak_rss_bytes'] / 1e9:.2f} GB",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
