"""Inputs, outputs and states of a Core ML package: names, shapes, meaning, and the JSON that rides in the package.

Letters: T new positions of a function, S rows of a full cache, W rows of a ring, G key/value heads, L blocks, N n-gram
tables, P positions side by side in a row of keys; Dqk, Dv, C widths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from needle_export.targets.ports import DECODE, Port

FILE_NAME = "model.mlpackage"

#: Ops that end in the stream behind a block are called this, the block's number, and a running number.
STREAM = "stream_"

#: Stands for minus infinity in a mask. Its exponential is 0 in both float types, and half precision holds it.
MASKED = -1e4

#: Widths of states that the Neural Engine is reported to take are multiples of this.
WIDTH = 32

#: Versions of the specification, by the least operating system that reads them.
SPECIFICATIONS = {"ios17": 8, "ios18": 9, "ios26": 10}


def package_name(function: str, stateful: bool) -> str:
    """The package that holds a function: one for all where there are states (iOS 18 on), before that one for each."""
    if stateful or function == DECODE:
        return FILE_NAME
    return f"model_{function}.mlpackage"


def stateful(system: str) -> bool:
    """Whether packages for a system keep their own state: from iOS 18 on."""
    return SPECIFICATIONS[system] >= SPECIFICATIONS["ios18"]


@dataclass(frozen=True)
class StateLayout:
    """How a state of the step lies in a package.

    Attributes:
        name: of the step's state (``k_00``).
        part: what it counts towards.
        kind: ``keys``, ``values``, ``taps``, ``engram`` or ``tokens`` (which the host keeps).
        port: the package's state, or its input where it has none.
        shape: of that port.
        ring: whether rows wrap.
        rows: of the cache that the step asked for.
        index: which block of the port's first axis is this state's, or -1.
        width: of a row of one head, or of all channels.
        side: positions side by side in a row of the port.
    """

    name: str
    part: str
    kind: str
    port: str
    shape: tuple[int, ...]
    ring: bool
    rows: int
    index: int
    width: int
    side: int = 1


def side_by_side(width: int) -> int:
    """Positions whose keys share a row of a state, so that the row's width is a multiple of 32.

    A key of 48 has no such width, and two of them have: 96. Nothing is padded, and the bytes are those of [S, Dqk].
    """
    return WIDTH // math.gcd(WIDTH, width)


def layouts(states: tuple[Any, ...], stateful: bool) -> tuple[StateLayout, ...]:
    """Layout of every state of the step, in its order."""
    found = []
    taps = [s for s in states if s.part == "taps"]
    for s in states:
        if s.part in ("keys", "values"):
            rows, groups, width = s.shape
            side = side_by_side(width) if s.part == "keys" and stateful else 1
            held = held_rows(rows, states, stateful) // side
            shape: tuple[int, ...] = (groups, held, side * width)
            found.append(StateLayout(s.name, s.part, s.part, s.name, shape, s.ring, rows, -1, width, side))
        elif s.part == "taps":
            shape = (len(taps), *s.shape)
            found.append(StateLayout(s.name, s.part, "taps", "taps", shape, False, s.shape[0], s.layer, s.shape[1]))
        elif s.part == "engram":
            found.append(
                StateLayout(s.name, s.part, "engram", s.name, s.shape, False, s.shape[0], -1, s.shape[1])
            )
        else:
            found.append(StateLayout(s.name, s.part, "tokens", "", s.shape, False, s.shape[0], -1, 1))
    return tuple(found)


def full_rows(states: tuple[Any, ...]) -> int:
    """Rows S of the full caches, 0 if all are rings."""
    return max((s.shape[0] for s in states if s.part == "keys" and not s.ring), default=0)


def ring_rows(states: tuple[Any, ...]) -> int:
    """Rows W of the rings, 0 if nothing wraps."""
    return max((s.shape[0] for s in states if s.part == "keys" and s.ring), default=0)


def held_rows(rows: int, states: tuple[Any, ...], stateful: bool) -> int:
    """Rows of a cache as a package holds them: rounded up to whole rows of keys."""
    if not stateful:
        return rows
    width = next(s.shape[2] for s in states if s.part == "keys")
    side = side_by_side(width)
    return -(-rows // side) * side


def input_ports(
    states: tuple[Any, ...], rows: int, tables: int, half: bool, stateful: bool
) -> tuple[Port, ...]:
    """Inputs of a function that reads ``rows`` tokens.

    Args:
        tables: n-gram tables N of a site, 0 if the model has none.
    """
    real = "float16" if half else "float32"
    ports = [
        Port("tokens", (rows,), "int32", "token ids of the new positions; padding behind the last is ignored"),
        Port("position", (1,), "int32", "position of the first new token, 0 at the start"),
    ]
    if rows > 1:
        ports.append(Port("count", (1,), "int32", "how many of the tokens are real; those behind are padding"))
    full, ring = full_rows(states), ring_rows(states)
    seen = f"0 where a query (axis 0) sees a key (axis 1), {MASKED:g} elsewhere"
    if stateful:
        ports.append(
            Port("slots", (2,), "int32", "row that the first new token takes in the full caches, and in the rings")
        )
    beside = 0 if stateful else rows
    if full:
        size = held_rows(full, states, stateful)
        doc = "rows of the full caches, the new ones written" if stateful else "rows of the full caches, then new ones"
        ports.append(Port("mask", (rows, size + beside), real, f"{seen}; keys: {doc}"))
    if ring:
        size = held_rows(ring, states, stateful)
        written = stateful and rows == 1
        doc = "rows of the rings, the new one written" if written else "rows of the rings as they were, then new ones"
        ports.append(Port("ring_mask", (rows, size + (0 if written else rows)), real, f"{seen}; keys: {doc}"))
    if tables:
        ports.append(Port("ngram_rows", (rows, tables), "int32", "rows of the n-gram tables, by token"))
        ports.append(
            Port("ngram_valid", (rows, tables), real, "0 where the n-gram would begin before the start, else 1")
        )
    if not stateful:
        for p in state_ports(states, False):
            ports.append(Port(p.name, p.shape, real, f"{p.doc}, as they were before this call"))
    return tuple(ports)


def state_ports(states: tuple[Any, ...], stateful: bool) -> tuple[Port, ...]:
    """States of a package, each once."""
    docs = {
        "keys": "keys of a block after rotation, 0 before the start",
        "values": "values of a block, 0 before the start",
        "taps": "rows before the new ones of all blocks, oldest first, 0 before the start",
        "engram": "n-gram values before the new ones, oldest first, 0 before the start",
    }
    ports: dict[str, Port] = {}
    for s in layouts(states, stateful):
        if s.port and s.port not in ports:
            ports[s.port] = Port(s.port, s.shape, "float16", docs[s.kind])
    return tuple(ports.values())


def output_ports(states: tuple[Any, ...], vocab: int, rows: int, half: bool, stateful: bool) -> tuple[Port, ...]:
    """Outputs of a function that reads ``rows`` tokens."""
    ports = [Port("logits", (rows, vocab), "float32", "next-token logits of every new position")]
    if stateful:
        return tuple(ports)
    real = "float16" if half else "float32"
    for s in layouts(states, False):
        if s.kind in ("keys", "values"):
            doc = f"new rows of {s.name}: token t is row (position + t) mod {s.rows}"
            ports.append(Port(f"{s.name}_rows", (s.shape[0], rows, s.width), real, doc))
        elif s.port and not any(p.name == f"{s.port}_next" for p in ports):
            ports.append(Port(f"{s.port}_next", s.shape, real, f"replaces {s.port}"))
    return tuple(ports)


def facts(
    states: tuple[Any, ...],
    vocab: int,
    context: int,
    buckets: tuple[int, ...],
    ngrams: Mapping[str, Any],
    system: str,
    half: bool,
) -> dict[str, Any]:
    """What a host must know.

    Args:
        ngrams: seeds, orders and slots of the n-gram hash; empty if the model has none.
    """
    return {
        "context": context,
        "vocab": vocab,
        "buckets": list(buckets),
        "stateful": stateful(system),
        "rows": held_rows(full_rows(states), states, stateful(system)),
        "ring": ring_rows(states),
        "align": max((s.side for s in layouts(states, stateful(system))), default=1),
        "masked": MASKED,
        "real": "float16" if half else "float32",
        "ngrams": dict(ngrams),
        "state": [{**asdict(s), "shape": list(s.shape)} for s in layouts(states, stateful(system))],
    }


def contract_json(known: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """The same as it is stored in the package, with what that says about itself."""
    return json.dumps({**known, **metadata}, separators=(",", ":"))
