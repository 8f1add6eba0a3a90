"""Artifacts appear whole or not at all.

A build writes into a staging folder beside its destination. Publishing waits until that is on the disk and
then puts it in the destination's place in one step, so that whoever looks, whenever the process dies,
finds either the earlier artifact or the new one. Names beside a destination ``dist``:

``.dist.staging-<pid>-<random>``
    a build at work, or what a killed one left; it is removed by the next build.
``.dist.previous``
    the earlier artifact for the moment between two renames, where folders can't be exchanged in one step.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from needle_export.bundle.site import SITE_NAME, listed_site_files
from needle_export.bundle.swap import exchange, hold, locked, sync, sync_tree
from needle_export.errors import BadInput, NeedleExportError, UsageError
from needle_export.report.manifest import MANIFEST_NAME, listed_by_manifest
from needle_export.report.schema import REPORT_NAME, listed_files

log = logging.getLogger(__name__)

SIDE_FILES = frozenset({REPORT_NAME, "report.md", "report.txt", "reference.npz"})
"""Files that a published folder may hold without its report or its manifest listing them."""

_BYTECODE = re.compile(r"(.*/)?__pycache__/([^/.]+)\.[^/]+\.pyc")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ATTEMPTS = 100


class NoSpaceError(NeedleExportError):
    """The disk, the quota or the file size limit is exhausted (exit 3)."""

    exit_code = 3


@contextlib.contextmanager
def stage(out: Path) -> Iterator[Path]:
    """An empty folder beside ``out`` to build in; it is gone when the context ends, published or not.

    Args:
        out: the destination; missing parents are made, and removed again if nothing was published.

    Raises:
        UsageError: when ``out`` is a file, holds anything that no build made, contains the working
            folder, or can't be written.
        NoSpaceError: when writing inside the context fails for want of room.
    """
    out = _destination(out)
    made = _make_parents(out)
    try:
        with locked(out.parent):
            _recover(out)
            check_replaceable(out)
            _remove_stale(out)
        staging, lock = _make_staging(out)
    except BaseException:
        _remove_parents(made)
        raise
    try:
        yield staging
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError("no space left to write the artifact", where=str(out.parent),
                             fix="free some and build again; nothing was changed") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)
        _remove_parents(made)


def publish(staging: Path, out: Path) -> None:
    """Puts what was built in ``staging`` in the place of ``out``, whole.

    An earlier artifact is deleted afterwards, file by file as its own report lists them.

    Raises:
        UsageError: when ``out`` has meanwhile become something that no build made.
        OSError: when the file system refuses; ``out`` is then what it was.
    """
    out = _destination(out)
    sync_tree(staging)
    with locked(out.parent):
        check_replaceable(out)
        old = _swap_in(staging, out)
        sync(out.parent)
        # Still under the lock: the next build would take the old artifact for a dead one's leavings.
        if old is not None:
            _delete_artifact(old, out)


def recover(out: Path) -> None:
    """Finishes what a process killed between two renames left undone; otherwise does nothing.

    To be called before reading an artifact.
    """
    out = out.resolve()
    if _previous(out).is_dir():
        with locked(out.parent):
            _recover(out)


def _recover(out: Path) -> None:
    previous = _previous(out)
    if not previous.is_dir():
        return
    if not out.exists():
        previous.rename(out)
        log.warning("%s: restored after an interrupted build", out)
    elif _foreign(previous) is None:
        leftover = _staging_name(out)
        previous.rename(leftover)
        shutil.rmtree(leftover, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raises UsageError unless ``out`` is free, empty, or holds what a build made and nothing else."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError("this is a file, not a folder", where=str(out), fix="choose another --out")
    foreign = _foreign(out)
    if foreign is not None:
        raise UsageError(f"the folder holds {foreign}, which no build of this tool made", where=str(out),
                         fix="choose another --out, or move it away")


def _destination(out: Path) -> Path:
    # A link to a folder stays a link: what it points to is exchanged.
    path = out.resolve()
    cwd = Path.cwd()
    if path == cwd or path in cwd.parents:
        raise UsageError("the working folder is in it, and can't be replaced", where=str(out),
                         fix="choose another --out")
    return path


def _make_parents(out: Path) -> list[Path]:
    """Makes the missing parents; returns those made, innermost first."""
    missing = [parent for parent in out.parents if not os.path.lexists(parent)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from None
    return missing


def _remove_parents(made: list[Path]) -> None:
    for folder in made:
        with contextlib.suppress(OSError):  # in use: something was published into it
            folder.rmdir()


def _make_staging(out: Path) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        staging = _staging_name(out)
        try:
            staging.mkdir()
        except OSError as error:
            raise _unwritable(out, error) from None
        # Until the lock is held, another build may take the folder for a dead one's and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = hold(staging)
            if lock is not None and staging.is_dir():
                return staging, lock
            if lock is not None:
                os.close(lock)
    raise UsageError("other builds keep removing the staging folder", where=str(out),
                     fix="build again when they are done")


def _staging_name(out: Path) -> Path:
    return out.parent / f".{out.name}.staging-{os.getpid()}-{secrets.token_hex(4)}"


def _unwritable(out: Path, error: OSError) -> NeedleExportError:
    if error.errno in _FULL:
        return NoSpaceError("no space left to write the artifact", where=str(out.parent), fix="free some")
    return UsageError(f"can't write there ({error.strerror})", where=str(out), fix="choose another --out")


def _remove_stale(out: Path) -> None:
    name = re.compile(re.escape(f".{out.name}.staging-") + r"(\d+)-[0-9a-f]{8}")
    for path in out.parent.iterdir():
        match = name.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):  # gone already
            lock = hold(path, owner=int(match[1]))
            if lock is not None:
                # Removed under the lock, so that a build that is just starting can't take it over.
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _swap_in(staging: Path, out: Path) -> Path | None:
    """Moves the new folder in; returns where the old one is now."""
    if not out.exists():
        staging.rename(out)
        return None
    if exchange(staging, out):
        return staging
    previous = _previous(out)
    if previous.exists():
        raise UsageError("an earlier build left this, with files that no build made", where=str(previous),
                         fix="move it away")
    out.rename(previous)
    try:
        staging.rename(out)
    except BaseException:
        previous.rename(out)
        raise
    # Deleted under a staging name: half of it under this one would look like somebody else's.
    previous.rename(staging)
    return staging


def _previous(out: Path) -> Path:
    return out.with_name(f".{out.name}.previous")


def _foreign(folder: Path) -> str | None:
    """What a folder holds that no build made; None when it is empty, an artifact or a site."""
    top = sorted(path.name for path in folder.iterdir())
    if not top:
        return None
    # Decided before looking any deeper: the folder may be somebody's home.
    mark = next((name for name in (REPORT_NAME, SITE_NAME) if name in top), None)
    if mark is None:
        return top[0]
    try:
        # Of any version: what an earlier one built is as replaceable as what this one did.
        if mark == REPORT_NAME:
            known = SIDE_FILES | listed_files(folder)
            mark = MANIFEST_NAME
            known |= listed_by_manifest(folder)
        else:
            known = listed_site_files(folder)
    except BadInput:
        return f"a {mark} that can't be read"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in known and (path.is_symlink() or not path.is_dir()) and not _is_bytecode(name, known):
            return name
    return None


def _is_bytecode(name: str, known: frozenset[str]) -> bool:
    """Whether a file is what Python keeps of a known file that somebody has run or imported."""
    match = _BYTECODE.fullmatch(name)
    return match is not None and f"{match[1] or ''}{match[2]}.py" in known


def _delete_artifact(old: Path, out: Path) -> None:
    """Deletes an artifact that was replaced, but never a file that appeared in it since it was checked."""
    foreign = _foreign(old)
    if foreign is None:
        shutil.rmtree(old, ignore_errors=True)
        return
    kept = out.with_name(f"{out.name}.kept-{secrets.token_hex(4)}")
    old.rename(kept)
    log.warning("%s appeared in %s during the build; it is now in %s", foreign, out, kept)
