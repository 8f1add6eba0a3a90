"""What earlier work made, kept under keys: entries appear whole, are checked when they are used, and make room.

Storage only: it knows keys, files and sizes, and nothing of what they mean. Whoever makes a key says with it all that
decides the content. In the cache's folder:

``entries/<key>/``
    ``files``, and ``entry.json`` with their sizes and hashes; its time is that of the last use.
``staging/<key>.<random>/``
    an entry that is being written, or what a killed process left; it is removed by the next that writes the same one.
``locks/<key>``
    held by whoever reads or makes an entry. It dies with its process, so a file left here locks nothing.

Nothing that is wrong with the cache stops whoever uses it: it is told, and the work is done as if there were none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from needle_export.bundle.swap import sync_tree
from needle_export.checkpoint.files import file_sha256
from needle_export.config.progress import Progress

log = logging.getLogger(__name__)

_KEY = re.compile(r"[a-z]+-[0-9a-f]{64}")
_RECORD, _FILES = "entry.json", "files"

#: What backup programs know such folders by: bford.info/cachedir.
_TAG = "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n"


@dataclass(frozen=True)
class Entry:
    """One entry: its key, what it is in words, bytes of its files, and the time of its last use in seconds."""

    key: str
    about: str
    bytes: int
    used: float


class _Damaged(Exception):
    """An entry isn't what was written; the text says how."""


