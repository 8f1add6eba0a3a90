"""Predicted latency against measured, on this machine: three schemes, two targets, three depths.

    python -m tests.benchmarks.estimates [--layers 4,8,20] [--weights fp32,int8,int4] [--rounds N] [--builds FOLDER]

Builds what isn't there yet, at published widths with random weights. Then, in every round, each target's small graphs
are timed and each of its artifacts, in turns, every one in a process of its own; the median of each counts. Prints the
table, the median error of decode and of prompts of 64 tokens, and the ranking: of all pairs of artifacts whose measured
times differ by more than 10 %, the share that the estimates put in the same order, and Kendall's tau over all pairs.
Ends with 1 if the median error of decode is above 25 % or such a pair is in the wrong order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

from needle_export import pipeline
from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.measure import latency, rates
from needle_export.measure.estimate import estimate
from needle_export.measure.work import Work
from needle_export.report.schema import REPORT_NAME
from needle_export.targets import find_target
from needle_export.targets.base import TellsWork

CONTEXT, PROMPT, STEPS = 256, 64, 48

#: The bar, and how much two times must differ for their order to count.
_MEDIAN, _APART = 0.25, 0.10

Key = tuple[str, int, str]


def built(key: Key, folder: Path) -> Path:
    """The artifact's folder, built if it isn't there."""
    target, layers, weights = key
    out = folder / f"{target}-{layers}-{weights}"
    if not (out / REPORT_NAME).is_file():
        print(f"building {out.name}", flush=True)
        checkpoint = folder / "published.safetensors"
        if not checkpoint.is_file():
            write_sample(checkpoint, PUBLISHED, 0)
        options = BuildOptions(str(checkpoint), out, target=target, layers=layers, weights=weights, context=CONTEXT,
                               bench=False)  # fmt: skip
        pipeline.build(options, NullProgress())
    return out


def measured(key: Key, folder: Path) -> tuple[float, float, int]:
    """Milliseconds of a decode step and of a prompt, and tokens before the first step."""
    found = latency.measure(key[0], folder, PUBLISHED.vocab_size, threads=1, steps=STEPS, prompts=(PROMPT,))
    return found["decode"]["ms_p50"], found["prefill"][0]["ms_p50"], found["decode"]["position"]


def ranking(pairs: list[tuple[float, float]]) -> tuple[int, int, float]:
    """Of pairs (measured, predicted): those far apart, those of them in the right order, and Kendall's tau."""
    apart = right = agreeing = every = 0
    for (a, p), (b, q) in itertools.combinations(pairs, 2):
        same = (a - b) * (p - q) > 0
        every += 1
        agreeing += 1 if same else -1
        if abs(a - b) > _APART * min(a, b):
            apart += 1
            right += same
    return apart, right, agreeing / max(every, 1)


def main() -> None:
    """Build, measure in turns, print, judge."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--layers", default="4,8,20")
    arguments.add_argument("--weights", default="fp32,int8,int4")
    arguments.add_argument("--target", default="onnx,tflite")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--builds", type=Path, default=Path("build/bench/estimates"))
    given = arguments.parse_args()
    given.builds.mkdir(parents=True, exist_ok=True)
    targets, depths, schemes = given.target.split(","), map(int, given.layers.split(",")), given.weights.split(",")
    keys: list[Key] = list(itertools.product(targets, depths, schemes))
    folders = {key: built(key, given.builds) for key in keys}
    cache = rates.last_cache() or rates.USUAL_CACHE
    runs: dict[str, list[dict[str, rates.Timed]]] = {target: [] for target in targets}
    times: dict[Key, list[tuple[float, float, int]]] = {key: [] for key in keys}
    for number in range(given.rounds):
        for target in targets:
            runs[target] += rates.measure(target, cache, repeats=1, progress=NullProgress())
            for key in (k for k in keys if k[0] == target):
                times[key].append(measured(key, folders[key]))
        print(f"round {number + 1} of {given.rounds} is done", flush=True)
    found = {target: rates.solve(rates.merged(runs[target]), cache) for target in targets}
    print("| artifact | decode, ms | estimated | off | prompt of 64, ms | estimated | off |")
    decode, prompts = [], []
    for key in keys:
        step, prompt = (statistics.median(t[i] for t in times[key]) for i in (0, 1))
        made = estimate(_work(key, folders[key], times[key][0][2]), found[key[0]])
        decode.append((step, made.decode_ms))
        prompts.append((prompt, made.prompts[0].parts.total * 1e3))
        cells = [f"{m:.2f} | {e:.2f} | {e / m - 1:+.0%}" for m, e in (decode[-1], prompts[-1])]
        print(f"| {key[0]} {key[2]}, {key[1]} layers | {' | '.join(cells)} |")
    for target in targets:
        print(f"rates of {target}: {found[target]}")
    ok = True
    for name, pairs in (("decode", decode), ("prompts", prompts)):
        off = statistics.median(abs(e / m - 1) for m, e in pairs)
        apart, right, tau = ranking(pairs)
        print(f"{name}: median error {off:.1%}; {right} of {apart} pairs more than {_APART:.0%} apart in the right"
              f" order; Kendall's tau {tau:.2f}")
        ok = ok and (name != "decode" or (off <= _MEDIAN and right == apart))
    sys.exit(0 if ok else 1)


def _work(key: Key, folder: Path, position: int) -> Work:
    target = find_target(key[0])
    assert isinstance(target, TellsWork)
    return target.work(folder, position, (PROMPT,))


if __name__ == "__main__":
    main()
