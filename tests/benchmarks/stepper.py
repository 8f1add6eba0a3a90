"""A process that holds one model and times a round of decode steps whenever it is asked to.

    python -m tests.benchmarks.stepper ours|plain FOLDER ROWS THREADS STEPS

Each line on standard input is answered by the round's median in milliseconds. A process of its own keeps one
model's memory, and the page sizes it happened to get, out of the other's times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.targets.onnx.session import OnnxRunner, open_session

WARM_UP = 4


def fill(array: NDArray[np.float32]) -> None:
    """Real values in real pages: untouched zeros share one page, and reading them would cost no memory traffic."""
    array[...] = np.random.default_rng(0).standard_normal(array.shape, np.float32)


def our_step(folder: Path, rows: int, threads: int) -> Callable[[], None]:
    """One decode step of our artifact at the last position."""
    runner = OnnxRunner(folder, threads=threads)
    for cache in runner.caches.values():
        fill(cache)

    def step() -> None:
        runner.position = rows - 1
        runner.decode(5)

    return step


def plain_step(folder: Path, rows: int, threads: int) -> Callable[[], None]:
    """One step of the plain model at the last position, its state bound to buffers, inputs and outputs apart."""
    session = open_session(folder / "decode.onnx", threads)
    binding = session.io_binding()
    dtypes = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    values = {"tokens": np.full(1, 5), "position": np.full(1, rows - 1)}
    kept: list[Any] = []
    ports = [(p, binding.bind_input) for p in session.get_inputs()]
    for port, bind in ports + [(p, binding.bind_output) for p in session.get_outputs()]:
        array = np.zeros(port.shape, dtypes[port.type])
        array[...] = values.get(port.name, 0)
        if array.dtype == np.float32:
            fill(array)
        kept.append(array)
        bind(port.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def step() -> None:
        assert kept
        session.run_with_iobinding(binding)

    return step


def main() -> None:
    """Load the model, then answer each line with a round's median."""
    kind, folder, rows, threads, steps = sys.argv[1:]
    make = {"ours": our_step, "plain": plain_step}[kind]
    step = make(Path(folder), int(rows), int(threads))
    for _ in sys.stdin:
        times = []
        for _ in range(int(steps) + WARM_UP):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(float(np.median(times[WARM_UP:])) * 1e3, flush=True)


if __name__ == "__main__":
    main()
