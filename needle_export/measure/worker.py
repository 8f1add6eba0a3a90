"""The process that is timed, or whose memory is measured: one JSON request, one JSON answer."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from needle_export.measure.latency import Session, median, time_session
from needle_export.measure.memory import load_and_run


def main() -> None:
    """Read the request from the command line, write the answer to standard output."""
    request = json.loads(sys.argv[1])
    answer = {"latency": _latency, "memory": _memory, "kernels": _kernels}[request["what"]](request)
    json.dump(answer, sys.stdout)


def _latency(request: dict[str, Any]) -> dict[str, Any]:
    from needle_export.targets import find_target
    from needle_export.targets.base import RunsNatively

    target, units = find_target(request["target"]), request["compute_units"]

    def open_session() -> Session:
        folder = Path(request["folder"])
        if units is not None and isinstance(target, RunsNatively):
            native: Session = target.open_native(folder, compute_units=units)
            return native
        return target.open(folder, threads=request["threads"])

    return time_session(open_session, request["vocab"], request["steps"], tuple(request["prompts"]))


def _memory(request: dict[str, Any]) -> dict[str, int | None] | None:
    from needle_export.targets import find_target
    from needle_export.targets.base import LoadsApart

    target = find_target(request["target"])
    assert isinstance(target, LoadsApart), request["target"]
    opener = target.open_decode if request["decode_alone"] else target.open
    return load_and_run(
        target.load_runtime,
        lambda: opener(Path(request["folder"]), threads=request["threads"]),
        request["vocab"],
        request["prompt"],
    )


def _kernels(request: dict[str, Any]) -> dict[str, Any]:
    from needle_export.targets import find_target
    from needle_export.targets.base import TimesKernels
    from needle_export.targets.kernels import Kernel

    target = find_target(request["target"])
    assert isinstance(target, TimesKernels), request["target"]
    answer = {}
    for name, wanted in request["kernels"].items():
        with TemporaryDirectory(prefix="needle-export-") as folder:
            run, phase = target.kernel(Kernel(**wanted), Path(folder))
            answer[name] = {"seconds": median(run), "phase": asdict(phase)}
            del run
    return answer


if __name__ == "__main__":
    main()
