"""Rewrites that are exact in real arithmetic and move work out of the step."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from needle_export.graph.ops import op
from needle_export.graph.passes.base import Fired, Left
from needle_export.graph.passes.constants import derived_parts
from needle_export.graph.program import CONSTANT, FxNode, Made, Part, Program, Weight, layer_of

aten = torch.ops.aten

#: A weight up to this many elements may take a folded factor; it is then stored in float32.
FOLD_LIMIT = 1 << 16


def fold_gates(program: Program) -> Fired:
    """A constant times a norm is a norm with another scale: ``g * rms_norm(x, s) = rms_norm(x, g * s)``."""
    fired = Fired()
    norm = op("rms_norm")
    for node in program.nodes(aten.mul.Tensor):
        for factor, normed in (node.args, node.args[::-1]):
            gain = program.weight_of(factor)
            if gain is None or not isinstance(normed, fx.Node) or normed.target is not norm:
                continue
            scale = program.weight_of(normed.args[1])
            if scale is None or len(normed.users) != 1:
                continue
            value = gain.value * scale.value
            made = Made(aten.mul.Tensor, (gain, scale))
            merged = Weight(f"{scale.name}.gated", value, derived_parts(value, [scale]), True, made=made)
            args = (normed.args[0], program.add_weight(merged), normed.args[2])
            node.replace_all_uses_with(program.call(node, norm, args, like=normed))
            fired.add("fold_gates", layer_of(node))
            break
    program.sweep()
    return fired


def fold_bias(program: Program, diagonals: bool = True) -> Fired:
    """``c + x @ W`` becomes a linear with bias, and a diagonal behind a small one goes into it, if ``diagonals``."""
    fired = Fired()
    linear = op("scaled_linear")
    for node in program.nodes(aten.add.Tensor):
        product, constant = node.args
        if not isinstance(product, fx.Node) or product.target is not aten.matmul.default:
            continue
        weight = program.weight_of(product.args[1])
        if weight is None or isinstance(constant, fx.Node) or len(product.users) != 1:
            continue
        width = int(weight.value.shape[-1])
        nobodys = (Part(f"{weight.name}.bias", CONSTANT, -1, width),)
        bias = Weight(f"{weight.name}.bias", torch.full((width,), float(constant)), nobodys, True)
        one = Weight(f"{weight.name}.one", torch.ones(()), _one_part(weight, 1), True)
        args = (product.args[0], product.args[1], program.add_weight(bias), program.add_weight(one))
        node.replace_all_uses_with(program.call(node, linear, args, like=node))
        fired.add("fold_bias", layer_of(node))
    program.sweep()
    for node in program.nodes(aten.mul.Tensor) if diagonals else ():
        factor, inner = node.args
        diagonal = program.weight_of(factor)
        if diagonal is None or not isinstance(inner, fx.Node) or inner.target is not linear:
            continue
        weight, bias2 = (program.weight_of(a) for a in inner.args[1:3])
        if weight is None or bias2 is None or len(inner.users) != 1 or weight.value.numel() > FOLD_LIMIT:
            continue
        made = Made(aten.mul.Tensor, (weight, diagonal))
        scaled = Weight(f"{weight.name}.scaled", weight.value * diagonal.value, weight.parts, True, made=made)
        moved = Weight(f"{bias2.name}.scaled", bias2.value * diagonal.value, diagonal.parts, True)
        # A bias of ones becomes the diagonal itself.
        bias = factor if bool((bias2.value == 1).all()) else program.add_weight(moved)
        args = (inner.args[0], program.add_weight(scaled), bias, inner.args[3])
        node.replace_all_uses_with(program.call(node, linear, args, like=inner))
        fired.add("fold_diagonal", layer_of(node))
    program.sweep()
    return fired


def _one_part(weight: Weight, elements: int) -> tuple[Part, ...]:
    first = weight.parts[0]
    return (Part(first.source, first.role, first.layer, elements),)


def trim_kronecker(program: Program) -> Fired:
    """Drop the padding around a Kronecker product: rows of its first factor that meet zeros, columns that are cut.

    ``pad(x)`` with whole rows of zeros multiplies only the first rows of the factor; a result cut to whole
    rows needs only the first columns.
    """
    fired = Fired()
    kron = op("kronecker")
    for node in program.nodes(kron):
        x = node.args[0]
        inner, diagonal = x, None
        if isinstance(x, fx.Node) and x.target is aten.mul.Tensor and program.weight_of(x.args[0]) is not None:
            diagonal, inner = program.weight_of(x.args[0]), x.args[1]
        if inner.target is not aten.pad.default or len(inner.users) != 1:
            continue
        width, block = int(inner.args[0].meta["val"].shape[-1]), int(node.args[2].meta["val"].shape[0])
        a = program.weight_of(node.args[1])
        if width % block or a is None:
            fired.left.append(
                Left(
                    "trim_kronecker",
                    layer_of(node),
                    node.name,
                    f"the width {width} is not a multiple of the factor's {block}",
                )
            )
            continue
        source = inner.args[0]
        if diagonal is not None:
            cut = Weight(f"{diagonal.name}.cut", diagonal.value[:width].contiguous(), _one_part(diagonal, width))
            source = program.call(node, aten.mul.Tensor, (program.add_weight(cut), source), like=node)
        rows = a.value[: width // block].contiguous()
        # Named as the matrix that it is by rows of outputs.
        new_a = program.add_weight(Weight(f"{a.name}[:,:{len(rows)}]", rows, _one_part(a, rows.numel())))
        node.replace_all_uses_with(program.call(node, kron, (source, new_a, node.args[2]), like=node))
        fired.add("trim_kronecker", layer_of(node))
    program.sweep()
    for node in program.nodes(aten.slice.Tensor):
        scaled, dim, start, end = node.args
        if (
            start != 0
            or scaled.target is not aten.mul.Tensor
            or dim % scaled.meta["val"].dim() != scaled.meta["val"].dim() - 1
        ):
            continue
        diagonal, product = program.weight_of(scaled.args[0]), scaled.args[1]
        if diagonal is None or product.target is not kron or len(product.users) != 1 or len(scaled.users) != 1:
            continue
        a, block = program.weight_of(product.args[1]), int(product.args[2].meta["val"].shape[1])
        if end % block:
            reason = f"the width {end} is not a multiple of the factor's {block}"
            fired.left.append(Left("trim_kronecker", layer_of(node), node.name, reason))
        if a is None or end % block:
            continue
        columns = a.value[:, : end // block].contiguous()
        name = f"{a.name}[:{columns.shape[1]}]"
        new_a = program.add_weight(Weight(name, columns, _one_part(a, columns.numel())))
        short = program.call(node, kron, (product.args[0], new_a, product.args[2]), like=product)
        cut = Weight(f"{diagonal.name}.cut", diagonal.value[:end].contiguous(), _one_part(diagonal, end))
        node.replace_all_uses_with(program.call(node, aten.mul.Tensor, (program.add_weight(cut), short), like=node))
        fired.add("trim_kronecker", layer_of(node))
    program.sweep()
    return fired


def absorb_diagonal(program: Program) -> Fired:
    """Move the MLP's first diagonal into the norm before it.

    The norm's other reader is the small conditioning matrix, whose rows take the inverse. Left alone where
    an entry of the diagonal is so small that its inverse would amplify rounding.
    """
    fired = Fired()
    norm = op("rms_norm")
    for node in program.nodes(aten.mul.Tensor):
        diagonal, normed = program.weight_of(node.args[0]), node.args[1]
        if diagonal is None or not isinstance(normed, fx.Node) or normed.target is not norm:
            continue
        scale = program.weight_of(normed.args[1])
        others = [u for u in normed.users if u is not node]
        matrices = [program.weight_of(u.args[1]) for u in others if u.target is aten.matmul.default]
        if (
            scale is None
            or len(matrices) != len(others)
            or any(m is None or m.value.numel() > FOLD_LIMIT for m in matrices)
        ):
            continue
        size = diagonal.value.abs()
        if float(size.min()) < 1e-2 * float(size.max()):
            fired.left.append(
                Left(
                    "absorb_diagonal",
                    layer_of(node),
                    node.name,
                    "the diagonal has entries too small to invert",
                )
            )
            continue
        made = Made(aten.mul.Tensor, (scale, diagonal))
        merged = Weight(f"{scale.name}.d1", scale.value * diagonal.value, scale.parts, True, made=made)
        args = (normed.args[0], program.add_weight(merged), normed.args[2])
        new = program.call(normed, norm, args, like=normed)
        for user, matrix in zip(others, matrices, strict=True):
            assert matrix is not None
            column = replace(diagonal, value=diagonal.value.unsqueeze(-1))
            made = Made(aten.div.Tensor, (matrix, column))
            inverse = Weight(f"{matrix.name}.d1", matrix.value / column.value, matrix.parts, True, made=made)
            replaced = program.call(user, aten.matmul.default, (new, program.add_weight(inverse)), like=user)
            user.replace_all_uses_with(replaced)
        node.replace_all_uses_with(new)
        fired.add("absorb_diagonal", layer_of(node))
    program.sweep()
    return fired


def cancel_residual(program: Program) -> Fired:
    """A block returns what it adds: in ``(u + a + m) - u`` the u cancels."""
    fired = Fired()
    for node in program.nodes(aten.sub.Tensor):
        total, base = node.args
        terms = _terms(total)
        if not isinstance(base, fx.Node) or terms.count(base) != 1 or len(terms) < 2:
            continue
        rest = [t for t in terms if t is not base]
        value = rest[0]
        for term in rest[1:]:
            value = program.call(node, aten.add.Tensor, (value, term), like=node)
        node.replace_all_uses_with(value)
        fired.add("cancel_residual", layer_of(node))
    program.sweep()
    return fired


def _terms(node: FxNode) -> list[FxNode]:
    if node.target is aten.add.Tensor and all(isinstance(a, fx.Node) for a in node.args):
        left, right = node.args
        return [*_terms(left), *_terms(right)]
    return [node]


def drop_unread_mixing(program: Program) -> Fired:
    """The mean over lanes doesn't see the last block's mixing.

    Sinkhorn ends with the columns, so every column of R sums to 1 and ``mean(R @ S) = mean(S)``.
    """
    fired = Fired()
    for node in program.nodes(aten.mean.dim):
        write = node.args[0]
        if write.target is not op("lane_write") or node.args[1] != [-2] or len(node.args) > 2:
            continue
        stream, mix, gates, y, gain = write.args
        if mix.target is not op("sinkhorn") or len(write.users) != 1:
            continue
        mean = program.call(node, aten.mean.dim, (stream, [-2]), like=node)
        share = program.call(node, aten.mean.dim, (gates, [-1], True), like=node)
        share = program.call(node, aten.mul.Tensor, (share, gain), like=node)
        written = program.call(node, aten.mul.Tensor, (share, y), like=node)
        node.replace_all_uses_with(program.call(node, aten.add.Tensor, (mean, written), like=node))
        fired.add("drop_unread_mixing", layer_of(node))
    program.sweep()
    return fired


def fuse_add_norm(program: Program) -> Fired:
    """A sum and the norm of it are one op."""
    fired = Fired()
    for node in program.nodes(op("rms_norm")):
        total = node.args[0]
        if total.target is not aten.add.Tensor or not all(isinstance(a, fx.Node) for a in total.args):
            continue
        if (
            any(a.meta["val"].shape != total.meta["val"].shape for a in total.args)
            or node.args[1].meta["val"].dim() != 1
        ):
            continue
        fused = program.call(total, op("add_rms_norm"), (*total.args, *node.args[1:]), like=node)
        normed, added = (program.call(total, operator.getitem, (fused, i), like=node) for i in (0, 1))
        node.replace_all_uses_with(normed)
        total.replace_all_uses_with(added)
        fired.add("add_rms_norm", layer_of(node))
    program.sweep()
    return fired


def hoist_norms(program: Program) -> Fired:
    """Norms of all slices of one tensor, with one scale, are slices of its norm."""
    fired = Fired()
    norm = op("rms_norm")
    for value in list(program.graph.nodes):
        picks = [u for u in value.users if u.target is aten.select.int]
        norms = [next(iter(p.users)) for p in picks if len(p.users) == 1]
        if len(picks) < 2 or len(norms) != len(picks) or len(picks) != len(value.users):
            continue
        if any(n.target is not norm or n.args[1:] != norms[0].args[1:] for n in norms):
            continue
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        first = min(picks, key=order.__getitem__)
        whole = program.call(first, norm, (value, *norms[0].args[1:]), like=norms[0])
        for pick, normed in zip(picks, norms, strict=True):
            moved = program.call(pick, aten.select.int, (whole, *pick.args[1:]), like=pick)
            normed.replace_all_uses_with(moved)
        fired.add("hoist_norms")
    program.sweep()
    return fired
