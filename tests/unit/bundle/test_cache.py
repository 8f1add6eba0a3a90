"""The cache of entries: whole or not there, checked when used, within its limit, never in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from needle_export.bundle import cache as module
from needle_export.bundle.cache import Cache
from needle_export.config.progress import NullProgress, Task
from needle_export.errors import NeedleExportError

ROOT = Path(__file__).parents[3]
QUIET = NullProgress()


def key(number: int) -> str:
    return f"thing-{number:064x}"


def fill(size: int = 3, name: str = "a/b.bin"):
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))

    return write


def keep(cache: Cache, number: int, size: int = 3) -> bool:
    with cache.locked(key(number), "it", QUIET):
        return cache.keep(key(number), f"number {number}", fill(size))


def find(cache: Cache, number: int) -> Path | None:
    with cache.locked(key(number), "it", QUIET):
        return cache.find(key(number))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 10**6)


def test_what_was_kept_is_found(cache: Cache) -> None:
    assert find(cache, 1) is None
    assert keep(cache, 1)
    found = find(cache, 1)
    assert found is not None and (found / "a/b.bin").read_bytes() == bytes(3)
    assert [p for p in found.rglob("*") if p.is_file()] == [found / "a/b.bin"]
    assert find(cache, 2) is None
    (entry,) = cache.entries()
    assert (entry.key, entry.about, entry.bytes) == (key(1), "number 1", 3)
    assert not list((cache.folder / "staging").iterdir())


def test_a_second_version_takes_the_place_of_the_first(cache: Cache) -> None:
    assert keep(cache, 1, 3) and keep(cache, 1, 5)
    assert [e.bytes for e in cache.entries()] == [5]


@pytest.mark.parametrize("name", ["../x", "thing", "thing-12", f"thing-{1:064x}/x", f"Thing-{1:064x}"])
def test_only_keys_name_entries(cache: Cache, name: str) -> None:
    with pytest.raises(ValueError, match="is no key"):
        cache.find(name)


DAMAGE = {
    "a byte": lambda f: (f / "files/a/b.bin").write_bytes(b"\0\0\1"),
    "cut off": lambda f: (f / "files/a/b.bin").write_bytes(b"\0\0"),
    "missing": lambda f: (f / "files/a/b.bin").unlink(),
    "another file": lambda f: (f / "files/c").touch(),
    "no JSON": lambda f: (f / "entry.json").write_text("{"),
    "no UTF-8": lambda f: (f / "entry.json").write_bytes(b"\xff"),
    "not a record": lambda f: (f / "entry.json").write_text("[]"),
    "no files": lambda f: (f / "entry.json").write_text(json.dumps({"key": key(1), "about": ""})),
    "another's record": lambda f: (f / "entry.json").write_text(json.dumps({"key": key(2), "about": "", "files": {}})),
    "outside": lambda f: (f / "entry.json").write_text(
        json.dumps({"key": key(1), "about": "", "files": {"../x": {"bytes": 0, "sha256": ""}}})),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_told_and_dropped(cache: Cache, damage, caplog: pytest.LogCaptureFixture) -> None:
    keep(cache, 1)
    damage(cache.folder / "entries" / key(1))
    assert find(cache, 1) is None
    assert "damaged" in caplog.text and "dropped" in caplog.text
    assert not (cache.folder / "entries" / key(1)).exists()
    assert keep(cache, 1) and find(cache, 1) is not None


def age(cache: Cache, number: int, seconds: float) -> None:
    path = cache.folder / "entries" / key(number) / "entry.json"
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_was_longest_unused_makes_room(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10)
    for number, seconds in ((1, 300), (2, 200), (3, 100)):
        assert keep(cache, number, 3)
        age(cache, number, seconds)
    assert find(cache, 1) is not None  # used now, and so the youngest
    keep(cache, 4, 3)
    assert {e.key for e in cache.entries()} == {key(1), key(3), key(4)}
    keep(cache, 5, 10)
    assert {e.key for e in cache.entries()} == {key(5)}


def test_what_is_larger_than_the_limit_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path, 10)
    keep(cache, 1, 3)
    assert not keep(cache, 2, 11)
    assert "not kept" in caplog.text and [e.key for e in cache.entries()] == [key(1)]


def test_an_entry_in_use_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10)
    keep(cache, 1, 6)
    with cache.locked(key(1), "it", QUIET):
        keep(cache, 2, 6)
        assert {e.key for e in cache.entries()} == {key(1), key(2)}
        assert [e.key for e in cache.clear()] == [key(2)]
    assert [e.key for e in cache.clear()] == [key(1)]
    assert cache.entries() == [] and not list((cache.folder / "locks").iterdir())


def test_clearing_leaves_what_is_not_an_entry(cache: Cache) -> None:
    keep(cache, 1)
    mine = [cache.folder / "mine", cache.folder / "entries" / "mine", cache.folder / "staging" / "mine"]
    for path in mine:
        path.write_text("mine")
    (cache.folder / "staging" / f"{key(3)}.00").mkdir()  # of a killed process
    cache.clear()
    assert all(path.read_text() == "mine" for path in mine)
    assert cache.entries() == [] and not (cache.folder / "staging" / f"{key(3)}.00").exists()
    assert Cache(cache.folder / "absent", 1).clear() == []


@pytest.mark.parametrize("where", ["fill", "sync", "rename"])
def test_a_full_disk_is_told_and_leaves_nothing(
    cache: Cache, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keep(cache, 2)
    if where == "sync":
        monkeypatch.setattr(module, "sync_tree", full)
    elif where == "rename":
        monkeypatch.setattr(Path, "rename", full)
    with cache.locked(key(1), "it", QUIET):
        assert not cache.keep(key(1), "one", full if where == "fill" else fill())
    assert "No space left on device" in caplog.text and len(caplog.records) == 1
    assert [e.key for e in cache.entries()] == [key(2)] and not list((cache.folder / "staging").iterdir())


_ON_A_TINY_DISK = """
import sys
from pathlib import Path
from needle_export.bundle.cache import Cache
from needle_export.config.progress import NullProgress
cache = Cache(Path(sys.argv[1]) / "cache", 10**9)
for number, size in enumerate((50_000, 500_000, 20_000)):
    key = f"thing-{number:064x}"
    with cache.locked(key, "it", NullProgress()):
        print(cache.keep(key, "it", lambda folder: (folder / "a").write_bytes(bytes(size)) and None),
              cache.find(key) is not None)
