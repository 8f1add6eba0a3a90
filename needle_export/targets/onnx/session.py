"""Runs an ONNX artifact in ONNX Runtime, with the decoder that lies beside every build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, UsageError
from needle_export.targets.base import Floats, Tokens, need
from needle_export.targets.onnx.contract import SCALE
from needle_export.targets.onnx.decoder import FILES, Decoder, open_graph


class OnnxRunner(Decoder):
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
        self.inner = inner
        self._streams: dict[int, Floats] = {}
        try:
            super().__init__(folder, threads=threads, prefill=prefill)
        except (KeyError, ValueError) as fault:
            raise BadInput(
                "the model doesn't carry this tool's metadata", where=str(folder), fix="build it again"
            ) from fault

    def _open(self, phase: str) -> Any:
        return open_session(self._folder / FILES[phase], self._threads, self.inner)

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]: chunks through prefill, a single one through decode. Logits [T, V].

        Raises:
            UsageError: they don't fit into the context.
        """
        if self.position + len(tokens) > self.context:
            raise UsageError(
                f"{self.position + len(tokens)} tokens don't fit in a context of {self.context}",
                fix="build with a larger --context",
            )
        return super().feed(tokens)

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

    def streams(self) -> dict[int, Floats]:
        """The stream after each block of the last call, [T, n, C]; at T = 1 [n, C]."""
        return self._streams

    def _bind(self, phase: str, tokens: Tokens, at: NDArray[np.int64], logits: Floats) -> Any:
        binding = super()._bind(phase, tokens, at, logits)
        if self.inner:
            for output in self.sessions[phase].get_outputs():
                if output.name.startswith("stream_"):
                    binding.bind_output(output.name, "cpu")
        return binding

    def _run(self, phase: str, binding: Any, rows: int) -> None:
        super()._run(phase, binding, rows)
        if self.inner:
            values = zip(self.sessions[phase].get_outputs(), binding.get_outputs(), strict=True)
            self._streams = {
                int(o.name.removeprefix("stream_")): v.numpy() for o, v in values if o.name.startswith("stream_")
            }


def open_session(path: Path, threads: int, inner: bool = False) -> Any:
    """An inference session on one graph file.

    Raises:
        BadInput: the file is missing, or ONNX Runtime can't load it.
        Unsupported: onnxruntime isn't installed.
    """
    need("onnx", "onnxruntime")
    if not path.is_file():
        raise BadInput("this file of the artifact is missing", where=str(path), fix="build it again")
    try:
        return open_graph(path, threads, *(_with_streams(path) if inner else ()))
    except Exception as fault:  # onnxruntime raises its own, unexported exception types
        text = str(fault).strip().splitlines()[-1]
        raise BadInput(f"ONNX Runtime can't load it ({text[:200]})", where=str(path), fix="build it again") from fault


def _with_streams(path: Path) -> tuple[bytes, dict[str, str]]:
    """The model with the streams between blocks as further outputs, and where its weights stay."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    names = [o for n in model.graph.node for o in n.output if o.startswith("stream_")]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names)
    for value in model.graph.output:
        if value.name in names:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model.SerializeToString(), {"session.model_external_initializers_file_folder_path": str(path.parent)}
