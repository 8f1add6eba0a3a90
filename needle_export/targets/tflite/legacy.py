"""Runs a TFLite artifact in tflite-runtime 2.14, the last release of the older runtime, beside the one of today.

That release needs NumPy 1 and a Python up to 3.11, so it lives in an environment of its own, and a process of that
environment runs the same loop. What the runtime can't do, down to a crash, is a value here: the reason why.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, UsageError
from needle_export.targets.base import Floats, RuntimeRefused, Tokens
from needle_export.targets.ports import CONTRACT_KEY
from needle_export.targets.tflite.analysis import metadata, read_graph
from needle_export.targets.tflite.legacy_worker import pack, unpack

#: The release that is meant; what another one does says nothing about it.
VERSION = "2.14.0"

#: Names a Python that has tflite-runtime, where there is no environment of ours.
VARIABLE = "NEEDLE_EXPORT_TFLITE_PYTHON"

#: The environment that ``make setup`` makes.
FOLDER = ".venv-tflite-2.14"

#: Seconds for one answer: a long prompt of a large model on a slow machine takes a small part of them.
TIMEOUT = 600.0

#: The folder that the package lies in, which the process imports the loop from.
_PACKAGE = Path(__file__).resolve().parents[3]
_WORKER = Path(__file__).resolve().parent / "legacy_worker.py"

#: What the process is doing when the runtime itself is loaded.
_START = "starting"

#: Seconds that a process may take to be gone once its answers end.
_DYING = 60.0

#: Bytes of the process's log that are looked at, from its end, and characters of a line that are shown.
_LOG_BYTES, _WIDTH = 4096, 300


def why_not(path: Path) -> str:
    """Why a file isn't even opened there, or empty.

    Where a file claims versions of ops that it knows, products with 4-bit matrices in blocks are 0 there.

    Raises:
        BadInput: the file is damaged.
    """
    if not any(tensor.dtype == "int4" for graph in read_graph(path) for tensor in graph.tensors):
        return ""
    return "not tried: it has no kernel for 4-bit matrices in blocks, and doesn't know the versions of ops that have"


def find_legacy_python() -> Path | None:
    """The Python that has tflite-runtime, or None; whether it really has it shows when it is used.

    Raises:
        UsageError: the variable names something that can't be executed.
    """
    named = os.environ.get(VARIABLE)
    # Never resolved: a venv's python is a link, and behind the link there is no venv.
    path = Path(named) if named else Path(sys.prefix).parent / FOLDER / "bin" / "python"
    if path.is_file() and os.access(path, os.X_OK):
        return path
    if named:
        raise UsageError(
            f"{named} is no program that can be run", where=VARIABLE, fix="name a Python that has tflite-runtime"
        )
    return None


class LegacyRunner:
    """A decoding session in the older runtime.

    Once the runtime has refused, its process is gone, and every further call refuses for the same reason. Reasons
    are worded to go on where "tflite-runtime" stands.

    Args:
        path: of the artifact's file.
        python: that has tflite-runtime.
        threads: of the interpreter.
        timeout: seconds for one answer.

    Attributes:
        version: of the runtime.
        position: tokens of the sequence.
        timeout: as given.
        refusal: the reason why it was refused, or empty.

    Raises:
        BadInput: the file isn't an artifact of ours.
        RuntimeRefused: this release isn't there, or can't open the artifact.
    """

    def __init__(self, path: Path, python: Path, *, threads: int = 1, timeout: float = TIMEOUT) -> None:
        contract = _read_contract(path)
        if reason := why_not(path):
            raise RuntimeRefused(f"was {reason}")
        self.context = int(contract["context"])
        self.max_chunk = max([1, *(int(b) for b in contract["buckets"])])
        self.position = 0
        self.version = ""
        self.timeout = timeout
        self.refusal = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process is ended
        # -E: the parent's PYTHONPATH leads to packages of another Python.
        command = [str(python), "-E", str(_WORKER)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, bufsize=0)
        except OSError as fault:
            self._log.close()
            raise RuntimeRefused(f"has a Python that can't be started ({fault.strerror})") from fault
        # The contract of a runner knows no end, and a process left behind would hold a whole model.
        self._end = weakref.finalize(self, _end, self._process, self._log)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(self._requests, select.POLLOUT)
        self._readable.register(self._answers, select.POLLIN)
        self.version = str(self._ask(_START, {"op": "hello", "package": str(_PACKAGE)})[0].get("version"))
        if self.version != VERSION:
            self._refuse(f"is there as {self.version}, not as {VERSION}")
        request = {"op": "open", "model": str(path.resolve()), "threads": threads, "contract": contract}
        self._ask("opening the model", request)

    def __enter__(self) -> LegacyRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._end()

    def reset(self) -> None:
        """Forget the sequence."""
        self._ask("resetting", {"op": "reset"})
        self.position = 0

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T], in the chunks that the loop plans; logits [T, V]."""
        if self.position + len(tokens) > self.context:
            raise UsageError(
                f"{self.position + len(tokens)} tokens don't fit in a context of {self.context}",
                fix="build with a larger --context",
            )
        given = {"tokens": np.ascontiguousarray(tokens, dtype=np.int64)}
        logits: Floats = self._ask("reading tokens", {"op": "feed"}, given)[1]["logits"]
        self.position += len(tokens)
        return logits

    def state(self) -> dict[str, NDArray[Any]]:
        """State by name, caches cut to the rows in use, in the layout of the reference model."""
        return self._ask("handing over its state", {"op": "state"})[1]

    def streams(self) -> dict[int, Floats]:
        """None: a file shows only the outputs that it was written with."""
        return {}

    def _ask(
        self, doing: str, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        if self.refusal:
            raise RuntimeRefused(self.refusal)
        if not self._end.alive:
            raise ValueError("the session is closed")
        until = time.monotonic() + self.timeout
        try:
            self._write(pack(head, arrays), until)
            answer, found = unpack(lambda count: self._read(count, until))
        except TimeoutError:
            self._refuse(f"doesn't answer within {self.timeout:g} s when {doing}")
        except (EOFError, BrokenPipeError):
            self._refuse(self._how_it_ended(doing))
        except (ValueError, KeyError):
            self._refuse("has a Python that answers in no way that is understood here")
        except BaseException:
            # Interrupted within a message: what comes next on the pipes would be taken for something else.
            self._end()
            raise
        if "error" in answer:
            self._refuse(_in_words(answer, doing))
        return answer, found

    def _write(self, data: bytes, until: float) -> None:
        left = memoryview(data)
        while left:
            _wait(self._writable, until)
            left = left[os.write(self._requests, left) :]

    def _read(self, count: int, until: float) -> bytes:
        parts = []
        while count:
            _wait(self._readable, until)
            part = os.read(self._answers, count)
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _how_it_ended(self, doing: str) -> str:
        try:
            code = self._process.wait(_DYING)
        except subprocess.TimeoutExpired:
            return f"stops answering when {doing}"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            # A system that is short of memory kills without a word.
            verb = {"SIGABRT": "aborts", "SIGKILL": "has something kill"}.get(name, "crashes")
            how = f"{verb} the process ({name})"
        else:
            how = f"ends the process with code {code}"
        return ": ".join([f"{how} when {doing}", *self._last_line()])

    def _refuse(self, reason: str) -> NoReturn:
        """End the process, keep the reason, and raise."""
        self.refusal = reason
        self._end()
        raise RuntimeRefused(reason)

    def _last_line(self) -> list[str]:
        """What the process wrote last, if it wrote anything."""
        size = os.fstat(self._log.fileno()).st_size
        # Without moving the position in the file, which is the process's too.
        text = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace")
        return [line.strip()[:_WIDTH] for line in text.splitlines() if line.strip()][-1:]


def _read_contract(path: Path) -> dict[str, Any]:
    try:
        contract: dict[str, Any] = json.loads(metadata(path, CONTRACT_KEY) or "")
    except ValueError as fault:
        raise BadInput("the model doesn't carry this tool's metadata", where=str(path), fix="build it again") from fault
    return contract


def _in_words(answer: Mapping[str, Any], doing: str) -> str:
    first = str(answer["error"]).splitlines()[0][:_WIDTH]
    if doing != _START:
        return first
    missing = answer.get("kind") == "ModuleNotFoundError"
    return f"{'is not installed there' if missing else 'is there and cannot be loaded'} ({first})"


def _wait(pipe: select.poll, until: float) -> None:
    if not pipe.poll(max(0.0, until - time.monotonic()) * 1e3):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Leave neither the process nor anything of it."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
