"""The process that runs an artifact in tflite-runtime 2.14: the package's own loop, driven over two pipes.

It is run as a script by a Python that needn't have this package, may be older than the package asks for, and has
a NumPy of its own. Nothing but the standard library is imported before the first answer, so that whatever is
missing there can be said in an answer.

A message, both ways, is a JSON object, and arrays as raw bytes behind it. The object's ``arrays`` name them with
dtype and shape. Requests have an ``op``, answers have an ``error`` where something was raised.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Length of the JSON object, little-endian.
_LENGTH = struct.Struct("<I")


def pack(head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> bytes:
    """A message as bytes."""
    arrays = arrays or {}
    shapes = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**head, "arrays": shapes}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays.values())])


def unpack(read: Callable[[int], bytes]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The next message from a source of exactly so many bytes.

    Raises:
        EOFError: by the source, where it ends.
    """
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    head: dict[str, Any] = json.loads(read(length))
    arrays = {}
    for name, code, shape in head.pop("arrays"):
        import numpy as np  # only here: without arrays there may be no numpy to import

        kind = np.dtype(code)
        # Into memory of its own, which the receiver may write to.
        arrays[name] = np.frombuffer(bytearray(read(kind.itemsize * math.prod(shape))), kind).reshape(shape)
    return head, arrays


class Worker:
    """Answers requests about one loop."""

    def __init__(self) -> None:
        self.loop: Any = None

    def answer(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        """What to send back; a fault is an answer too."""
        try:
            return getattr(self, f"_{head['op']}")(head, arrays)  # type: ignore[no-any-return]  # a method found by name
        except Exception as fault:  # the runtime raises ValueError and RuntimeError, an import raises its own
            return pack({"error": str(fault).strip() or type(fault).__name__, "kind": type(fault).__name__})

    def _hello(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        import tflite_runtime  # type: ignore[import-not-found]  # lives in a venv that mypy doesn't see
        import tflite_runtime.interpreter  # type: ignore[import-not-found]  # as above

        # Not before: beside the package may lie the packages of another Python. From now on numpy is loaded.
        sys.path.insert(0, head["package"])
        return pack({"version": tflite_runtime.__version__})

    def _open(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        from tflite_runtime.interpreter import Interpreter

        from needle_export.targets.tflite.session import Loop

        self.loop = Loop(Interpreter(model_path=head["model"], num_threads=head["threads"]), head["contract"])
        return pack({})

    def _reset(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        self.loop.reset()
        return pack({})

    def _feed(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        return pack({}, {"logits": self.loop.feed(arrays["tokens"])})

    def _state(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        from needle_export.targets.tflite.state import reference_state

        return pack({}, reference_state(self.loop))


def main() -> None:
    """Answer until the parent closes its end."""
    # Python puts a script's folder first, and a module of this folder must not stand in for somebody else's.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]
    # A crash is one of the expected results, and its core would hold the whole model.
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # What a library writes to the standard output must not end up among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)

    def read(count: int) -> bytes:
        parts = []
        while count:
            part = os.read(0, count)
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    worker = Worker()
    while True:
        try:
            head, arrays = unpack(read)
        except EOFError:
            return
        left = memoryview(worker.answer(head, arrays))
        while left:
            left = left[os.write(answers, left) :]


if __name__ == "__main__":
    main()
