"""Inputs and outputs of a TFLite artifact: names, shapes, meaning, and the JSON that rides in the file.

Letters: T new positions of a signature, S rows of a cache, G key/value heads, L blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Key of the file's metadata under which the contract lies.
CONTRACT_KEY = "needle.contract"

FILE_NAME = "model.tflite"

DECODE = "decode"


def prefill_name(rows: int) -> str:
    """Name of the signature that reads T = ``rows`` tokens."""
    return f"prefill_{rows}"


@dataclass(frozen=True)
class Port:
    """One input or output of a signature: its name there, shape, dtype and meaning."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    doc: str


@dataclass(frozen=True)
class StateLayout:
    """How a state lies in an artifact and how new rows enter it.

    Attributes:
        name: of the input.
        part: what it counts towards.
        shape: of the input.
        kind: ``keys`` [G, S, Dqk] and ``values`` [G, S, Dv]: row (position mod S) is replaced; ``history`` [R, C]: new
            rows are appended behind and as many dropped in front; ``tokens``: the same with token ids.
        rows: output that brings the new rows; empty for tokens, which the host has.
        index: which entry of that output's first axis is this state's, or -1 if there is no such axis.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    kind: str
    rows: str
    index: int


def layouts(states: tuple[Any, ...]) -> tuple[StateLayout, ...]:
    """Layout of every state, in the order of the step's contract."""
    found = []
    for s in states:
        if s.part == "keys":
            rows, groups, width = s.shape
            found.append(StateLayout(s.name, s.part, (groups, rows, width), "keys", "k_rows", s.layer))
        elif s.part == "values":
            rows, groups, width = s.shape
            found.append(StateLayout(s.name, s.part, (groups, rows, width), "values", "v_rows", s.layer))
        elif s.part == "tokens":
            found.append(StateLayout(s.name, s.part, s.shape, "tokens", "", -1))
        else:
            output = f"{s.part}_rows"
            found.append(StateLayout(s.name, s.part, s.shape, "history", output, s.layer))
    return tuple(found)


def input_ports(states: tuple[Any, ...], rows: int) -> tuple[Port, ...]:
    """Inputs of a signature that reads ``rows`` tokens."""
    docs = {
        "keys": "keys of block {layer} after rotation; position p is row (p mod S) of each group",
        "values": "values of block {layer}; position p is row (p mod S) of each group",
        "history": "rows before the new ones, oldest first, 0 before the start",
        "tokens": "tokens before the new ones, oldest first, 0 before the start",
    }
    ports = [
        Port("tokens", (rows,), "int32", "token ids of the new positions; padding behind the last is ignored"),
        Port("position", (1,), "int32", "position of the first new token, 0 at the start"),
    ]
    for s in layouts(states):
        dtype = "int32" if s.kind == "tokens" else "float32"
        ports.append(Port(s.name, s.shape, dtype, docs[s.kind].format(layer=s.index)))
    return tuple(ports)


def output_ports(states: tuple[Any, ...], vocab: int, rows: int) -> tuple[Port, ...]:
    """Outputs of a signature that reads ``rows`` tokens."""
    ports = [Port("logits", (rows, vocab), "float32", "next-token logits of every new position")]
    by_output: dict[str, list[StateLayout]] = {}
    for s in layouts(states):
        if s.rows:
            by_output.setdefault(s.rows, []).append(s)
    for name, group in by_output.items():
        first = group[0]
        doc = f"new rows of {first.part}"
        if first.kind == "history":
            shape: tuple[int, ...] = (rows, first.shape[1])
        else:
            groups, width = first.shape[0], first.shape[2]
            shape = (rows, groups, width)
        if first.index >= 0:
            shape, doc = (len(group), *shape), f"{doc} of all blocks"
        ports.append(Port(name, shape, "float32", doc))
    return tuple(ports)


def contract_json(
    states: tuple[Any, ...], vocab: int, context: int, buckets: tuple[int, ...], metadata: Mapping[str, str]
) -> str:
    """What a host must know, as it is stored in the file."""
    rows = [
        {"name": s.name, "part": s.part, "shape": list(s.shape), "kind": s.kind, "rows": s.rows, "index": s.index}
        for s in layouts(states)
    ]
    value = {"context": context, "vocab": vocab, "buckets": list(buckets), "state": rows, **metadata}
    return json.dumps(value, separators=(",", ":"))
