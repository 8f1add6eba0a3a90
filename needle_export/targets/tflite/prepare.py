"""Rewrites of a fused program that pay on this target: factors that move into weights."""

from __future__ import annotations

import operator

import torch
from torch import fx

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode, Part, Program, Weight

aten = torch.ops.aten


def prepare(program: Program, fold_matrices: bool) -> None:
    """Fold what can be folded.

    Args:
        fold_matrices: whether matrices may take factors; not where they are stored as the checkpoint's halves, nor
            where quantisation would meet other numbers than the checkpoint's.
    """
    fold_attention_scale(program)
    fold_dot_scale(program)
    batch_norms(program)
    if fold_matrices:
        fold_norm_scales(program)
    program.sweep()


def fold_attention_scale(program: Program) -> None:
    """1/sqrt(Dqk) goes into the scale of the norm before the rotation, which is linear."""
    for node in program.nodes(op("cached_attention")):
        piece, scale = node.args[0], node.args[6]
        if piece.target is not operator.getitem or piece.args[0].target is not aten.split_with_sizes.default:
            continue
        turned, sizes, _ = piece.args[0].args
        if turned.target is not op("rotary") or turned.args[0].target is not op("rms_norm") or piece.args[1] != 0:
            continue
        norm = turned.args[0]
        weight = program.weight_of(norm.args[1])
        if weight is None or weight.value.dim() != 2 or len(norm.users) != 1:
            continue
        value = weight.value.clone()
        value[: sizes[0]] *= scale
        replace_arg(norm, 1, program.add_weight(Weight(f"{weight.name}.scaled", value, weight.parts, True)))
        replace_arg(node, 6, 1.0)


def fold_dot_scale(program: Program) -> None:
    """The factor of an inner product goes into the scale of a norm that only it reads."""
    for node in program.nodes(op("row_dot")):
        for norm in node.args[:2]:
            weight = program.weight_of(norm.args[1]) if norm.target is op("rms_norm") else None
            if weight is not None and len(norm.users) == 1 and bool((weight.value == 1).all()):
                scale = torch.full_like(weight.value, node.args[2])
                parts = tuple(Part(p.source, p.role, p.layer, scale.numel()) for p in weight.parts[:1])
                replace_arg(norm, 1, program.add_weight(Weight(f"{weight.name}.dot", scale, parts, True)))
                replace_arg(node, 2, 1.0)
                break


def batch_norms(program: Program) -> None:
    """Norms of all pieces of one value with one uniform scale are one norm before the cut."""
    for split in program.nodes(aten.split_with_sizes.default):
        value = split.args[0]
        norms: list[FxNode] = []
        rank = value.meta["val"].dim()
        if split.args[2] % rank == rank - 1:
            continue
        for piece in split.users:
            reader = _only_user(piece)
            reader = _only_user(reader) if reader is not None and reader.target is aten.squeeze.dim else reader
            norms.append(reader if reader is not None and reader.target is op("rms_norm") else None)
        scales = [program.weight_of(n.args[1]) if n is not None else None for n in norms]
        first = scales[0] if scales else None
        if len(norms) < 2 or first is None:
            continue
        if any(s is None or not torch.equal(s.value, first.value) for s in scales):
            continue  # which leaves no piece without a norm either
        if len({n.args[2] for n in norms}) > 1 or bool((first.value != first.value.flatten()[0]).any()):
            continue
        whole = program.call(split, op("rms_norm"), (value, norms[0].args[1], norms[0].args[2]), like=split)
        for norm in norms:
            norm.replace_all_uses_with(norm.args[0])
        replace_arg(split, 0, whole)
        program.sweep()


def _only_user(node: FxNode) -> FxNode | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def fold_norm_scales(program: Program) -> None:
    """A norm's scale becomes a factor of the rows of the matrices that read it, if only matrices do."""
    matmul = aten.matmul.default
    for node in [*program.nodes(op("rms_norm")), *program.nodes(op("add_rms_norm"))]:
        at = 1 if node.target is op("rms_norm") else 2
        result = node if at == 1 else next((u for u in node.users if u.args[1] == 0), None)
        scale = program.weight_of(node.args[at])
        if result is None or scale is None or scale.value.dim() != 1 or bool((scale.value == 1).all()):
            continue
        users = list(result.users)
        matrices = [program.weight_of(u.args[1]) if u.target is matmul and u.args[0] is result else None for u in users]
        if any(m is None or m.value.dim() != 2 for m in matrices):
            continue
        for user, matrix in zip(users, matrices, strict=True):
            assert matrix is not None
            value = matrix.value * scale.value.unsqueeze(-1)
            replace_arg(user, 1, program.add_weight(Weight(matrix.name, value, matrix.parts, True)))
        ones = Weight(f"{scale.name}.one", torch.ones_like(scale.value), (), True)
        replace_arg(node, at, program.add_weight(ones))
        program.sweep()


def replace_arg(node: FxNode, index: int, value: fx.Node | float) -> None:
    node.args = (*node.args[:index], value, *node.args[index + 1 :])
