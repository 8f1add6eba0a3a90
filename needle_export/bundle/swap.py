"""Putting one folder in the place of another in a single step, and locks that die with their process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Values of the kernel interfaces: linux/fs.h and fcntl.h (AT_FDCWD); macOS sys/stdio.h (RENAME_SWAP).
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2

_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


def exchange(first: Path, second: Path) -> bool:
    """Swaps two existing folders on one file system atomically.

    Returns:
        False when the system or the file system can't; then nothing has changed.

    Raises:
        OSError: when it can but didn't: one of them is missing, or is a mount point.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    try:
        if sys.platform == "darwin":
            result = libc.renamex_np(a, b, ctypes.c_uint(_RENAME_SWAP))
        else:
            result = libc.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, ctypes.c_uint(_RENAME_EXCHANGE))
    except AttributeError:  # a C library without the call
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems can't synchronise a folder; anything else means that data may be lost.
        if error.errno not in _NO_EXCHANGE or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Waits until everything in a folder, and the folder itself, is on the disk."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's advisory lock; waits for others. Nothing is written, and a death releases it.

    Where folders can't be locked (some network file systems) this holds nothing.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def hold(folder: Path, owner: int | None = None) -> int | None:
    """Locks a folder without waiting, for as long as the returned descriptor is open.

    Args:
        folder: to lock.
        owner: the process that may be working in it. Where folders can't be locked, a running owner
            counts as holding it; where they can, its id isn't looked at, since ids are reused and mean
            nothing across containers.

    Returns:
        None when somebody else holds it.

    Raises:
        OSError: when the folder is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    free = _lock(descriptor, wait=False)
    if free is None:
        free = owner is None or not _is_running(owner)
    if free:
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, *, wait: bool) -> bool | None:
    """True: locked. False: somebody else has it. None: locks don't work here."""
    try:
        import fcntl  # not on every platform
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
