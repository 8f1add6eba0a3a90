"""A pipeline that builds nothing: the command line's other side in tests.

As a module it stands in for ``needle_export.pipeline``. What it does is told by the environment variable
``FAKE``: nothing for a good run, or the name of a way to fail, with ``@`` and a folder's name for that build alone.
Run as a program, it is the command line with this pipeline behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.bundle.cache import Cache
from needle_export.bundle.publish import publish, stage
from needle_export.config.device import Device
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.errors import (
    BadInput,
    CheckFailed,
    FusionFailed,
    Unsupported,
    UsageError,
    VerificationFailed,
)
from needle_export.report.schema import PlanInfo, Report, load_report
from tests.support.reports import write_artifact

CALLS: list[tuple[str, dict[str, Any]]] = []
CACHES: list[Cache | None] = []

FAILURES = {
    "check": CheckFailed("it is too large", where="size.total_bytes", fix="allow more"),
    "usage": UsageError("depth 30 isn't between 2 and 20", where="layers"),
    "input": BadInput("the tensor is missing", where="x/kernel", fix="fetch it again"),
    "verification": VerificationFailed("logits differ by 1e-2 in layer 3", where="onnx"),
    "fusion": FusionFailed("attention fired 2 of 3 times", where="layer 1"),
    "unsupported": Unsupported("there is no such runtime here"),
    "crash": KeyError("x"),
    "silent crash": AssertionError(),
    "memory": MemoryError(),
    "runtime": ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime.capi"),
    "module": ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere"),
    "disk": PermissionError(13, "Permission denied", "/a/file"),
    "end of file": EOFError(),
    "helper": BrokenPipeError(32, "Broken pipe"),
}


def _behave(progress: Progress, name: str = "") -> None:
    way, _, only = os.environ.get("FAKE", "").partition("@")
    way = way if only in ("", name) else ""
    with progress.stage("pretend", 3) as task:
        task.advance()
        if way == "sleep":
            print("started", file=sys.stderr, flush=True)  # noqa: T201 - the test waits for it
            time.sleep(60)
        elif way == "stubborn":
            _cling()
        elif way:
            raise FAILURES[way]


def _cling() -> None:
    """Ignores being told to stop, as a library might."""
    for word in ("started", "clinging"):
        with contextlib.suppress(BaseException):
            print(word, file=sys.stderr, flush=True)  # noqa: T201 - the test waits for it
            time.sleep(60)


def build(
    options: BuildOptions,
    progress: Progress,
    plan: PlanInfo | None = None,
    cache: Cache | None = None,
    device: Device | None = None,
) -> Report:
    CALLS.append(("build", vars(options)))
    CACHES.append(cache)
    with stage(options.out) as staging:
        report = write_artifact(staging)
        _behave(progress, options.out.name)
        publish(staging, options.out)
    return report


def verify(dist: Path, *, checkpoint: str | None, progress: Progress) -> Report:
    CALLS.append(("verify", {"dist": dist, "checkpoint": checkpoint}))
    report = load_report(dist)
    _behave(progress)
    return report


def bench(
    dist: Path, *, threads: int, steps: int, prompt: tuple[int, ...], progress: Progress, compute_units: str | None,
    devices: list[Device],
) -> Report:
    asked = {"threads": threads, "steps": steps, "prompt": prompt, "compute_units": compute_units,
             "devices": [device.id for device in devices]}
    CALLS.append(("bench", {"dist": dist, **asked}))
    _behave(progress)
    return dataclasses.replace(load_report(dist))


def logits(dist: Path, tokens: NDArray[np.int64], progress: Progress) -> NDArray[np.float32]:
    CALLS.append(("logits", {"dist": dist, "tokens": tokens}))
    _behave(progress)
    return tokens.astype(np.float32)[:, None] + np.arange(5, dtype=np.float32)


def install() -> None:
    """Puts this module in the pipeline's place."""
    import needle_export

    module = sys.modules[__name__]
    sys.modules["needle_export.pipeline"] = module
    needle_export.pipeline = module


if __name__ == "__main__":
    # Interrupts as a terminal sends them, also where whoever started the tests ignores them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    install()
    from needle_export.cli import main

    main()
