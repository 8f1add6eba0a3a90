"""One sequence through an ONNX build in ONNX Runtime: two sessions, caches written in place, prefixes bound.

Needs numpy and onnxruntime only; everything it must know rides in the model's metadata. This file lies beside every
ONNX build, and builds are verified through the class in it: what is bound, to what, and when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The graphs that read one token, and several.
FILES = {"decode": "decode.onnx", "prefill": "prefill.onnx"}

#: Cache rows are bound in multiples of this many, so that shapes stay put for that many steps.
ROW_STEP = 64

#: Bytes in a cache line; arrays in a pool start on one.
_LINE = 64


def open_decoder(folder: Path, manifest: Mapping[str, Any], threads: int = 1) -> Decoder:
    """A decoder of the build in a folder.

    Args:
        manifest: of the build, decoded; the graphs' own metadata says all that is needed of it.
        threads: of the runtime.
    """
    return Decoder(folder, threads=threads)


class Decoder:
    """One sequence.

    Args:
        folder: of the artifact.
        threads: intra-op threads.
        prefill: open the graph for prompts too; without it, prompts are read token by token.

    Raises:
        KeyError, ValueError: the model doesn't carry the metadata that a build has.
    """

    def __init__(self, folder: Path, *, threads: int = 1, prefill: bool = True) -> None:
        self._folder, self._threads = folder, threads
        self.sessions = {phase: self._open(phase) for phase in (FILES if prefill else ("decode",))}
        meta = self.sessions["decode"].get_modelmeta().custom_metadata_map
        self.layout: list[dict[str, Any]] = json.loads(meta["needle.state"])
        self.context = int(meta["needle.context"])
        self.max_chunk = int(meta["needle.max_chunk"]) if prefill else 1
        self.vocab = int(self.sessions["decode"].get_outputs()[0].shape[1])
        self._logits = np.zeros((1, self.vocab), np.float32)
        self._token, self._at = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._bindings: dict[tuple[int, int], Any] = {}
        self.position = self.turn = 0
        self.caches = _pooled(
            {s["name"]: ((s["rows"], *s["shape"][1:]), np.dtype(s["dtype"])) for s in self.layout if s["cache"]}
        )
        # Small states are read and written in the same step, so they alternate between two buffers.
        self.small = {
            s["name"]: [np.zeros(s["shape"], s["dtype"]) for _ in range(2)] for s in self.layout if not s["cache"]
        }

    def _open(self, phase: str) -> Any:
        """The session of a graph."""
        return open_graph(self._folder / FILES[phase], self._threads)

    def _session(self, phase: str) -> Any:
        if phase not in self.sessions:
            self.sessions[phase] = self._open(phase)
        return self.sessions[phase]

    def release_prefill(self) -> None:
        """Let go of the prefill graph's session, which has packed copies of its own of the matrices.

        For a host that only decodes from here on; the next chunk opens it again.
        """
        self.sessions.pop("prefill", None)

    def reset(self) -> None:
        """Forget the sequence: zero the state."""
        self.position = self.turn = 0
        for array in (*self.caches.values(), *(buffer for pair in self.small.values() for buffer in pair)):
            array[...] = 0

    def feed(self, tokens: NDArray[Any]) -> NDArray[np.float32]:
        """Append tokens [T]: chunks through prefill, a single one through decode. Logits [T, V].

        Raises:
            ValueError: they don't fit into the context.
        """
        if self.position + len(tokens) > self.context:
            raise ValueError(f"{self.position + len(tokens)} tokens don't fit in a context of {self.context}")
        parts = []
        for start in range(0, len(tokens), self.max_chunk):
            chunk = np.ascontiguousarray(tokens[start : start + self.max_chunk], dtype=np.int64)
            parts.append(self.decode(int(chunk[0])).copy()[None] if len(chunk) == 1 else self.prefill(chunk))
        return np.concatenate(parts) if parts else np.zeros((0, self.vocab), np.float32)

    def prefill(self, tokens: NDArray[Any]) -> NDArray[np.float32]:
        """One chunk [T], 2 <= T <= max_chunk; logits [T, V]."""
        logits = np.empty((len(tokens), self.vocab), np.float32)
        at = np.array([self.position], np.int64)
        binding = self._bind("prefill", tokens, at, logits)
        self._run("prefill", binding, len(tokens))
        return logits

    def decode(self, token: int) -> NDArray[np.float32]:
        """One token; logits [V], valid until the next call."""
        self._token[0], self._at[0] = token, self.position
        key = (self._bound_rows(1), self.turn)
        if key not in self._bindings:
            self._bindings[key] = self._bind("decode", self._token, self._at, self._logits)
        self._run("decode", self._bindings[key], 1)
        logits: NDArray[np.float32] = self._logits[0]
        return logits

    def save(self) -> tuple[int, dict[str, NDArray[Any]]]:
        """A copy of position and state, for :meth:`restore`."""
        rows = {name: cache[: self.position].copy() for name, cache in self.caches.items()}
        return self.position, rows | {name: pair[self.turn].copy() for name, pair in self.small.items()}

    def restore(self, saved: tuple[int, dict[str, NDArray[Any]]]) -> None:
        """Go back to a sequence that was saved here, with zeros where it had none."""
        self.reset()
        self.position, held = saved
        for name, value in held.items():
            (self.caches[name] if name in self.caches else self.small[name][self.turn])[: len(value)] = value

    def _bound_rows(self, rows: int) -> int:
        return -(-(self.position + rows) // ROW_STEP) * ROW_STEP

    def _bind(self, phase: str, tokens: NDArray[Any], at: NDArray[np.int64], logits: NDArray[np.float32]) -> Any:
        binding = self._session(phase).io_binding()
        self._input(binding, "tokens", tokens)
        self._input(binding, "position", at)
        rows = self._bound_rows(len(tokens))
        for spec in self.layout:
            name = spec["name"]
            if spec["cache"]:
                view = self.caches[name][: min(rows, spec["rows"])]
                self._input(binding, name, view)
                self._output(binding, f"{name}_next", view)
            else:
                self._input(binding, name, self.small[name][self.turn])
                self._output(binding, f"{name}_next", self.small[name][1 - self.turn])
        self._output(binding, "logits", logits)
        return binding

    @staticmethod
    def _input(binding: Any, name: str, array: NDArray[Any]) -> None:
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    @staticmethod
    def _output(binding: Any, name: str, array: NDArray[Any]) -> None:
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _run(self, phase: str, binding: Any, rows: int) -> None:
        self.sessions[phase].run_with_iobinding(binding)
        self.position += rows
        self.turn = 1 - self.turn


def open_graph(path: Path, threads: int, source: bytes | None = None, entries: Mapping[str, str] | None = None) -> Any:
    """An inference session.

    Args:
        path: of the graph's file.
        threads: intra-op threads.
        source: a changed graph to take instead of the file's.
        entries: further entries of the session's configuration.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Bound rows change as the sequence grows; a memory plan per shape would be kept for each.
    options.enable_mem_pattern = False
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(source or str(path), options, providers=["CPUExecutionProvider"])


def _pooled(wanted: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, NDArray[Any]]:
    """Zeroed arrays in one allocation: large enough for huge pages, which a strided reader of caches feels."""
    places, end = {}, 0
    for name, (shape, dtype) in wanted.items():
        size = int(np.prod(shape)) * dtype.itemsize
        places[name] = slice(end, end + size)
        end += -(-size // _LINE) * _LINE
    pool = np.zeros(end, np.uint8)
    return {name: pool[places[name]].view(dtype).reshape(shape) for name, (shape, dtype) in wanted.items()}
