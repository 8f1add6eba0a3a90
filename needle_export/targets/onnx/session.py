"""Runs an ONNX artifact in ONNX Runtime: two sessions, caches written in place, prefixes bound.

Needs numpy and onnxruntime only; everything it must know rides in the model's metadata. This is also the
reference loop for a host: what is bound, to what, and when.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, Unsupported, UsageError
from needle_export.targets.base import Floats, Tokens
from needle_export.targets.onnx.contract import FILES, SCALE

#: Cache rows are bound in multiples of this many, so that shapes stay put for that many steps.
ROW_STEP = 64

#: Bytes in a cache line; arrays in a pool start on one.
_LINE = 64


class OnnxRunner:
    """A decoding session.

    Args:
        folder: of the artifact.
        threads: intra-op threads.
        inner: expose the stream after each block (slower; for finding a faulty layer).
        prefill: open the graph for prompts too; without it, prompts are read token by token.

    Raises:
        BadInput: the files aren't an artifact of ours or can't be loaded.
        Unsupported: onnxruntime isn't installed.
    """

    def __init__(self, folder: Path, *, threads: int = 1, inner: bool = False, prefill: bool = True) -> None:
        phases = ("decode", "prefill") if prefill else ("decode",)
        self._open = {phase: partial(open_session, folder / FILES[phase], threads, inner) for phase in phases}
        self.sessions = {phase: start() for phase, start in self._open.items()}
        meta = self.sessions["decode"].get_modelmeta().custom_metadata_map
        try:
            self.layout: list[dict[str, Any]] = json.loads(meta["needle.state"])
            self.context = int(meta["needle.context"])
            self.max_chunk = int(meta["needle.max_chunk"]) if prefill else 1
        except (KeyError, ValueError) as fault:
            raise BadInput(
                "the model doesn't carry this tool's metadata", where=str(folder), fix="build it again"
            ) from fault
        self.vocab = int(self.sessions["decode"].get_outputs()[0].shape[1])
        self.inner = inner
        self.position = 0
        self._streams: dict[int, Floats] = {}
        self._logits = np.zeros((1, self.vocab), np.float32)
        self._token, self._at = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._bindings: dict[tuple[int, int], Any] = {}
        self.reset()

    def release_prefill(self) -> None:
        """Let go of the prefill graph's session, which has packed copies of its own of the matrices.

        For a host that only decodes from here on; the next chunk opens it again.
        """
        self.sessions.pop("prefill", None)

    def _session(self, phase: str) -> Any:
        if phase not in self.sessions:
            self.sessions[phase] = self._open[phase]()
        return self.sessions[phase]

    def reset(self) -> None:
        """Forget the sequence: zero the state."""
        self.position = 0
        if not hasattr(self, "caches"):
            self.caches = _pooled(
                {s["name"]: ((s["rows"], *s["shape"][1:]), np.dtype(s["dtype"])) for s in self.layout if s["cache"]}
            )
            # Small states are read and written in the same step, so they alternate between two buffers.
            self.small = {
                s["name"]: [np.zeros(s["shape"], s["dtype"]) for _ in range(2)]
                for s in self.layout
                if not s["cache"]
            }
        self.turn = 0
        for pair in self.small.values():
            for buffer in pair:
                buffer[...] = 0
        for cache in self.caches.values():
            cache[...] = 0

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]: chunks through prefill, a single one through decode. Logits [T, V]."""
        if self.position + len(tokens) > self.context:
            raise UsageError(
                f"{self.position + len(tokens)} tokens don't fit in a context of {self.context}",
                fix="build with a larger --context",
            )
        parts = []
        for start in range(0, len(tokens), self.max_chunk):
            chunk = np.ascontiguousarray(tokens[start : start + self.max_chunk], dtype=np.int64)
            parts.append(self.decode(int(chunk[0])).copy()[None] if len(chunk) == 1 else self.prefill(chunk))
        return np.concatenate(parts) if parts else np.zeros((0, self.vocab), np.float32)

    def prefill(self, tokens: Tokens) -> Floats:
        """One chunk [T], 2 <= T <= max_chunk; logits [T, V]."""
        logits = np.empty((len(tokens), self.vocab), np.float32)
        at = np.array([self.position], np.int64)
        binding = self._bind("prefill", tokens, at, logits)
        self._run("prefill", binding, len(tokens))
        return logits

    def decode(self, token: int) -> Floats:
        """One token; logits [V], valid until the next call."""
        self._token[0], self._at[0] = token, self.position
        key = (self._bound_rows(1), self.turn)
        if key not in self._bindings:
            self._bindings[key] = self._bind("decode", self._token, self._at, self._logits)
        self._run("decode", self._bindings[key], 1)
        logits: Floats = self._logits[0]
        return logits

    def state(self) -> dict[str, NDArray[Any]]:
        """State by name in the reference's layout; caches cut to the rows in use, and what they stand for."""
        found: dict[str, NDArray[Any]] = {}
        for spec in self.layout:
            name = spec["name"]
            if spec["cache"]:
                if name.endswith(SCALE):
                    continue
                rows = self.caches[name][: min(self.position, spec["rows"])].astype(np.float32)
                scales = self.caches.get(name + SCALE)
                found[name] = rows if scales is None else rows * scales[: len(rows)]
            else:
                value = self.small[name][self.turn]
                found[name] = value if spec["part"] == "tokens" else value[0].T
        return found

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

    def streams(self) -> dict[int, Floats]:
        """The stream after each block of the last call, [T, n, C]; at T = 1 [n, C]."""
        return self._streams

    def _bound_rows(self, rows: int) -> int:
        return -(-(self.position + rows) // ROW_STEP) * ROW_STEP

    def _bind(self, phase: str, tokens: Tokens, at: NDArray[np.int64], logits: Floats) -> Any:
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
        if self.inner:
            for output in self.sessions[phase].get_outputs():
                if output.name.startswith("stream_"):
                    binding.bind_output(output.name, "cpu")
        return binding

    @staticmethod
    def _input(binding: Any, name: str, array: NDArray[Any]) -> None:
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    @staticmethod
    def _output(binding: Any, name: str, array: NDArray[Any]) -> None:
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _run(self, phase: str, binding: Any, rows: int) -> None:
        self.sessions[phase].run_with_iobinding(binding)
        if self.inner:
            values = zip(self.sessions[phase].get_outputs(), binding.get_outputs(), strict=True)
            self._streams = {
                int(o.name.removeprefix("stream_")): v.numpy() for o, v in values if o.name.startswith("stream_")
            }
        self.position += rows
        self.turn = 1 - self.turn


def _pooled(wanted: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, NDArray[Any]]:
    """Zeroed arrays in one allocation: large enough for huge pages, which a strided reader of caches feels."""
    places, end = {}, 0
    for name, (shape, dtype) in wanted.items():
        size = int(np.prod(shape)) * dtype.itemsize
        places[name] = slice(end, end + size)
        end += -(-size // _LINE) * _LINE
    pool = np.zeros(end, np.uint8)
    return {name: pool[places[name]].view(dtype).reshape(shape) for name, (shape, dtype) in wanted.items()}


def open_session(path: Path, threads: int, inner: bool = False) -> Any:
    """An inference session on one graph file.

    Raises:
        BadInput: the file is missing, or ONNX Runtime can't load it.
        Unsupported: onnxruntime isn't installed.
    """
    try:
        import onnxruntime as ort
    except ImportError as missing:
        raise Unsupported(
            "ONNX Runtime is not installed", fix="install it with: pip install 'needle-export[onnx]'"
        ) from missing
    if not path.is_file():
        raise BadInput("this file of the artifact is missing", where=str(path), fix="build it again")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Bound rows change as the sequence grows; a memory plan per shape would be kept for each.
    options.enable_mem_pattern = False
    try:
        source: Any = _with_streams(path, options) if inner else str(path)
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as fault:  # onnxruntime raises its own, unexported exception types
        text = str(fault).strip().splitlines()[-1]
        raise BadInput(f"ONNX Runtime can't load it ({text[:200]})", where=str(path), fix="build it again") from fault


def _with_streams(path: Path, options: Any) -> bytes:
    """The model with the streams between blocks as further outputs; weights stay where they are."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    names = [o for n in model.graph.node for o in n.output if o.startswith("stream_")]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names)
    for value in model.graph.output:
        if value.name in names:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    data: bytes = model.SerializeToString()
    return data
