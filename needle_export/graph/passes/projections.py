"""One matmul for projections that read the same input, and one split instead of many slices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from needle_export.graph.ops import op
from needle_export.graph.passes.base import Fired
from needle_export.graph.program import FxNode, Made, Part, Program, Weight, layer_of

aten = torch.ops.aten


def merge_projections(program: Program, scheme_of: Callable[[Sequence[Part]], str]) -> Fired:
    """Concatenate the weights of matmuls that share their input and their scheme; their results become a split.

    Args:
        scheme_of: a weight's number format by its parts.
    """
    fired = Fired()
    groups: dict[tuple[FxNode, str], list[FxNode]] = {}
    for node in program.nodes(aten.matmul.default):
        if program.weight_of(node.args[1]) is not None and program.weight_of(node.args[0]) is None:
            kind = scheme_of(program.weights[node.args[1].name].parts)
            groups.setdefault((node.args[0], kind), []).append(node)
    for (x, _), matmuls in groups.items():
        weights = [program.weights[m.args[1].name] for m in matmuls]
        if len(matmuls) < 2 or len({tuple(w.value.shape[:-1]) for w in weights}) > 1:
            continue
        merged = program.add_weight(
            Weight(
                "+".join([weights[0].name, *(w.name.rpartition(".")[2] for w in weights[1:])]),
                torch.cat([w.value for w in weights], dim=-1),
                tuple(p for w in weights for p in w.parts),
                any(w.folded for w in weights),
            )
        )
        product = program.call(matmuls[0], aten.matmul.default, (x, merged), like=matmuls[0])
        sizes = [int(w.value.shape[-1]) for w in weights]
        _split(program, matmuls[0], product, sizes, -1, matmuls)
        fired.add("merge_projections", layer_of(matmuls[0]))
        # A later group's weights may be these placeholders' neighbours; free the sources now, as two copies
        # of every projection are more memory than the passes need.
        program.sweep()
    _rejoin(program)
    return fired


def _split(program: Program, before: FxNode, value: FxNode, sizes: list[int], dim: int, olds: list[FxNode]) -> None:
    split = program.call(before, aten.split_with_sizes.default, (value, sizes, dim), like=before)
    for index, old in enumerate(olds):
        piece = program.call(before, operator.getitem, (split, index), like=old)
        old.replace_all_uses_with(piece)


def _rejoin(program: Program) -> None:
    """Neighbouring pieces of one split that are concatenated are one wider piece of it."""
    for cat in program.nodes(aten.cat.default):
        pieces = list(cat.args[0])
        start = 0
        while start < len(pieces):
            count = 1
            while start + count < len(pieces) and _neighbours(pieces[start : start + count + 1]):
                count += 1
            if count > 1:
                split, first = pieces[start].args
                whole = count == len(pieces)
                wide = regroup(program, split, first, count, cat if whole else None)
                pieces[start : start + count] = [wide]
                if not whole:
                    cat.args = (pieces, *cat.args[1:])
                    program.sweep()
            start += 1


def _neighbours(pieces: list[FxNode]) -> bool:
    """Whether values are pieces of one split, behind each other, that nothing else reads."""
    if not all(isinstance(p, fx.Node) and p.target is operator.getitem and len(p.users) == 1 for p in pieces):
        return False
    split, first = pieces[0].args
    if split.target is not aten.split_with_sizes.default:
        return False
    return all(p.args == (split, first + i) for i, p in enumerate(pieces))


def regroup(program: Program, split: FxNode, first: int, count: int, joined: FxNode | None) -> FxNode:
    """Make ``count`` pieces of a split, from ``first`` on, one piece; returns it.

    ``joined`` is a node whose value it takes over.
    """
    value, sizes, dim = split.args[0], list(split.args[1]), split.args[2]
    new_sizes = [*sizes[:first], sum(sizes[first : first + count]), *sizes[first + count :]]
    if len(new_sizes) == 1:
        wide = value
    else:
        new = program.call(split, aten.split_with_sizes.default, (value, new_sizes, dim), like=split)
        wide = program.call(split, operator.getitem, (new, first), like=split)
        for piece in list(split.users):
            index = piece.args[1]
            if first <= index < first + count:
                continue
            shifted = index if index < first else index - count + 1
            piece.replace_all_uses_with(program.call(split, operator.getitem, (new, shifted), like=piece))
    if joined is not None:
        joined.replace_all_uses_with(wide)
        program.sweep()
    return wide


def merge_lane_gates(program: Program) -> Fired:
    """Read and write gates of a block in one product, their scalars folded into the weights.

    Only where weights are stored in a format that folding doesn't spoil: a scaled fp16 weight is not the
    checkpoint's any more.
    """
    fired = Fired()
    by_input: dict[FxNode, list[FxNode]] = {}
    for node in program.nodes(op("scaled_linear")):
        users = list(node.users)
        if len(users) == 1 and users[0].target is aten.sigmoid.default:
            by_input.setdefault(node.args[0], []).append(node)
    for x, gates in by_input.items():
        ws = [[w for a in g.args[1:] if (w := program.weight_of(a)) is not None] for g in gates]
        if len(gates) < 2 or any(len(row) < 3 for row in ws):
            continue
        weight = torch.cat([w.value * a.value for w, _, a in ws], dim=-1)
        bias = torch.cat([b.value for _, b, _ in ws])
        name = ws[0][0].name
        parts = [tuple(p for row in ws for p in row[i].parts) for i in (0, 1)]
        one = program.add_weight(Weight(f"{name}.one", torch.ones(()), ws[0][2].parts, True))
        args = (
            x,
            program.add_weight(Weight(f"{name}+post", weight, parts[0], True)),
            program.add_weight(Weight(f"{name}+post.bias", bias, parts[1])),
            one,
        )
        linear = program.call(gates[0], op("scaled_linear"), args, like=gates[0])
        sigmoid = program.call(gates[0], aten.sigmoid.default, (linear,), like=gates[0])
        olds = [next(iter(g.users)) for g in gates]
        _split(program, gates[0], sigmoid, [int(r[1].value.numel()) for r in ws], -1, olds)
        fired.add("merge_lane_gates", layer_of(gates[0]))
    program.sweep()
    return fired


def join_heads(program: Program) -> Fired:
    """Normalise and rotate query and key heads together; they differ in their norms' scales only."""
    fired = Fired()
    rotary, norm = op("rotary"), op("rms_norm")
    for attention in program.nodes(op("cached_attention")):
        q, k = attention.args[0], attention.args[1]
        if q.target is not rotary or k.target is not rotary or q.args[1:] != k.args[1:]:
            continue
        qn, kn = q.args[0], k.args[0]
        if qn.target is not norm or kn.target is not norm or qn.args[2] != kn.args[2]:
            continue
        scales = [w for n in (qn, kn) if (w := program.weight_of(n.args[1])) is not None]
        pieces = qn.args[0].args[0], kn.args[0].args[0]
        if len(scales) < 2 or any(p.target is not operator.getitem or len(p.users) != 1 for p in pieces):
            continue
        split, first = pieces[0].args
        if pieces[1].args != (split, first + 1) or split.target is not aten.split_with_sizes.default:
            continue
        heads, groups = int(qn.meta["val"].shape[-2]), int(kn.meta["val"].shape[-2])
        rows, width = qn.args[0].args[1][0], int(qn.meta["val"].shape[-1])
        pair = [_repeated(s, count, width) for s, count in zip(scales, (heads, groups), strict=True)]
        wide = regroup(program, split, first, 2, None)
        before = _after(program, wide, q, k)
        folded = program.add_weight(
            Weight(
                f"layers.{layer_of(q)}.attention.qk_norm",
                torch.cat([s.value for s in pair]).contiguous(),
                tuple(p for s in pair for p in s.parts),
                True,
                made=Made(aten.cat.default, tuple(pair)),
            )
        )
        shaped = program.call(before, aten.reshape.default, (wide, [rows, heads + groups, width]), like=q)
        normed = program.call(before, norm, (shaped, folded, qn.args[2]), like=q)
        turned = program.call(before, rotary, (normed, *q.args[1:]), like=q)
        _split(program, before, turned, [heads, groups], -2, [q, k])
        fired.add("join_heads", layer_of(q))
        program.sweep()
    return fired


