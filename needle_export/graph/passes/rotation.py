"""Weights in codebook form: their rotation moves to what they are multiplied with, and cancels where two meet.

A weight is ``W = U H``: levels times norms, rotated in groups by the normalised Walsh-Hadamard matrix, which is its
own inverse. So ``x W^T = (x H) U^T``: the input is rotated once, whatever reads it, and U stays what the file holds. A
row of a table is a row of U, rotated behind the lookup. Exact in real arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from needle_export.graph.ops import op
from needle_export.graph.passes.base import Fired
from needle_export.graph.program import FxNode, Program, Weight, layer_of

aten = torch.ops.aten

#: Ops that read a matrix, and which argument is their input; none of a lookup.
_READERS: dict[object, int | None] = {
    aten.matmul.default: 0,
    aten.linear.default: 0,
    op("scaled_linear"): 0,
    aten.embedding.default: None,
}

#: Ops between a lookup and a product that move no element out of its group.
_THROUGH = frozenset({aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim})


def rotate_codebooks(program: Program, codes_of: Callable[[Weight], Sequence[Any] | str | None]) -> Fired:
    """Put weights into codebook form, with rotations around them.

    Args:
        codes_of: a weight's codes (``weights.codes.Codes``), for each of its sites; None if it is to stay float, or why
            it does although its scheme is one of codes.
    """
    fired, turned = Fired(), dict[tuple[FxNode, int], FxNode]()
    found: dict[str, list[Any]] = {}
    for node in list(program.graph.nodes):
        if node.op != "placeholder" or node.name not in program.weights:
            continue
        readers = _readers(node)
        codes = codes_of(program.weights[node.name]) if readers else None
        if isinstance(codes, str):
            program.weights[node.name] = replace(program.weights[node.name], uncoded=codes)
        elif codes is not None:
            found[node.name] = list(codes)
            program.weights[node.name] = _coded(program.weights[node.name], found[node.name])
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target not in _READERS:
            continue
        at = _READERS[node.target]
        table = _behind(node.args[0 if at is None else 1])
        if table.name not in found:
            continue
        group = found[table.name][0].group
        if at is None:
            behind = program.call(node.next, op("hadamard"), (node, group), like=node)
            node.replace_all_uses_with(behind, delete_user_cb=lambda user, behind=behind: user is not behind)
        else:
            x = node.args[0]
            if (x, group) not in turned:
                turned[x, group] = program.call(node, op("hadamard"), (x, group), like=node)
            node.args = (turned[x, group], *node.args[1:])
        fired.add("rotate_codebooks", layer_of(node))
    return fired


def cancel_rotations(program: Program) -> Fired:
    """Two rotations behind each other are none, if what lies between them keeps groups together."""
    fired = Fired()
    for second in program.nodes(op("hadamard")):
        first = second.args[0]
        while first.op == "call_function" and first.target is not op("hadamard"):
            if len(first.users) != 1 or not _keeps_groups(first, second.args[1]):
                break
            first = first.args[0]
        if first.target is op("hadamard") and first.args[1] == second.args[1] and len(first.users) == 1:
            first.replace_all_uses_with(first.args[0])
            second.replace_all_uses_with(second.args[0])
            fired.add("cancel_rotations", layer_of(second))
    program.sweep()
    return fired


def _keeps_groups(node: FxNode, group: int) -> bool:
    """Whether an op of one value leaves its groups of the last axis as they are, or times one number each."""
    value = node.args[0]
    if node.target is aten.mul.Tensor:
        other = node.args[1]
        return hasattr(other, "meta") and other.meta["val"].shape[-1] == 1
    return node.target in _THROUGH and all(n.meta["val"].shape[-1] % group == 0 for n in (value, node))


def _readers(table: FxNode) -> list[FxNode]:
    """What reads a weight, through slices of its rows; nothing if anything but products and lookups does."""
    found = []
    for user in table.users:
        if user.target is aten.slice.Tensor and user.args[1] == 0:
            inner = _readers(user)
            if not inner:
                return []
            found += inner
        elif user.target not in _READERS or user.args[0 if _READERS[user.target] is None else 1] is not table:
            return []
        else:
            found.append(user)
    return found


def _behind(table: FxNode) -> FxNode:
    while table.op == "call_function" and table.target is aten.slice.Tensor:
        table = table.args[0]
    return table


def _coded(weight: Weight, codes: list[Any]) -> Weight:
    """A weight without its rotation, in its own layout."""
    matrices = [torch.from_numpy(c.rotated()) for c in codes]
    if weight.parts[0].source.endswith("/embedding"):
        value = matrices[0]
    elif weight.value.dim() == 3:
        value = torch.stack([m.t() for m in matrices])
    else:
        value = matrices[0].t()
    if value.shape != weight.value.shape:
        raise AssertionError(f"{weight.name}: codes of {tuple(value.shape)} for {tuple(weight.value.shape)}")
    return replace(weight, value=value.contiguous(), codes=tuple(codes))
