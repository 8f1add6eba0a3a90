"""The process that :func:`needle_export.measure.latency.measure` times: one JSON request, one JSON answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from needle_export.measure.latency import Session, time_session


def main() -> None:
    """Read the request from the command line, write the answer to standard output."""
    from needle_export.targets import find_target
    from needle_export.targets.base import RunsNatively

    request = json.loads(sys.argv[1])
    target, units = find_target(request["target"]), request["compute_units"]

    def open_session() -> Session:
        folder = Path(request["folder"])
        if units is not None and isinstance(target, RunsNatively):
            native: Session = target.open_native(folder, compute_units=units)
            return native
        return target.open(folder, threads=request["threads"])

    answer = time_session(
        open_session,
        request["vocab"],
        request["steps"],
        tuple(request["prompts"]),
    )
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
