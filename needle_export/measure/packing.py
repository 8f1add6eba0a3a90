"""What files weigh when they are packed for a download, found beside other work.

A large file is deflated in pieces, as parallel packers do: each begins with the window that the one before it has left,
so that the pieces make one stream, of a few bytes more than in one go.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

LEVEL = 6
"""zip's own default, and zlib's."""

PIECE = 32 << 20
"""Bytes that one thread deflates at a time."""

_WINDOW = 1 << 15
_CHUNK = 1 << 20
_THREADS = 2


class Packing:
    """Packs files in threads of its own, as the compressor leaves the interpreter to others meanwhile.

    As a context it ends them when it is left, done or not, so that nobody's folder is read any longer.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, "packing")
        self._files: list[tuple[int, list[Future[int]]]] = []

    def start(self, files: Sequence[Path]) -> None:
        """Begin; the files must stay as they are.

        Raises:
            OSError: one isn't there.
        """
        for file in files:
            size = file.stat().st_size
            starts = range(0, size, PIECE)
            self._files.append((size, [self._pool.submit(_piece, file, at, self._stop) for at in starts]))

    def result(self) -> int:
        """Wait for the end: bytes of all files, packed.

        Raises:
            OSError: a file couldn't be read.
        """
        return sum(_smaller(size, [piece.result() for piece in pieces]) for size, pieces in self._files)

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def packed_size(file: Path) -> int:
    """Bytes of a file in a zip archive, without headers: deflated, or as it is where that is smaller.

    Raises:
        OSError: it can't be read.
    """
    size, stop = file.stat().st_size, threading.Event()
    return _smaller(size, [_piece(file, at, stop) for at in range(0, size, PIECE)])


def _smaller(size: int, pieces: Sequence[int]) -> int:
    return min(size, sum(pieces))


def _piece(file: Path, start: int, stop: threading.Event) -> int:
    """Bytes that one piece of a file takes in the stream; worth nothing once ``stop`` is set."""
    with file.open("rb") as handle:
        handle.seek(max(0, start - _WINDOW))
        window = handle.read(min(start, _WINDOW))
        packer = (zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=window) if window
                  else zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS))
        packed, left = 0, PIECE
        while left and not stop.is_set() and (chunk := handle.read(min(_CHUNK, left))):
            packed += len(packer.compress(chunk))
            left -= len(chunk)
        last = not handle.read(1)
    return packed + len(packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH))