def _after(program: Program, wide: FxNode, q: FxNode, k: FxNode) -> FxNode:
    """The first of the two rotations: everything both need stands before it, or can."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    angles = max((order[a], a) for a in q.args[1:])[1]
    place = min(q, k, key=order.__getitem__)
    if order[place] < max(order[wide], order[angles]):
        raise AssertionError("a rotation stands before its own input")
    return place


def _repeated(weight: Weight, rows: int, width: int) -> Weight:
    """A vector, or what broadcasts like one, as so many equal rows."""
    first = weight.parts[0]
    return Weight(
        weight.name,
        weight.value.expand(rows, width),
        (Part(first.source, first.role, first.layer, rows * width),),
        True,
        made=Made(aten.expand.default, (weight, (rows, width))),
    )


def tile_slices(program: Program) -> Fired:
    """Sibling slices or selections that tile an axis become one split."""
    fired = Fired()
    for value in list(program.graph.nodes):
        users = [u for u in value.users if u.op == "call_function"]
        slices = [u for u in users if u.target is aten.slice.Tensor and u.args[0] is value]
        selects = [u for u in users if u.target is aten.select.int and u.args[0] is value]
        if len(slices) > 1 and len(slices) == len(value.users):
            done = _tile(program, value, slices)
        elif len(selects) > 1 and len(selects) == len(value.users):
            done = _pick(program, value, selects)
        else:
            continue
        if done:
            fired.add("tile_slices")
    program.sweep()
    return fired


def _tile(program: Program, value: FxNode, slices: list[FxNode]) -> bool:
    rank = value.meta["val"].dim()
    dim = slices[0].args[1] % rank
    spans = sorted(
        ((s.args[2], min(s.args[3], int(value.meta["val"].shape[dim])), s) for s in slices),
        key=lambda t: t[0],
    )
    ends = [0, *(e for _, e, _ in spans)]
    tiled = all(start == end for (start, _, _), end in zip(spans, ends, strict=False))
    if not tiled or ends[-1] != value.meta["val"].shape[dim] or any(s.args[1] % rank != dim for s in slices):
        return False
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    before = min(slices, key=order.__getitem__)
    _split(program, before, value, [int(e - s) for s, e, _ in spans], dim - rank, [s for _, _, s in spans])
    return True


def _pick(program: Program, value: FxNode, selects: list[FxNode]) -> bool:
    count = int(value.meta["val"].shape[0])
    by_index = {s.args[2]: s for s in selects}
    if any(s.args[1] != 0 for s in selects) or sorted(by_index) != list(range(count)):
        return False
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    before = min(selects, key=order.__getitem__)
    split = program.call(before, aten.split_with_sizes.default, (value, [1] * count, 0), like=before)
    for index, old in sorted(by_index.items()):
        piece = program.call(before, operator.getitem, (split, index), like=old)
        old.replace_all_uses_with(program.call(before, aten.squeeze.dim, (piece, 0), like=old))
    return True
