"""What a download costs: the same number that zip makes, found beside other work."""

from __future__ import annotations

import random
import threading
import zipfile
from pathlib import Path

import pytest

from needle_export.measure import packing
from needle_export.measure.packing import Packing, packed_size


def write(folder: Path) -> list[Path]:
    """A file that packs well, in several chunks, one that doesn't pack at all, and an empty one."""
    contents = {"text": b"graph of names " * 200_000, "noise": random.Random(3).randbytes(10_000), "empty": b""}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]


def test_packed_sizes_are_those_of_a_zip_archive(tmp_path: Path) -> None:
    files = write(tmp_path)
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as made:
        for file in files:
            made.write(file, file.name)
    with zipfile.ZipFile(archive) as made:
        # Python's archives deflate also what grows by it; zip stores that.
        expected = {entry.filename: min(entry.compress_size, entry.file_size) for entry in made.infolist()}
    assert {file.name: packed_size(file) for file in files} == expected
    assert expected["noise"] == 10_000 and expected["text"] < 100_000
    with Packing() as work:
        work.start(files)
        assert work.result() == sum(expected.values())


def test_pieces_make_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "again"
    file.write_bytes(random.Random(4).randbytes(20_000) * 200)
    whole = packed_size(file)
    assert whole < 60_000
    monkeypatch.setattr(packing, "PIECE", 1 << 20)
    pieces = file.stat().st_size // packing.PIECE + 1
    # Begun anew, each would take the 20,000 bytes once more.
    assert packed_size(file) <= whole + 500 * pieces
    with Packing() as work:
        work.start([file])
        assert work.result() == packed_size(file)


def test_a_file_that_is_gone_is_an_error_of_whoever_asks(tmp_path: Path) -> None:
    with Packing() as work, pytest.raises(FileNotFoundError):
        work.start([tmp_path / "absent"])
    files = write(tmp_path)
    with Packing() as work:
        work._files.append((1, [work._pool.submit(packing._piece, tmp_path / "absent", 0, threading.Event())]))
        work.start(files)
        with pytest.raises(FileNotFoundError):
            work.result()


def test_leaving_ends_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(file: Path, start: int, stop: threading.Event) -> int:
        begun.set()
        if stop.wait(60):
            ended.set()
        return 0

    monkeypatch.setattr(packing, "_piece", endless)
    files = write(tmp_path)
    with pytest.raises(KeyboardInterrupt), Packing() as work:
        work.start(files)
        assert begun.wait(60)
        raise KeyboardInterrupt
    assert ended.is_set()


def test_leaving_before_anything_was_packed_is_no_error() -> None:
    with Packing():
        pass
