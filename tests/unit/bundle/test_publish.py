"""Publishing: whole or not at all, and nobody else's files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from needle_export.bundle import publish as module
from needle_export.bundle import swap
from needle_export.bundle.publish import NoSpaceError, publish, recover, stage
from needle_export.errors import UsageError
from needle_export.report.schema import REPORT_NAME
from tests.support.reports import is_whole, write_artifact

OLD, NEW = {"model.onnx": b"old"}, {"model.onnx": b"new", "weights/model.data": b"new data"}


def build(out: Path, files: dict[str, bytes]) -> None:
    with stage(out) as staging:
        write_artifact(staging, files)
        publish(staging, out)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def swapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing a folder: this system's, and that of systems without an exchange."""
    if request.param == "two renames":
        monkeypatch.setattr(module, "exchange", lambda first, second: False)
    return str(request.param)


def test_a_first_build_makes_the_folder_and_its_parents(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "dist"
    build(out, NEW)
    assert is_whole(out)
    assert names(out.parent) == ["dist"]


def test_a_second_build_replaces_the_first_and_leaves_nothing_beside_it(
        tmp_path: Path, swapping: str) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    build(out, NEW)
    assert is_whole(out)
    assert (out / "weights" / "model.data").read_bytes() == b"new data"
    assert names(tmp_path) == ["dist"]


@pytest.mark.parametrize("change", [{"schema": 1}, {"schema": 99, "new": {}}, {"checkpoint": None}])
def test_a_build_of_another_version_is_replaced(tmp_path: Path, swapping: str, change: dict[str, object]) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    path = out / REPORT_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (out / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"mine\.txt, which no build of this tool made"):
        build(out, NEW)
    (out / "mine.txt").unlink()
    build(out, NEW)
    assert is_whole(out) and names(tmp_path) == ["dist"]


def test_the_exchange_of_this_system_works_in_one_step(tmp_path: Path) -> None:
    # Otherwise all the tests of it above would only have tested the fallback.
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert swap.exchange(tmp_path / "first", tmp_path / "second")
    assert names(tmp_path / "first") == ["second"]
    with pytest.raises(FileNotFoundError):
        swap.exchange(tmp_path / "first", tmp_path / "absent")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_refuses_the_exchange_changes_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    class Libc:
        @staticmethod
        def renameat2(*arguments: object) -> int:
            swap.ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(swap.ctypes, "CDLL", lambda name, use_errno: Libc)
    assert swap.exchange(tmp_path, tmp_path) is False
    monkeypatch.setattr(swap.ctypes, "CDLL", lambda name, use_errno: object())
    assert swap.exchange(tmp_path, tmp_path) is False


def test_a_failure_leaves_the_earlier_build_and_no_trace(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), stage(out) as staging:
            write_artifact(staging, NEW)
            raise error
    assert is_whole(out)
    assert (out / "model.onnx").read_bytes() == b"old"
    assert names(tmp_path) == ["dist"]


def test_a_failed_first_build_removes_the_parents_it_made(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), stage(tmp_path / "a" / "b" / "dist"):
        raise RuntimeError
    assert names(tmp_path) == []


def test_a_swap_that_fails_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "exchange", lambda first, second: False)
    out = tmp_path / "dist"
    build(out, OLD)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if "staging" in self.name:
            raise PermissionError(errno.EACCES, "refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        build(out, NEW)
    assert is_whole(out)
    assert names(tmp_path) == ["dist"]


def test_a_full_disk_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    with pytest.raises(NoSpaceError, match="no space left") as caught, stage(out):
        Path("/dev/full").write_bytes(b"x")
    assert caught.value.exit_code == 3
    assert is_whole(out)
    assert names(tmp_path) == ["dist"]


def test_a_file_size_limit_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    code = f"""
import resource
from pathlib import Path
from needle_export.bundle.publish import NoSpaceError, publish, stage
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
out = Path({str(out)!r})
try:
    with stage(out) as staging:
        (staging / "model.onnx").write_bytes(bytes(100_000))
        publish(staging, out)
except NoSpaceError as error:
    print(error.exit_code, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("3 ")
    assert "no space left" in result.stdout
    assert is_whole(out)
    assert names(tmp_path) == ["dist"]


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), stage(tmp_path / "dist"):
        raise PermissionError(errno.EACCES, "no")


def foreign_file(out: Path) -> None:
    (out / "holiday.jpg").touch()


def foreign_in_subfolder(out: Path) -> None:
    (out / "weights").mkdir()
    (out / "weights" / "holiday.jpg").touch()


def foreign_link(out: Path) -> None:
    (out / "link").symlink_to(out.parent)


def no_report(out: Path) -> None:
    (out / REPORT_NAME).unlink()


def other_report(out: Path) -> None:
    (out / REPORT_NAME).write_text('{"coverage": 0.9}')


@pytest.mark.parametrize("spoil", [foreign_file, foreign_in_subfolder, foreign_link, no_report, other_report])
def test_a_folder_with_anything_that_no_build_made_is_refused(
        tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    spoil(out)
    before = sorted(out.rglob("*"))
    with pytest.raises(UsageError, match="no build of this tool made") as caught:
        build(out, NEW)
    assert caught.value.exit_code == 2
    assert sorted(out.rglob("*")) == before


def test_an_empty_folder_and_a_link_to_one_are_taken(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    build(link, NEW)
    assert link.is_symlink()
    assert is_whole(real)


def test_side_files_of_a_build_are_ours(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    (out / "report.md").write_text("x")
    build(out, NEW)
    assert is_whole(out)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dist").write_text("mine")
    with pytest.raises(UsageError, match="this is a file"):
        build(tmp_path / "dist", NEW)
    assert (tmp_path / "dist").read_text() == "mine"


def test_the_working_folder_and_those_above_it_are_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for out in (Path(), tmp_path, Path("/")):
        with pytest.raises(UsageError, match="working folder"):
            build(out, NEW)


def test_a_file_as_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't write there"):
        build(tmp_path / "file" / "dist", NEW)


def test_a_file_that_appears_during_the_build_stops_the_publication(tmp_path: Path, swapping: str) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    with pytest.raises(UsageError, match=r"holiday\.jpg"), stage(out) as staging:
        write_artifact(staging, NEW)
        foreign_file(out)
        publish(staging, out)
    assert (out / "holiday.jpg").exists()
    assert (out / "model.onnx").read_bytes() == b"old"


def test_a_file_that_appears_during_the_exchange_is_kept(
        tmp_path: Path, swapping: str, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    check = module.check_replaceable

    def check_and_spoil(folder: Path) -> None:
        check(folder)
        foreign_file(folder)

    with stage(out) as staging:
        write_artifact(staging, NEW)
        monkeypatch.setattr(module, "check_replaceable", check_and_spoil)
        publish(staging, out)
    assert is_whole(out)
    kept = next(path for path in tmp_path.iterdir() if path != out)
    assert (kept / "holiday.jpg").exists()
    assert kept.name in caplog.text


@pytest.mark.parametrize("present", ["previous only", "both"])
def test_an_interrupted_pair_of_renames_is_finished(tmp_path: Path, present: str) -> None:
    out, previous = tmp_path / "dist", tmp_path / ".dist.previous"
    build(out, OLD)
    out.rename(previous)
    if present == "both":
        build_beside = tmp_path / "other"
        build(build_beside, NEW)
        build_beside.rename(out)
    recover(out)
    assert is_whole(out)
    assert names(tmp_path) == ["dist"]
    assert (out / "model.onnx").read_bytes() == (b"old" if present == "previous only" else b"new")


def test_recovery_deletes_no_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, previous = tmp_path / "dist", tmp_path / ".dist.previous"
    build(out, OLD)
    previous.mkdir()
    foreign_file(previous)
    recover(out)
    assert (previous / "holiday.jpg").exists()
    monkeypatch.setattr(module, "exchange", lambda first, second: False)
    with pytest.raises(UsageError, match="an earlier build left this"):
        build(out, NEW)
    assert is_whole(out)


def test_recovery_of_the_working_folder_is_a_no_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recover(Path())


def test_the_staging_folders_of_dead_builds_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    stale = tmp_path / f".dist.staging-{os.getpid()}-0123abcd"  # a living id, but nobody holds the lock
    stale.mkdir()
    (stale / "half").touch()
    other = tmp_path / ".dist.staging-notes"
    other.mkdir()
    with stage(out) as first:
        with stage(out) as second:
            assert first.is_dir()
            assert second != first
            assert not stale.exists()
        assert first.is_dir()
    assert names(tmp_path) == [".dist.staging-notes"]


def test_without_locks_the_process_id_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_lock", lambda descriptor, wait: None)
    child = subprocess.Popen(["true"])
    child.wait()
    dead, alive = tmp_path / f".dist.staging-{child.pid}-00000000", tmp_path / ".dist.staging-1-00000000"
    dead.mkdir()
    alive.mkdir()
    build(tmp_path / "dist", NEW)
    assert names(tmp_path) == [".dist.staging-1-00000000", "dist"]


def test_a_staging_folder_taken_for_a_dead_one_is_made_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    hold = swap.hold

    def steal(folder: Path, owner: int | None = None) -> int | None:
        tries.append(folder)
        if len(tries) == 1:
            return None  # somebody is just removing it
        if len(tries) == 2:
            folder.rmdir()  # somebody has removed it
        return hold(folder, owner)

    monkeypatch.setattr(module, "hold", steal)
    with stage(tmp_path / "dist") as staging:
        assert staging == tries[2]
        assert staging.is_dir()


def test_everything_is_synchronised_before_the_exchange(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "dist"
    build(out, OLD)
    events: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def exchange(first: Path, second: Path) -> bool:
        events.append("exchange")
        return swap.exchange(first, second)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(module, "exchange", exchange)
    with stage(out) as staging:
        write_artifact(staging, NEW)
        publish(staging, out)
    at = events.index("exchange")
    assert sorted(events[:at]) == sorted(["model.onnx", "model.data", "weights", REPORT_NAME, staging.name])
    assert events[at - 1] == staging.name
    assert events[at + 1:] == [tmp_path.name]


def test_a_folder_that_cannot_be_synchronised_is_no_failure_but_a_file_is(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "no")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    swap.sync(tmp_path)
    with pytest.raises(OSError, match="no"):
        swap.sync(tmp_path / "file")
