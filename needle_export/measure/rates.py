"""This machine's rates in a runtime, from the times of small graphs; each run is a process of its own.

Every graph's work is known op by op, as an artifact's is (:mod:`.work`), and the rates are those with which
:mod:`.estimate` gives its time: one model, used both ways.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.config.progress import Progress
from needle_export.config.rates import Rates
from needle_export.errors import Unsupported
from needle_export.measure.estimate import estimate, kept_share
from needle_export.measure.latency import ask
from needle_export.measure.work import OpWork, Phase, Work

#: Types of matrices that are timed, and the bytes that one of 768 x 768 takes, about.
DTYPES = {"fp32": 2_359_296, "int8": 607_000, "int4": 313_000}

#: Of the last cache where the system doesn't tell its size.
USUAL_CACHE = 8 << 20

#: Sizes of a chain of matrices in caches: one that surely stays, one that surely doesn't.
_STAYS, _STREAMS = 0.4, 4.0

#: Rows of what stands for a prompt, and matrices and blocks of a graph there.
_ROWS, _MATRICES, _MANY = 64, 8, 4

#: Blocks of a graph in caches, by the bytes of their matrices; the first stay.
_SERIES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.2, 1.8)

#: Rounds in which rates that depend on each other settle; each changes them by less than a tenth of the last.
_ROUNDS = 6


@dataclass(frozen=True)
class Timed:
    """A graph that was timed: seconds of one call, and what it does."""

    seconds: float
    phase: Phase


def last_cache() -> int | None:
    """Bytes of the processor's last cache, or None where the system doesn't tell."""
    sizes = []
    for level in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = level.read_text(encoding="ascii", errors="replace").strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:])
        if unit is not None and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=None)


def kernels(cache: int) -> dict[str, dict[str, Any]]:
    """The graphs to time, by name, as ``targets.kernels.Kernel`` takes them.

    Args:
        cache: bytes of the last cache.
    """

    def chain(dtype: str, share: float) -> dict[str, Any]:
        return {"kind": "products", "dtype": dtype, "count": max(4, round(share * cache / DTYPES[dtype])), "rows": 1}

    found: dict[str, dict[str, Any]] = {
        "call": {"kind": "small"},
        "blocks of rows": {"kind": "blocks", "dtype": "int8", "count": _MANY, "rows": _ROWS},
    }
    for dtype in DTYPES:
        found[f"cached {dtype}"] = chain(dtype, _STAYS)
        found[f"streamed {dtype}"] = chain(dtype, _STREAMS)
        found[f"rows {dtype}"] = {"kind": "products", "dtype": dtype, "count": _MATRICES, "rows": _ROWS}
    for dtype in ("int8", "int4"):
        for share in _SERIES:
            count = max(2, round(share * cache / (3 * DTYPES[dtype])))
            found[f"blocks {dtype} {share}"] = {"kind": "blocks", "dtype": dtype, "count": count}
    return found


def measure(target: str, cache: int, *, repeats: int, progress: Progress) -> list[dict[str, Timed]]:
    """Times of every graph in a target's runtime, by name; of each of several processes.

    Raises:
        BadInput: a process failed; its last words are in the message.
    """
    wanted, runs = kernels(cache), []
    with progress.stage(f"measure the rates of {target}", repeats) as task:
        for _ in range(repeats):
            request = {"what": "kernels", "target": target, "folder": target, "kernels": wanted}
            answer = ask(request)
            runs.append({name: Timed(a["seconds"], read_phase(a["phase"])) for name, a in answer.items()})
            task.advance()
    return runs


def read_phase(raw: Mapping[str, Any]) -> Phase:
    """A phase from its JSON form."""
    return Phase(raw["name"], raw["tokens"], raw["rows"], tuple(OpWork(**op) for op in raw["ops"]))


def merged(runs: Sequence[Mapping[str, Timed]]) -> dict[str, Timed]:
    """The median of several runs, by name: what the cache keeps is luck, and the luckiest run of each is none that a
    whole model has.
    """
    return {
        name: Timed(statistics.median(run[name].seconds for run in runs), timed.phase)
        for name, timed in runs[0].items()
    }


def solve(timed: Mapping[str, Timed], cache: int) -> Rates:
    """The rates with which the model gives the times.

    Args:
        timed: by the names of :func:`kernels`.
        cache: what the system says of the last cache, in bytes; the share of it that counts is found here.

    Raises:
        Unsupported: no rates do, as on a machine that was busy with other things meanwhile.
    """
    found: tuple[float, Rates] | None = None
    for size in (cache * step / 16 for step in range(4, 21)):
        for own in (0.0, 500.0, 1000.0, 2000.0, 4000.0):
            tried = _with(timed, size, own)
            if tried is not None and (found is None or _error(timed, tried) < found[0]):
                found = _error(timed, tried), tried
    if found is None:
        raise Unsupported(
            "the runs contradict each other, as they do on a busy machine", fix="calibrate again when nothing else runs"
        )
    return found[1]


def _with(timed: Mapping[str, Timed], cache: float, own: float) -> Rates | None:
    """The rates if the cache keeps so many bytes, and an op has so many of its own; None where there are none."""
    rates = Rates(1e10, dict.fromkeys(DTYPES, 1e12), 0.0, own=own, cache=cache, values=1e12)
    for _ in range(_ROUNDS):
        for part in (_matrices, _ops):
            found = part(timed, rates)
            if found is None:
                return None
            rates = replace(rates, **found)
    return rates


def _series(timed: Mapping[str, Timed]) -> list[Timed]:
    return [one for name, one in timed.items() if name.startswith("blocks int")]


def _error(timed: Mapping[str, Timed], rates: Rates) -> float:
    """How far the model is from the times of blocks: the sum of the squares of the logarithms of the ratios."""
    return sum(math.log(_time(one.phase, rates) / one.seconds) ** 2 for one in _series(timed))


def _time(phase: Phase, rates: Rates) -> float:
    return estimate(Work("", 0, phase, ()), rates).decode.total


def _matrices(timed: Mapping[str, Timed], rates: Rates) -> dict[str, Any] | None:
    """What the chains of matrices tell: bandwidth from cache and memory, and multiply-adds."""
    endless = dict.fromkeys(DTYPES, 1e18)
    free = replace(rates, streams=endless, cached=endless, throughput=endless, bandwidth=1e18)
    cached, streams, throughput = {}, {}, {}
    for dtype in DTYPES:
        near, far, rows = (timed[f"{kind} {dtype}"] for kind in ("cached", "streamed", "rows"))
        times = [one.seconds - _time(one.phase, free) for one in (near, far, rows)]
        if min(times) <= 0:
            return None
        cached[dtype] = near.phase.weight_bytes / times[0]
        kept = kept_share(far.phase.weight_bytes, rates.cache)
        streamed = times[1] - kept * far.phase.weight_bytes / cached[dtype]
        if streamed <= 0:
            return None
        streams[dtype] = (1 - kept) * far.phase.weight_bytes / streamed
        throughput[dtype] = rows.phase.macs / times[2]
    return {"cached": cached, "streams": streams, "throughput": throughput, "bandwidth": streams["fp32"]}


def _ops(timed: Mapping[str, Timed], rates: Rates) -> dict[str, Any] | None:
    """What blocks tell: the cost of an op, warm and cold, and of what ops hand on, which is much with many rows.

    Linear least squares of relative errors over three unknowns, none of them below 0.
    """
    rows, left = [], []
    for one in (*_series(timed), timed["blocks of rows"]):
        phase = one.phase
        kept = kept_share(phase.weight_bytes + phase.state_bytes + phase.count * rates.own, rates.cache)
        rest = one.seconds - _time(phase, replace(rates, op=0.0, cold=0.0, call=0.0, values=None))
        rows.append([phase.count * kept, phase.count * (1 - kept), phase.moved_bytes])
        rows[-1], rest = [x / one.seconds for x in rows[-1]], rest / one.seconds
        left.append(rest)
    op, cold, byte = nonnegative(np.array(rows), np.array(left)).tolist()
    if op <= 0 or byte <= 0:
        return None
    return {"op": op, "cold": max(cold, op), "values": 1 / byte, "call": max(0.0, timed["call"].seconds - op)}


def nonnegative(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least squares solution x >= 0 of rows [M, N] x = wanted [M]: the best over every choice of what is 0."""
    count = rows.shape[1]
    best, least = np.zeros(count), float("inf")
    for choice in range(1, 1 << count):
        free = [i for i in range(count) if choice >> i & 1]
        part = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        off = float(((rows[:, free] @ part - wanted) ** 2).sum())
        if (part >= 0).all() and off < least:
            best, least = np.zeros(count), off
            best[free] = part
    return best
