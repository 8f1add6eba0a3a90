"""Publishing while processes die and compete: whatever happens, one whole version is there."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from needle_export.bundle.publish import recover
from needle_export.report.schema import load_report
from tests.support.reports import is_whole, write_artifact

ROOT = Path(__file__).parents[3]

# Publishes versions without end; says when the first is there. Several files, so that a kill can fall
# between them.
_LOOP = """
import itertools, sys
from pathlib import Path
from needle_export.bundle import publish as module
from tests.support.reports import write_artifact
out, tag, swap = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if swap == "renames":
    module.exchange = lambda first, second: False
for number in itertools.count() if sys.argv[4] == "0" else range(int(sys.argv[4])):
    with module.stage(out) as staging:
        files = {f"part{n}": f"{tag} {number} {n}".encode() * 50 for n in range(1 + number % 5)}
        write_artifact(staging, files)
        module.publish(staging, out)
    if number == 0:
        print("ready", flush=True)
"""


@contextlib.contextmanager
def building(out: Path, tag: str, swap: str, rounds: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that publishes without end, or so many times; killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", _LOOP, str(out), tag, swap, str(rounds)], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_first(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "ready\n":
        pytest.fail(process.stderr.read())


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors



@pytest.mark.parametrize("swap", ["exchange", "renames"])
def test_killed_at_any_moment_one_whole_version_is_there(tmp_path: Path, swap: str) -> None:
    out = tmp_path / "dist"
    moment = random.Random(1)
    for _ in range(15):
        with building(out, "version", swap) as process:
            wait_for_first(process)
            time.sleep(moment.uniform(0, 0.03))
        recover(out)  # what every reader does first; a no-op where folders can be exchanged
        assert is_whole(out)
    # The next build clears away whatever the killed ones left.
    with building(out, "last", swap, rounds=1) as process:
        finish(process)
    assert is_whole(out)
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]


@pytest.mark.parametrize("swap", ["exchange", "renames"])
def test_builds_into_one_folder_at_once_never_mix(tmp_path: Path, swap: str) -> None:
    out = tmp_path / "dist"
    with building(out, "left", swap, rounds=40) as left, building(out, "right", swap, rounds=40) as right:
        finish(left)
        finish(right)
    assert is_whole(out)
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]


def test_a_reader_during_builds_always_finds_a_whole_report(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    write_artifact(out)
    with building(out, "version", "exchange") as process:
        wait_for_first(process)
        for _ in range(200):
            load_report(out)
