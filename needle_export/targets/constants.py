"""Weights on their way into a target's files: cut and merged ones with their parts, and what tells equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from needle_export.errors import Unsupported
from needle_export.graph.program import CONSTANT, FxNode, Part, Program, Weight
from needle_export.weights.codes import joined


def digest(data: NDArray[Any]) -> str:
    """Of an array's bytes, whatever its shape."""
    return hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=16).hexdigest()


def piece(weight: Weight, name: str, data: NDArray[np.float32], parts: Iterable[Part]) -> Weight:
    """A part of a merged weight, or several weights in one, as a weight of its own."""
    return Weight(name, torch.from_numpy(data), tuple(parts), weight.folded, uncoded=weight.uncoded)


def is_constant(parts: tuple[Part, ...]) -> bool:
    """Whether no checkpoint tensor stands behind a weight."""
    return all(p.role == CONSTANT for p in parts)


def short_name(name: str) -> str:
    """A weight's name as reports have it."""
    return name.removeprefix("net.")


def too_large(weight: Weight, what: str) -> Unsupported:
    """A weight that a scheme can't hold, by its checkpoint tensor."""
    source = weight.parts[0].source if weight.parts else weight.name
    return Unsupported(what, where=source, fix="build with --weights fp32")


def whole_table(program: Program, table: FxNode) -> Weight:
    """The embedding behind what the head reads of it."""
    while table.op == "call_function":  # a slice of it
        table = table.args[0]
    return program.weights[table.name]


def tied_head(program: Program, table: FxNode, rows: int) -> Weight:
    """The embedding as the head reads it: itself, or its first ``rows`` rows."""
    weight = whole_table(program, table)
    data = weight.value.numpy()
    if rows == len(data):
        return weight
    parts = (Part(weight.parts[0].source, weight.parts[0].role, -1, rows * data.shape[1]),)
    return piece(weight, f"{weight.name}[:{rows}]", np.ascontiguousarray(data[:rows]), parts)


def sigmoid_of(node: FxNode) -> FxNode | None:
    """The sigmoid that alone reads a value, or None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is torch.ops.aten.sigmoid.default else None


@dataclass(frozen=True)
class SideBySide:
    """Several ``scaled_linear`` of one input as one product.

    Attributes:
        weight: [O, I] of all, below each other.
        bias: [O].
        factor: float32 [O], each product's own repeated.
        widths: O of each.
    """

    weight: Weight
    bias: Weight
    factor: NDArray[np.float32]
    widths: list[int]


def side_by_side(program: Program, nodes: Sequence[FxNode]) -> SideBySide:
    """The weights of ``scaled_linear`` nodes that read the same input."""
    weights, biases = ([program.weights[n.args[i].name] for n in nodes] for i in (1, 2))
    widths = [int(w.value.shape[-1]) for w in weights]
    factors = [float(program.weights[n.args[3].name].value) for n in nodes]
    data = np.ascontiguousarray(np.concatenate([w.value.numpy() for w in weights], axis=-1).T)
    name = "+".join([weights[0].name, *(w.name.rpartition(".")[2] for w in weights[1:])])
    whole = piece(weights[0], name, data, [p for w in weights for p in w.parts])
    whole = replace(whole, folded=any(w.folded for w in weights))
    if all(w.codes for w in weights):
        whole = replace(whole, codes=(joined([w.codes[0] for w in weights]),))
    return SideBySide(
        whole,
        piece(
            biases[0],
            f"{name}.bias",
            np.concatenate([w.value.numpy() for w in biases]),
            [p for w in biases for p in w.parts],
        ),
        np.repeat(np.asarray(factors, np.float32), widths),
        widths,
    )
