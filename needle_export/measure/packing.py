"""What files weigh when they are packed for a download, found beside other work."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LEVEL = 6
"""zip's own default, and zlib's."""

_CHUNK = 1 << 20


class Packing:
    """Packs files in a thread of its own, as the compressor leaves the interpreter to others meanwhile.

    As a context it ends the thread when it is left, done or not, so that nobody's folder is read any longer.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sizes: list[int] = []
        self._error: OSError | None = None

    def start(self, files: Sequence[Path]) -> None:
        """Begin; the files must stay as they are."""
        self._thread = threading.Thread(target=self._run, args=(tuple(files),), name="packing", daemon=True)
        self._thread.start()

    def result(self) -> int:
        """Wait for the end: bytes of all files, packed.

        Raises:
            OSError: a file couldn't be read.
        """
        assert self._thread is not None, "not started"
        self._thread.join()
        if self._error is not None:
            raise self._error
        return sum(self._sizes)

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, files: tuple[Path, ...]) -> None:
        try:
            for file in files:
                self._sizes.append(packed_size(file, self._stop))
        except OSError as error:
            self._error = error


def packed_size(file: Path, stop: threading.Event | None = None) -> int:
    """Bytes of a file in a zip archive, without headers: deflated, or as it is where that is smaller.

    Args:
        file: to read.
        stop: ends it early when set; the number is then worth nothing.

    Raises:
        OSError: it can't be read.
    """
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = plain = 0
    with file.open("rb") as handle:
        while (chunk := handle.read(_CHUNK)) and not (stop is not None and stop.is_set()):
            plain += len(chunk)
            packed += len(packer.compress(chunk))
    return min(plain, packed + len(packer.flush()))
