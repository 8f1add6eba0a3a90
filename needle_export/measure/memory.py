"""The memory that loading an artifact takes: resident size of a fresh process, before and after.

Before: the runtime is imported and nothing is opened. After: one decode step was run, so that whatever a runtime puts
off until it first runs is there, and the whole state at the built context with it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from needle_export.measure.latency import Session, ask, peak_rss

#: Length of the prompt that is read where prefill is loaded too, in tokens.
PROMPT = 64


def resident() -> tuple[int, int | None] | None:
    """This process's resident size in bytes, and the part of it that is pages of files, None where that is unknown.

    None where the system tells neither.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        if "VmRSS" in fields:
            mapped = int(fields["RssFile"][0]) * 1024 if "RssFile" in fields else None
            return int(fields["VmRSS"][0]) * 1024, mapped
    try:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
        return int(told.stdout) * 1024, None
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def load_and_run(
    load_runtime: Callable[[], None], open_session: Callable[[], Session], vocab: int, prompt: int
) -> dict[str, int | None] | None:
    """Resident bytes before opening and after a step, in this process, which should be fresh.

    Args:
        load_runtime: imports all that opening needs.
        open_session: opens the artifact.
        prompt: tokens to read before the step; 0 for none.

    Returns:
        ``baseline_bytes``, ``rss_bytes``, ``mapped_bytes`` and ``peak_bytes``; None where the system doesn't tell.
    """
    load_runtime()
    # Any tokens that differ; not drawn, as numpy's generators would be megabytes of the figure.
    tokens = np.arange(1, prompt + 2, dtype=np.int64) * 7919 % vocab
    before = resident()
    session = open_session()
    if prompt:
        session.feed(tokens[:prompt])
    session.feed(tokens[prompt:])
    after, peak = resident(), peak_rss()
    if before is None or after is None:
        return None
    # The kernel's counters are summed when they are read, and a page or two apart.
    highest = None if peak is None else max(peak, after[0])
    return {"baseline_bytes": before[0], "rss_bytes": after[0], "mapped_bytes": after[1], "peak_bytes": highest}


def forget_cached(folder: Path) -> None:
    """Have the system drop the pages of a folder's files that it keeps, as if nobody had read or written them.

    A file that was just written lies there in larger pieces than one that is read bit by bit, and a mapping of it has
    more of it resident: tens of megabytes that say nothing of the artifact. Where a system has no such call, or a file
    is in use, they stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            # A file that can't be opened is for whoever loads it to complain of.
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)  # only what is on the disk can be dropped
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def measure(
    target: str, folder: Path, vocab: int, *, threads: int, prompt: int, decode_alone: bool
) -> dict[str, Any] | None:
    """What loading an artifact takes, in a fresh process, from files that aren't cached; as :func:`load_and_run`.

    Args:
        decode_alone: load what decoding needs and nothing else.

    Raises:
        BadInput: the process failed; its last words are in the message.
    """
    request = {
        "what": "memory",
        "target": target,
        "folder": str(folder),
        "vocab": vocab,
        "threads": threads,
        "prompt": prompt,
        "decode_alone": decode_alone,
    }
    forget_cached(folder)
    answer: dict[str, Any] | None = ask(request)
    return answer
