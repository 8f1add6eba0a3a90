"""Inputs and outputs of an ONNX artifact: names, shapes, meaning, and the JSON that rides in the model.

Letters: T new positions, S rows bound of a full cache, W rows bound of a ring, G key/value heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from needle_export.targets.onnx.decoder import FILES

#: What the name of a cache's scales ends in, behind the cache's own.
SCALE = "_scale"

#: Keys of ``metadata_props``.
STATE_KEY = "needle.state"
CONTEXT_KEY = "needle.context"
CHUNK_KEY = "needle.max_chunk"

DATA_NAME = "weights.bin"


@dataclass(frozen=True)
class Port:
    """One input or output of a graph: its name there, shape (names are symbolic sizes), dtype and meaning."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    doc: str


def ports(states: tuple[Any, ...], vocab: int, rows: int | None) -> tuple[dict[str, Port], dict[str, Port]]:
    """Ports of a phase by the program's input and output names."""
    count: int | str = "T" if rows is None else rows
    inputs = {
        "tokens": Port("tokens", (count,), "int64", "token ids of the new positions"),
        "position": Port("position", (1,), "int64", "position of the first new token, 0 at the start"),
    }
    outputs = {"logits": Port("logits", (count, vocab), "float", "next-token logits of every new position")}
    for spec in states:
        shape, doc = _layout(spec)
        dtype = "float" if spec.dtype == "float32" else spec.dtype
        inputs[spec.name] = Port(spec.name, shape, dtype, doc)
        outputs[f"{spec.name}_next"] = Port(f"{spec.name}_next", shape, dtype, doc)
    return inputs, outputs


def _layout(spec: Any) -> tuple[tuple[int | str, ...], str]:
    if spec.cache:
        of = "scales of the " if spec.name.endswith(SCALE) else ""
        rows, what = ("W", "ring") if spec.ring else ("S", "cache")
        doc = (
            f"{of}{spec.part} {what} of block {spec.layer}, row (position mod {spec.shape[0]}); bind any number of"
            f" rows from position + T up to {spec.shape[0]}, and the same buffer as output"
        )
        return (rows, *spec.shape[1:]), doc
    if spec.part == "tokens":
        return spec.shape, "the last tokens, oldest first, 0 before the start"
    # Channels first: the layout of the convolution op.
    return (1, spec.shape[1], spec.shape[0]), f"past rows of the {spec.part} convolution, oldest first"


def state_layout(states: tuple[Any, ...]) -> list[dict[str, Any]]:
    """What a host must know of each state: how to make it, and how it goes from call to call."""
    return [
        {
            "name": s.name,
            "part": s.part,
            "shape": list(_layout(s)[0]),
            "rows": s.shape[0] if s.cache else 0,
            "dtype": s.dtype,
            "cache": s.cache,
            "ring": s.ring,
        }
        for s in states
    ]


def state_json(states: tuple[Any, ...]) -> str:
    """The state layout as it is stored in the model."""
    return json.dumps(state_layout(states), separators=(",", ":"))


def describe(states: tuple[Any, ...], vocab: int, context: int, max_chunk: int) -> dict[str, Any]:
    """The contract for the report."""
    inputs, outputs = ports(states, vocab, None)

    def rows(table: dict[str, Port]) -> list[dict[str, Any]]:
        return [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "doc": p.doc} for p in table.values()]

    return {
        "phases": dict(FILES),
        "weights": DATA_NAME,
        "context": context,
        "max_chunk": max_chunk,
        "vocab": vocab,
        "state": state_layout(states),
        "letters": {
            "T": f"new positions: 1 in decode, 2 to {max_chunk} in prefill",
            "S": "bound rows of a full cache: at least position + T",
            "W": "bound rows of a ring: at least min(position + T, its size)",
        },
        "inputs": rows(inputs),
        "outputs": rows(outputs),
    }