print(len(cache.entries()), len(list((cache.folder / "staging").iterdir())))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    # A mount of its own, which ends with the process.
    mount = f'mount -t tmpfs -o size=128k none "{tmp_path}" && exec "$@"'
    own = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("no disk of one's own can be mounted here")
    run = subprocess.run([*own, sys.executable, "-c", _ON_A_TINY_DISK, str(tmp_path)], cwd=ROOT, capture_output=True,
                         text=True, check=True)
    assert run.stdout.splitlines() == ["True True", "False False", "True True", "2 0"]
    assert run.stderr.count("nothing could be kept in the cache (No space left on device)") == 1


def test_faults_of_the_work_are_not_the_caches(cache: Cache) -> None:
    def fault(_: Path) -> None:
        raise NeedleExportError("no")

    with pytest.raises(NeedleExportError), cache.locked(key(1), "it", QUIET):
        cache.keep(key(1), "one", fault)
    assert not list((cache.folder / "staging").iterdir()) and find(cache, 1) is None


def test_a_folder_that_can_not_be_made_is_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache", 10**6)
    assert find(cache, 1) is None and not keep(cache, 1)
    assert "nothing could be kept" in caplog.text
    assert cache.entries() == [] and cache.clear() == []


# --- several processes -------------------------------------------------------------------------------

_USER = """
import sys, time
from pathlib import Path
from needle_export.bundle.cache import Cache
from needle_export.config.progress import NullProgress
cache, key = Cache(Path(sys.argv[1]), 10**6), sys.argv[2]
def fill(folder):
    (folder / "part").write_bytes(b"x")
    print("filling", flush=True)
    time.sleep(float(sys.argv[3]))
    (folder / "rest").write_bytes(b"x")
with cache.locked(key, "it", NullProgress()):
    if cache.find(key) is None:
        cache.keep(key, "it", fill)
        print("made", flush=True)
    else:
        print("found", flush=True)
"""


def start(cache: Cache, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _USER, str(cache.folder), key(1), str(seconds)], cwd=ROOT,
                            stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Told:
    """Progress that remembers its stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Task]:
        self.stages.append(name)
        with NullProgress().stage(name) as task:
            yield task


def test_who_wants_what_another_is_making_waits_and_finds_it(cache: Cache) -> None:
    told = Told()
    with start(cache, 0.5) as process:
        assert line(process) == "filling"
        with cache.locked(key(1), "the model", told):
            assert cache.find(key(1)) is not None
        assert line(process) == "made"
    assert told.stages == ["wait for another build of the model"]


def test_a_dead_holder_blocks_nobody_and_leaves_nothing(cache: Cache) -> None:
    told = Told()
    with start(cache, 60) as process:
        assert line(process) == "filling"
        process.kill()
    assert len(list((cache.folder / "staging").iterdir())) == 1
    with cache.locked(key(1), "the model", told):
        assert cache.find(key(1)) is None
        assert cache.keep(key(1), "it", fill())
    assert told.stages == []
    assert not list((cache.folder / "staging").iterdir())
