"""Resident memory: what is counted before and after, and that it is counted in a process of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from needle_export.errors import BadInput
from needle_export.measure import memory
from needle_export.measure.latency import peak_rss

BLOCK = 32 << 20


class Hungry:
    """A session that takes a block when it is opened, and another at the first step."""

    context = 99

    def __init__(self) -> None:
        self.blocks = [np.ones(BLOCK, np.uint8)]
        self.fed: list[int] = []

    def reset(self) -> None:
        self.fed.clear()

    def feed(self, tokens: np.ndarray) -> None:
        self.fed.append(len(tokens))
        self.blocks.append(np.ones(BLOCK, np.uint8))


@pytest.mark.skipif(memory.resident() is None, reason="this system doesn't tell a process's resident size")
def test_what_opening_and_running_take_is_counted_and_what_was_there_is_not() -> None:
    kept: list[np.ndarray] = []
    sessions: list[Hungry] = []

    def open_session() -> Hungry:
        sessions.append(Hungry())
        return sessions[0]

    before = memory.resident()
    assert before is not None
    taken = memory.load_and_run(lambda: kept.append(np.ones(BLOCK, np.uint8)), open_session, 256, 5)
    assert taken is not None and sessions[0].fed == [5, 1]
    # The runtime's block belongs to the baseline, and three blocks to the artifact.
    assert taken["baseline_bytes"] - before[0] > 0.9 * BLOCK
    grown = taken["rss_bytes"] - taken["baseline_bytes"]
    assert 2.9 * BLOCK < grown < 3.5 * BLOCK
    assert taken["peak_bytes"] is None or taken["peak_bytes"] >= taken["rss_bytes"]


def test_decoding_alone_reads_no_prompt() -> None:
    session = Hungry()
    memory.load_and_run(lambda: None, lambda: session, 256, 0)
    assert session.fed == [1]


def test_the_resident_size_is_no_greater_than_its_peak() -> None:
    found, peak = memory.resident(), peak_rss()
    assert found is None or peak is None or 1e6 < found[0] < peak + 1e6
    assert found is None or found[1] is None or found[1] < found[0]


def test_without_proc_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Path, "is_file", lambda _: False)
    told = subprocess.CompletedProcess([], 0, stdout="  4321\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda *a, **k: told)
    assert memory.resident() == (4321 * 1024, None)

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("ps")

    monkeypatch.setattr(memory.subprocess, "run", absent)
    assert memory.resident() is None
    assert memory.load_and_run(lambda: None, Hungry, 256, 0) is None


def test_a_process_that_fails_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"measuring failed: .*decode\.onnx"):
        memory.measure("onnx", tmp_path, 256, threads=1, prompt=0, decode_alone=True)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system can't be asked to drop cached pages")
def test_cached_pages_are_dropped_before_a_process_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_bytes(bytes(5000))
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(memory.os, "posix_fadvise", lambda fd, at, count, advice: dropped.append(
        (os.fstat(fd).st_ino, advice)))
    monkeypatch.setattr(memory, "ask", lambda request: len(dropped))
    # Both files, and before the process starts.
    assert memory.measure("onnx", tmp_path, 256, threads=1, prompt=0, decode_alone=True) == 2
    expected = [((tmp_path / name).stat().st_ino, os.POSIX_FADV_DONTNEED) for name in ("a", "inner/b")]
    assert dropped == expected
