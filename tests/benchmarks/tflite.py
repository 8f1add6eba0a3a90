"""Our TFLite artifact against the plain conversion of the same cached step, in one run.

    python -m tests.benchmarks.tflite [--geometry published] [--rows 256] [--weights fp32,int8] [--threads 1]
                                      [--starts 15] [--alone] [--json]

All models come from one random checkpoint and are timed in turn, round by round, each in a process of its own that is
started several times, so that their ratios hold when the machine's speed drifts. Each is made in a process of its own
too; the plain model once, ours every time. ``--weights ''`` leaves ours out.

The plain file has one signature. A file of ours has the usual prefills too, of which the runtime holds packed matrices
of their own; ``--alone`` also times decode steps of ours in files without prefills, as the plain one is.

The plain model is ``litert_torch.convert``, with its defaults, of the reference's one-token step: all state in, logits
and next state out. One thing had to be replaced, since it doesn't convert: the n-gram hash. Its ``>>`` has no lowering,
and its 64-bit XOR fails to legalize, with ``enable_x64`` too. The host hashes instead and hands in the table rows and
their validity, so the token history isn't part of the plain state. Here that costs the plain model nothing: the rows
are set once. Integer inputs become 32-bit, as litert_torch has it. The rest is the reference as it is, ``index_copy``
and ``logsumexp`` included.

Before it is timed the plain model must give the reference's logits and state over cached steps, to 1e-4. Its state is
written back in the interpreter's own memory, of the caches just the row that changed: about 0.1 ms a step.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from needle_export.checkpoint.geometry import PUBLISHED, SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.measure.latency import host
from tests.benchmarks.onnx import FOLDER, ROUNDS, STEPS
from tests.benchmarks.tflite_stepper import PROMPT, SPARE

PLAIN, ALONE = "plain", " alone"
#: Times that every model's process is started anew, unless others are asked for. Which physical pages a process gets
#: moves its own steps by up to a tenth for as long as it lives, so rounds of one process alone say less than they seem
#: to: medians over five starts still lay a tenth apart, over fifteen a twentieth.
STARTS = 15


def main() -> None:
    """Make all models, time them in turn, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=("published", "small"), default="published")
    parser.add_argument("--rows", type=int, default=256, help="cache rows, all in use")
    parser.add_argument("--weights", default="fp32", help="of our artifacts, with commas between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--starts", type=int, default=STARTS, help="of every model's process")
    parser.add_argument("--alone", action="store_true", help="also ours without prefills")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rows < max(PROMPT, STEPS + SPARE + 1):
        parser.error(f"--rows is below {max(PROMPT, STEPS + SPARE + 1)}")
    geometry = {"published": PUBLISHED, "small": SMALL}[options.geometry]
    FOLDER.mkdir(parents=True, exist_ok=True)
    checkpoint = FOLDER / f"{options.geometry}.safetensors"
    if not checkpoint.exists():
        write_sample(checkpoint, geometry, 0)
    made = {PLAIN: convert_plain(checkpoint, options.rows)}
    for weights in dict.fromkeys(w.strip() for w in options.weights.split(",") if w.strip()):
        made[weights] = build_ours(checkpoint, options.rows, weights)
        if options.alone:
            made[f"{weights}{ALONE}"] = build_ours(checkpoint, options.rows, weights, "alone")
    os.sync()  # or the disk takes what the builds wrote while the first rounds are timed
    times: dict[str, list[float]] = {name: [] for name in made}
    prompts: dict[str, list[float]] = {name: [] for name in made if name != PLAIN and not name.endswith(ALONE)}
    names = list(made)
    for turn in range(options.starts):
        # Each in turn is the first, as the first to come gets other pages than the last.
        first = turn % len(names)
        steppers = {
            name: start(name, made[name][0], options.rows, options.threads, geometry.vocab_size)
            for name in names[first:] + names[:first]
        }
        for _ in range(ROUNDS):
            for name, stepper in steppers.items():
                times[name].append(ask(stepper, "decode"))
        for name, runs in prompts.items():
            runs.append(ask(steppers[name], "prefill"))
        for stepper in steppers.values():
            stepper.communicate()
    result = {
        "host": host(),
        "threads": options.threads,
        "geometry": options.geometry,
        "rows": options.rows,
        "command": shlex.join(["python", "-m", "tests.benchmarks.tflite", *sys.argv[1:]]),
        "models": {
            name: {
                "decode_ms": float(np.median(times[name])),
                "to_plain": ratio(times[name], times[PLAIN]),
                "to_fp32": ratio(times[name], like_fp32) if (like_fp32 := times.get(fp32_like(name))) else None,
                "prefill_64_tokens_per_s": PROMPT / float(np.median(prompts[name])) * 1e3 if name in prompts else None,
                **{key: value for key, value in facts.items() if key != "caches"},
            }
            for name, (_, facts) in made.items()
        },
    }
    print(json.dumps(result, indent=1) if options.json else table(result))


