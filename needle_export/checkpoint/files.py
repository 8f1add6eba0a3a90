"""Opening, mapping and writing files, with every failure as one sentence."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, UsageError

Progress = Callable[[int, int], None]
_CHUNK = 1 << 23


def map_file(path: Path) -> NDArray[np.uint8]:
    """The file's bytes, mapped read-only, [file_bytes].

    Raises:
        BadInput: when there is no such file, it is a folder or a device, is empty or unreadable.
    """
    try:
        # Asked before opening, because opening a pipe waits for its writer.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise BadInput("this isn't a regular file", where=path.name, fix="give a checkpoint file")
        with path.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size == 0:
                raise BadInput("the file is empty", where=path.name, fix="fetch or write it again")
            return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except IsADirectoryError:
        raise BadInput("this is a folder, not a file", where=path.name,
                       fix="give the checkpoint file inside it") from None
    except FileNotFoundError:
        raise BadInput("there is no such file", where=str(path), fix="check the path") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"the file can't be read ({_reason(error)})", where=path.name,
                       fix="check its permissions and the disk") from None


def sha256_of(data: NDArray[np.uint8], progress: Progress | None = None) -> str:
    """Hex SHA-256 of the bytes; ``progress(done, total)`` is called in bytes after each chunk."""
    digest = hashlib.sha256()
    for start in range(0, len(data), _CHUNK):
        chunk = data[start:start + _CHUNK]
        digest.update(chunk.data)
        if progress is not None:
            progress(start + len(chunk), len(data))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def naming(file_name: str) -> Iterator[None]:
    """Puts the file's name in front of whatever a BadInput raised inside says about its place."""
    try:
        yield
    except BadInput as error:
        where = f"{file_name}: {error.where}" if error.where else file_name
        raise BadInput(error.what, where=where, fix=error.fix) from None


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A handle to a file that appears under ``path`` whole, or not at all.

    The bytes go to a temporary file beside it, are synchronised, and are then renamed into place.

    Raises:
        UsageError: when the place can't be written or has no room; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # Opened by hand so that the file gets the permissions of any other new file.
        handle = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")
    except OSError as error:
        raise UsageError(f"can't write there ({_reason(error)})", where=str(path),
                         fix="choose another place") from None
    try:
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UsageError(f"the file couldn't be written ({_reason(error)})", where=str(path),
                         fix="free some space or choose another place") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # Not every file system can synchronise a folder; the rename itself has succeeded by then.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
