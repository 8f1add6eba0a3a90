"""The process that :func:`needle_export.measure.latency.measure` times: one JSON request, one JSON answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from needle_export.measure.latency import time_session


def main() -> None:
    """Read the request from the command line, write the answer to standard output."""
    from needle_export.targets import find_target

    request = json.loads(sys.argv[1])
    target = find_target(request["target"])
    answer = time_session(
        lambda: target.open(Path(request["folder"]), threads=request["threads"]),
        request["vocab"],
        request["steps"],
        tuple(request["prompts"]),
    )
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
