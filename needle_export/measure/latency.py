"""Time an artifact in a process of its own, so that load time and memory are its own too."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput
from needle_export.measure.work import timed_steps

#: Repetitions of a prompt.
_PROMPT_RUNS = 3

#: How long, in seconds, and how often at least a kernel is run.
_SPAN, _LEAST = 0.4, 20


class Session(Protocol):
    """The part of a runner that is timed."""

    context: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: NDArray[np.int64]) -> Any:
        """Append tokens."""


def host() -> str:
    """This machine in words: processor, cores that this process may use, system."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name} ({platform.machine()}), {cores} cores, {platform.system()}"


def time_session(
    open_session: Callable[[], Session], vocab: int, steps: int, prompts: tuple[int, ...]
) -> dict[str, Any]:
    """Load, first token, prompts and decode of one session; milliseconds and bytes, and what the session tells.

    Args:
        open_session: opens the artifact; its time is the load time.
        steps: decode steps to time.
        prompts: prompt lengths; those that leave no room in the context are left out.
    """
    start = time.perf_counter()
    session = open_session()
    load = time.perf_counter() - start
    rng = np.random.default_rng(0)

    def tokens(count: int) -> NDArray[np.int64]:
        return rng.integers(1, vocab, count, dtype=np.int64)

    def timed(what: NDArray[np.int64]) -> float:
        begin = time.perf_counter()
        session.feed(what)
        return (time.perf_counter() - begin) * 1e3

    first = timed(tokens(1))
    prefill = []
    for length in (p for p in prompts if p <= session.context):
        runs = []
        for _ in range(_PROMPT_RUNS + 1):
            session.reset()
            runs.append(timed(tokens(length)))
        took = float(np.median(runs[1:]))
        prefill.append({"tokens": length, "ms_p50": took, "tokens_per_s": length / took * 1e3})
    session.reset()
    before, warm, count = timed_steps(session.context, steps)
    if before:
        session.feed(tokens(before))
    for _ in range(warm):
        session.feed(tokens(1))
    times = [timed(tokens(1)) for _ in range(count)]
    peak = peak_rss()
    p50, p95 = (float(np.percentile(times, q)) for q in (50, 95))
    return {
        "load_ms": load * 1e3,
        "first_ms": first,
        "prefill": prefill,
        "decode": {"ms_p50": p50, "ms_p95": p95, "tokens_per_s": 1e3 / p50, "position": before + warm},
        "peak_rss_bytes": peak,
        # Asked last, as an answer may take work of its own.
        "told": list(session.told()) if hasattr(session, "told") else [],
    }


def median(run: Callable[[], object]) -> float:
    """Seconds of one call: the median of many, for some tenths of a second, as that of an artifact's steps."""
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.perf_counter() + _SPAN
    while len(times) < _LEAST or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def peak_rss() -> int | None:
    """This process's highest resident size in bytes, or None where the system doesn't tell.

    On Linux from the address space itself: the figure of getrusage starts at the parent's, whose memory a
    child shares until it runs its own program.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def measure(
    target: str,
    folder: Path,
    vocab: int,
    *,
    threads: int,
    steps: int,
    prompts: tuple[int, ...],
    compute_units: str | None = None,
) -> dict[str, Any]:
    """Time an artifact in a fresh process.

    Args:
        compute_units: to use in the runtime that the artifact is for; None times the one that verifies it.

    Raises:
        BadInput: the process failed; its last words are in the message.
    """
    request = {
        "what": "latency",
        "target": target,
        "folder": str(folder),
        "vocab": vocab,
        "threads": threads,
        "steps": steps,
        "prompts": list(prompts),
        "compute_units": compute_units,
    }
    result: dict[str, Any] = ask(request)
    return result


def ask(request: dict[str, Any]) -> Any:
    """What a fresh process answers to a request; see :mod:`needle_export.measure.worker`.

    Raises:
        BadInput: the process failed; its last words are in the message.
    """
    process = subprocess.run(
        [sys.executable, "-m", "needle_export.measure.worker", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BadInput(f"measuring failed: {last[:300]}", where=request["folder"])
    return json.loads(process.stdout)
