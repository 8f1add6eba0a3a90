"""Inputs and outputs of a TFLite artifact: names, shapes, meaning, and the JSON that rides in the file.

Letters: T new positions of a signature, S rows of a cache, G key/value heads, L blocks; of a probe head: M = L + 1
rows (the embedding, then every block), P probes, C model width, O outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from needle_export.targets.ports import Port

FILE_NAME = "model.tflite"

#: What the last word of a probe state's name stands for.
_PROBE_DOCS = {
    "max": "largest score of each probe [M, P, 1]",
    "sum": "sum of each probe's weights [M, P, 1]",
    "pool": "sum of the hidden states that each probe weighed [M, P, C]",
}

#: What a probe head says: the projection's output as it is. The public package returns the same and calls it logits;
#: what its closed engine makes a calibrated score of is not public.
_HEAD_DOCS = {
    "confidence": "confidence in the sequence so far, raw: neither a sigmoid nor a calibration is applied",
    "embedding": "embedding of the sequence so far, of unit length",
    "router": "logits of the routes for the sequence so far, raw: neither a softmax nor a calibration is applied",
}


@dataclass(frozen=True)
class StateLayout:
    """How a state lies in an artifact and how new rows enter it.

    Attributes:
        name: of the input.
        part: what it counts towards.
        shape: of the input.
        kind: ``keys`` [G, S, Dqk] and ``values`` [G, S, Dv]: row (position mod S) is replaced; ``history`` [R, C]: new
            rows are appended behind and as many dropped in front; ``tokens``: the same with token ids; ``replace``: the
            output is the whole state.
        rows: output that brings the new rows, or the new state; empty for tokens, which the host has.
        index: which entry of that output's first axis is this state's, or -1 if there is no such axis.
        initial: value of every element before the first token.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    kind: str
    rows: str
    index: int
    initial: float = 0.0


def layouts(states: tuple[Any, ...]) -> tuple[StateLayout, ...]:
    """Layout of every state, in the order of the step's contract."""
    found = []
    for s in states:
        if s.head:
            found.append(StateLayout(s.name, s.part, s.shape, "replace", f"{s.name}_next", -1, s.initial))
        elif s.part == "keys":
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
        "replace": "{name} after the tokens before the new ones, {initial:g} before the start",
    }
    ports = [
        Port("tokens", (rows,), "int32", "token ids of the new positions; padding behind the last is ignored"),
        Port("position", (1,), "int32", "position of the first new token, 0 at the start"),
    ]
    if rows > 1 and any(s.head for s in states):
        doc = "how many of the tokens are real; those behind are padding, which probe heads must not read"
        ports.append(Port("count", (1,), "int32", doc))
    for s in layouts(states):
        dtype = "int32" if s.kind == "tokens" else "float32"
        doc = docs[s.kind].format(layer=s.index, name=_PROBE_DOCS.get(s.name.rpartition("_")[2]), initial=s.initial)
        ports.append(Port(s.name, s.shape, dtype, doc))
    return tuple(ports)


def output_ports(states: tuple[Any, ...], vocab: int, rows: int) -> tuple[Port, ...]:
    """Outputs of a signature that reads ``rows`` tokens."""
    ports = [Port("logits", (rows, vocab), "float32", "next-token logits of every new position")]
    by_output: dict[str, list[StateLayout]] = {}
    for s in layouts(states):
        if s.rows and s.kind != "replace":
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
    ports += [
        Port(s.rows, s.shape, "float32", f"replaces {s.name}") for s in layouts(states) if s.kind == "replace"
    ]
    return tuple(ports)


def head_inputs(states: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Port, ...]:
    """Inputs of a probe head's signature: the states of these names, behind the last token."""
    by_name = {p.name: p for p in input_ports(states, 1)}
    return tuple(replace(by_name[n], doc=f"{n}_next of the last call") for n in names)


def head_outputs(name: str, shape: tuple[int, ...]) -> tuple[Port, ...]:
    """Output of a probe head's signature, [O], which is called as the head is."""
    return (Port(name, shape, "float32", _HEAD_DOCS[name]),)


def contract_json(
    states: tuple[Any, ...], vocab: int, context: int, buckets: tuple[int, ...], metadata: Mapping[str, str]
) -> str:
    """What a host must know, as it is stored in the file."""
    rows = [
        {
            "name": s.name,
            "part": s.part,
            "shape": list(s.shape),
            "kind": s.kind,
            "rows": s.rows,
            "index": s.index,
            "initial": s.initial,
        }
        for s in layouts(states)
    ]
    heads = list(dict.fromkeys(s.head for s in states if s.head))
    value = {
        "context": context,
        "vocab": vocab,
        "buckets": list(buckets),
        "heads": heads,
        "state": rows,
        **metadata,
    }
    return json.dumps(value, separators=(",", ":"))