class Cache:
    """Entries in a folder that several processes may use at once.

    Args:
        folder: made when something is first kept.
        limit: bytes that all entries may take.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    @contextlib.contextmanager
    def locked(self, key: str, what: str, progress: Progress) -> Iterator[None]:
        """Keeps others from this entry; waits for whoever has it, and says for ``what``.

        Where nothing can be locked, nothing is, and two that want the same thing make it twice.
        """
        lock = self._lock(key)
        if lock is not None and not _acquired(lock, wait=False):
            with progress.stage(f"wait for another build of {what}"):
                _acquired(lock, wait=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def find(self, key: str) -> Path | None:
        """The folder with an entry's files, each as it was written, or None; to be called under its lock.

        A damaged entry is told and dropped.
        """
        folder = self._entry(key)
        try:
            record = _record(folder, key)
            _check(folder / _FILES, record["files"])
        except FileNotFoundError:
            return None
        except (_Damaged, OSError) as fault:
            log.warning("%s: an entry of the cache is damaged (%s) and was dropped", folder, _reason(fault))
            self.drop(key)
            return None
        with contextlib.suppress(OSError):  # somebody else's cache, which may only be read
            os.utime(folder / _RECORD)
        return folder / _FILES

    def drop(self, key: str) -> None:
        """Remove an entry, if there is one; to be called under its lock."""
        folder = self._entry(key)
        with contextlib.suppress(OSError):
            # Without its record it is none, however far the removal comes.
            (folder / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, key: str, about: str, fill: Callable[[Path], None]) -> bool:
        """Keep an entry, whole or not at all; to be called under its lock.

        Args:
            about: what it is, in words.
            fill: writes its files into the empty folder that it is given, where room may run out.

        Returns:
            False where it couldn't be kept, which is told.
        """
        staging = self.folder / "staging" / f"{key}.{secrets.token_hex(4)}"
        try:
            self._prepare()
            for left in staging.parent.glob(f"{key}.*"):
                shutil.rmtree(left, ignore_errors=True)
            content = staging / _FILES
            content.mkdir(parents=True)
            fill(content)
            files: dict[str, dict[str, Any]] = {
                path.relative_to(content).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
                for path in sorted(content.rglob("*"))
                if path.is_file()
            }
            size = sum(f["bytes"] for f in files.values())
            if size > self.limit:
                log.warning("%s: not kept: %d bytes are more than the cache's limit of %d", about, size, self.limit)
                return False
            record = {"key": key, "about": about, "files": files}
            (staging / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            sync_tree(staging)
            self.drop(key)
            staging.rename(self._entry(key))
        except OSError as error:
            log.warning("%s: nothing could be kept in the cache (%s)", self.folder, _reason(error))
            return False
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._make_room(key)
        return True

    def entries(self) -> list[Entry]:
        """All entries, the last used first."""
        found = []
        for folder in self._folders():
            try:
                record, used = _record(folder, folder.name), (folder / _RECORD).stat().st_mtime
                size, about = sum(f["bytes"] for f in record["files"].values()), record["about"]
            except (_Damaged, OSError):
                with contextlib.suppress(OSError):  # gone meanwhile
                    size, about, used = sum(p.stat().st_size for p in folder.rglob("*")), "damaged", 0.0
                    found.append(Entry(folder.name, about, size, used))
                continue
            found.append(Entry(folder.name, about, size, used))
        return sorted(found, key=lambda e: (-e.used, e.key))

    def clear(self) -> list[Entry]:
        """Remove every entry that nobody is using, and what killed processes left; what was removed."""
        removed = [e for e in self.entries() if self._drop_unused(e.key)]
        for folder, name in (("staging", "{key}.*"), ("locks", "{key}")):
            for path in self._listed(folder):
                key = path.name.partition(".")[0]
                if _KEY.fullmatch(key) and path.match(name.format(key=key)):
                    self._remove_unused(key, path)
        return removed

    def _make_room(self, kept: str) -> None:
        """Drop entries, the longest unused first, until all others and ``kept`` are within the limit."""
        entries = self.entries()
        total = sum(e.bytes for e in entries)
        for entry in reversed(entries):
            if total <= self.limit:
                return
            if entry.key != kept and self._drop_unused(entry.key):
                log.info("%s: dropped from the cache for room", entry.about)
                total -= entry.bytes

    def _drop_unused(self, key: str) -> bool:
        """Drop an entry unless somebody has its lock."""
        lock = self._lock(key)
        if lock is None or not _acquired(lock, wait=False):
            return False
        try:
            self.drop(key)
        finally:
            lock.release()
        return not self._entry(key).exists()

    def _remove_unused(self, key: str, path: Path) -> None:
        lock = self._lock(key)
        if lock is None or not _acquired(lock, wait=False):
            return
        try:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        finally:
            lock.release()

    def _lock(self, key: str) -> Any:
        from filelock import FileLock

        try:
            self._prepare()
        except OSError as error:
            log.debug("%s: can't be locked (%s)", self.folder, _reason(error))
            return None
        return FileLock(self.folder / "locks" / key)

    def _prepare(self) -> None:
        for name in ("entries", "staging", "locks"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        tag = self.folder / _TAG[0]
        if not tag.exists():
            tag.write_text(_TAG[1], encoding="ascii")

    def _entry(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key")
        return self.folder / "entries" / key

    def _folders(self) -> list[Path]:
        return [p for p in self._listed("entries") if _KEY.fullmatch(p.name) and p.is_dir()]

    def _listed(self, folder: str) -> list[Path]:
        try:
            return sorted((self.folder / folder).iterdir())
        except OSError:
            return []


def _acquired(lock: Any, *, wait: bool) -> bool:
    """Whether a lock is ours now; where locks don't work it counts as ours."""
    from filelock import Timeout

    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return False
    except (OSError, NotImplementedError) as error:
        log.debug("%s: can't be locked (%s)", lock.lock_file, error)
    return True


def _record(folder: Path, key: str) -> dict[str, Any]:
    """The record of an entry, as :meth:`Cache.keep` writes it.

    Raises:
        FileNotFoundError: there is none.
        _Damaged: it is another thing.
    """
    data = (folder / _RECORD).read_bytes()
    try:
        record = json.loads(data)
        good = record["key"] == key and isinstance(record["about"], str) and all(
            not PurePosixPath(name).is_absolute()
            and ".." not in PurePosixPath(name).parts
            and type(file["bytes"]) is int
            and isinstance(file["sha256"], str)
            for name, file in record["files"].items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise _Damaged("its record can't be read")
    return dict(record)


def _check(folder: Path, files: dict[str, Any]) -> None:
    """Whether an entry holds these files and no others, byte for byte."""
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    if there != set(files):
        raise _Damaged(f"{min(there ^ set(files))} is missing or isn't part of it")
    for name, file in files.items():
        if (folder / name).stat().st_size != file["bytes"] or file_sha256(folder / name) != file["sha256"]:
            raise _Damaged(f"{name} has changed")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
