"""Attention over caches: keys 48 wide, values 64, groups folded into the query axis and never repeated.

With states, new rows are written first and one ``scaled_dot_product_attention`` reads the cache. Into a ring, more than
one row is written behind the reading, as new rows replace ones that the first queries still see; that one reads the
ring as it was and the new rows beside it. A key state holds two positions a row: 96 wide instead of 48, a multiple of
32 with nothing padded.

Without states (iOS 17) caches are inputs, new rows are outputs, and the host writes them; attention is four ops.
"""

from __future__ import annotations

import math

import numpy as np

from needle_export.errors import Unsupported
from needle_export.graph.ops import op
from needle_export.graph.program import FxNode
from needle_export.targets.coreml.builder import Builder
from needle_export.targets.coreml.elementwise import Lowering
from needle_export.targets.coreml.fused import read_state
from needle_export.targets.views import Ref


def cached_attention(b: Builder, n: FxNode) -> None:
    """One block's attention at T new rows; leaves the caches, or the new rows, for the next call."""
    q, k, v, k_cache, v_cache, _, scale, ring = n.args
    rows, heads, width = b.dims_of(q)
    groups, out_width = b.dims_of(v)[1:]
    if not math.isclose(scale, 1 / math.sqrt(width), rel_tol=1e-6):
        raise Unsupported("attention's scale isn't 1/sqrt of the key width", where=n.name)
    new = {
        "k": _by_group(b, b.get(k, (rows, groups, width))),
        "v": _by_group(b, b.get(v, (rows, groups, out_width))),
    }
    names = {"k": k_cache.name, "v": v_cache.name}
    mask = Ref(b.inputs["ring_mask" if ring else "mask"], ())
    if b.stateful and (rows == 1 or not ring):
        seen = {c: _written(b, names[c], new[c], ring) for c in "kv"}
    else:
        old = {c: _unpacked(b, read_state(b, names[c]), new[c].dims[2]) for c in "kv"}
        seen = {c: b.concat([old[c], new[c]], 1) for c in "kv"}
        for c in "kv":
            if b.stateful:
                _keep_real(b, names[c], old[c], new[c])
            else:
                b.left[names[c]] = new[c]
    folded = _folded(b, b.get(q, (rows, heads, width)), groups)
    attended = _attend(b, folded, seen["k"], seen["v"], _mask(b, mask, heads // groups))
    if rows > 1:
        attended = b.transpose(b.reshape(attended, (heads, rows, out_width)), (1, 0, 2))
    b.env[n] = (b.reshape(attended, (rows, heads * out_width)), None, None)


def _by_group(b: Builder, x: Ref) -> Ref:
    """[T, G, D] -> [G, T, D]."""
    rows, groups, width = x.dims
    return b.reshape(x, (groups, 1, width)) if rows == 1 else b.transpose(x, (1, 0, 2))


def _folded(b: Builder, q: Ref, groups: int) -> Ref:
    """Queries [T, H, D] -> [1, G, R T, D]: those of one group behind each other."""
    rows, heads, width = q.dims
    by_head = q if rows == 1 else b.transpose(q, (1, 0, 2))
    return b.reshape(by_head, (1, groups, heads // groups * rows, width))


def _mask(b: Builder, mask: Ref, share: int) -> Ref:
    """The mask for queries of a group: rows once for every head, made once a call."""
    if b.rows == 1:
        return Ref(mask.value, tuple(int(d) for d in mask.value.shape))
    key = ("tiled", mask.value)
    if key not in b.memo:
        b.memo[key] = b.op("tile", x=mask, reps=[share, 1])
    tiled: Ref = b.memo[key]
    return tiled


def _attend(b: Builder, q: Ref, k: Ref, v: Ref, mask: Ref) -> Ref:
    """q [1, G, M, Dqk], k [G, S, Dqk], v [G, S, Dv], mask [M or 1, S] -> [1, G, M, Dv]."""
    keys, values = b.reshape(k, (1, *k.dims)), b.reshape(v, (1, *v.dims))
    if b.stateful:
        return b.ref_of(b.op("scaled_dot_product_attention", query=q, key=keys, value=values, attn_mask=mask))
    scores = b.matmul(b.times(q, 1 / math.sqrt(q.dims[-1])), keys, transpose_y=True)
    return b.matmul(b.unary("softmax", b.add(scores, mask), axis=-1), values)


def _written(b: Builder, name: str, new: Ref, ring: bool) -> Ref:
    """A cache with new rows [G, T, D] in place; its rows [G, S, D]."""
    held = b.ref_of(b.op("read_state", input=b.inputs[name]))
    updated = _update(b, held, new, name, ring)
    value = b.ref_of(b.op("coreml_update_state", state=b.inputs[name], value=updated))
    value = value if b.store.half else b.ref_of(b.op("cast", x=value, dtype="fp32"))
    return _unpacked(b, value, new.dims[2])


def _update(b: Builder, held: Ref, new: Ref, name: str, ring: bool) -> Ref:
    groups, rows, width = new.dims
    side = held.dims[2] // width
    begin, size = _place(b, width, side, rows, ring)
    update = new if b.store.half else b.ref_of(b.op("cast", x=new, dtype="fp16"))
    if rows > 1:
        update = b.reshape(update, (groups, rows // side, side * width))
    key = ("end", begin.value, size)
    if key not in b.memo:
        b.memo[key] = b.op("add", x=begin, y=b.constant(np.asarray((groups, *size)), np.int32))
    return b.ref_of(b.op("slice_update", x=held, update=update, begin=begin, end=b.memo[key]))


def _place(b: Builder, width: int, side: int, rows: int, ring: bool) -> tuple[Ref, tuple[int, int]]:
    """Where new rows go: the first index [0, row, column], and how many rows and columns."""
    key = ("begin", width, side, ring)
    size = (1, width) if rows == 1 else (rows // side, side * width)
    if key not in b.memo:
        slots = Ref(b.inputs["slots"], (2,))
        slot = b.slice(slots, 0, 1 if ring else 0, 1)
        zero = b.constant(np.zeros(1), np.int32)
        column = zero
        if side > 1:
            count = b.constant(np.full(1, side), np.int32)
            if rows == 1:
                within = b.op("mod", x=slot, y=count)
                column = b.ref_of(b.op("mul", x=within, y=b.constant(np.full(1, width), np.int32)))
            slot = b.ref_of(b.op("floor_div", x=slot, y=count))
        b.memo[key] = b.concat([zero, slot, column], 0)
    return b.memo[key], size


def _unpacked(b: Builder, held: Ref, width: int) -> Ref:
    """Rows of several positions side by side as rows of one: [G, S/P, P D] -> [G, S, D]."""
    groups, rows, wide = held.dims
    return b.reshape(held, (groups, rows * (wide // width), width))


def _keep_real(b: Builder, name: str, old: Ref, new: Ref) -> None:
    """Write new rows into a ring, behind the reading; where they are padding, the old rows stay.

    Both are multiplied by 0 or 1 and added, which changes no bit of the one that stays.
    """
    groups, rows, width = new.dims
    keep, drop = _real(b, rows)
    slot = b.slice(Ref(b.inputs["slots"], (2,)), 0, 1, 1)
    key = ("ring_begin",)
    if key not in b.memo:
        zero = b.constant(np.zeros(1), np.int32)
        b.memo[key] = b.concat([zero, slot, zero], 0)
    begin = b.memo[key]
    before = b.ref_of(b.op("slice_by_size", x=old, begin=begin, size=np.asarray((groups, rows, width), np.int32)))
    merged = b.add(b.mul(new, keep), b.mul(before, drop))
    held = b.ref_of(b.op("read_state", input=b.inputs[name]))
    # The merged rows in the state's own layout.
    updated = _update(b, held, merged, name, True)
    b.op("coreml_update_state", state=b.inputs[name], value=updated)


def _real(b: Builder, rows: int) -> tuple[Ref, Ref]:
    """1 for real positions and 0 for padding, and the opposite: [1, T, 1] each."""
    if "real" not in b.memo:
        places = b.constant(np.arange(rows).reshape(1, -1, 1), np.int32)
        count = Ref(b.inputs["count"], (1,))
        kinds = []
        for compare in ("less", "greater_equal"):
            found = b.op(compare, x=places, y=count)
            kinds.append(b.op("cast", x=found, dtype=b.real))
        b.memo["real"] = tuple(kinds)
    real: tuple[Ref, Ref] = b.memo["real"]
    return real


LOWERINGS: dict[object, Lowering] = {op("cached_attention"): cached_attention}