def convert_plain(checkpoint: Path, rows: int) -> tuple[Path, dict[str, Any]]:
    """The plain conversion in a folder, and what it took; made once for each version of the converter."""
    folder = FOLDER / f"tflite-plain-{checkpoint.stem}-{rows}"
    path = folder / "facts.json"
    if path.exists():
        facts: dict[str, Any] = json.loads(path.read_text())
        if "max_abs_error" in facts and all(version(name) == value for name, value in facts["versions"].items()):
            return folder, facts
    folder.mkdir(exist_ok=True)
    return folder, make(PLAIN, checkpoint, folder, rows)


def fp32_like(name: str) -> str:
    """The float32 model with the same signatures as one of ours."""
    return "" if name == PLAIN else "fp32" + ALONE * name.endswith(ALONE)


def build_ours(checkpoint: Path, rows: int, weights: str, kind: str = "ours") -> tuple[Path, dict[str, Any]]:
    """Our artifact in a folder, with prefills or ``alone``, and what building took."""
    folder = FOLDER / f"tflite-{kind}-{checkpoint.stem}-{rows}-{weights}"
    return folder, make(kind, checkpoint, folder, rows, weights)


def make(kind: str, checkpoint: Path, folder: Path, rows: int, *more: str) -> dict[str, Any]:
    """Have a process make a model; its facts.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "tests.benchmarks.tflite_make", kind, str(checkpoint), str(folder), str(rows)]
    process = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"making {' '.join((kind, *more))} failed:\n{process.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return facts


def start(name: str, folder: Path, rows: int, threads: int, vocab: int) -> subprocess.Popen[str]:
    """A process that holds one of the models."""
    kind = PLAIN if name == PLAIN else "ours"
    numbers = map(str, (rows, threads, STEPS, vocab))
    command = [sys.executable, "-m", "tests.benchmarks.tflite_stepper", kind, str(folder), *numbers]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(stepper: subprocess.Popen[str], what: str) -> float:
    """Have a process time one round; median in milliseconds.

    Raises:
        SystemExit: the process is gone.
    """
    assert stepper.stdin is not None and stepper.stdout is not None
    stepper.stdin.write(f"{what}\n")
    stepper.stdin.flush()
    answer = stepper.stdout.readline()
    if not answer:
        raise SystemExit(f"a model's process ended with {stepper.wait()}: its words are above")
    return float(answer)


def ratio(times: list[float], others: list[float]) -> dict[str, float]:
    """Of two models' rounds, pair by pair."""
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    return {"median": float(np.median(ratios)), "min": min(ratios), "max": max(ratios)}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['geometry']} geometry, {result['rows']} cache rows, {result['threads']} thread(s), {result['host']}",
        f"command: {result['command']}",
        "",
        f"{'':12}{'decode':>12}{'/ plain':>9}{'/ fp32':>9}{'ops':>8}{'bytes':>14}{'a parameter':>13}"
        f"{f'prefill {PROMPT}':>14}{'built in':>10}{'peak':>10}",
    ]
    for name, row in result["models"].items():
        rate = f"{row['prefill_64_tokens_per_s']:,.0f} tok/s" if row["prefill_64_tokens_per_s"] else "-"
        fp32 = f"{row['to_fp32']['median']:.3f}" if row["to_fp32"] else "-"
        lines.append(
            f"{name:12}{row['decode_ms']:>9.2f} ms{row['to_plain']['median']:>9.3f}"
            f"{fp32:>9}{row['ops']:>8,}{row['bytes']:>14,}"
            f"{row['bytes_per_parameter']:>13.4f}{rate:>14}"
            f"{row['build_s']:>8.1f} s{row['build_peak_rss_bytes'] / 1e9:>7.2f} GB"
        )
    lines.append("")
    for name, row in result["models"].items():
        if name != PLAIN:
            spread = row["to_plain"]
            lines.append(f"{name} / plain in the rounds: {spread['min']:.3f} to {spread['max']:.3f}")
    lines.append(f"plain against the reference: {result['models'][PLAIN]['max_abs_error']:.1e} at most")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
