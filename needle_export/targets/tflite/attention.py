"""Attention over a cache that the host keeps: keys 48 wide, values 64, groups never repeated.

A step reads the cache as it was and the new rows beside it; the new rows come out, and the host writes them.
So nothing is copied, and a ring is read before its rows are replaced. Caches lie [G, S, D], a group's rows side by
side, and are right operands of the products, which XNNPACK packs. Left ones aren't packed and still take longer: of the
kernel's 16 columns six are used (decision 8).
"""

from __future__ import annotations

import numpy as np

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode
from needle_export.targets.tflite.builder import MASKED, Builder
from needle_export.targets.tflite.elementwise import Lowering
from needle_export.targets.tflite.fused import positions
from needle_export.targets.views import Ref


def cached_attention(b: Builder, n: FxNode) -> None:
    """Scores over cached and new rows, one softmax over both, and their values."""
    q, k, v, k_cache, v_cache, position, scale, ring = n.args
    rows, heads, width = b.dims_of(q)
    size, groups, out_width = v_cache.meta["val"].shape
    share = heads // groups
    scaled = b.ref(q) if scale == 1 else b.mul(b.ref(q), b.constant(scale))
    keys, values = b.ref(k_cache), b.ref(v_cache)
    if rows == 1:
        folded = b.reshape(scaled, (groups, share, width))
        new_keys, new_values = b.get(k, (groups, 1, width)), b.get(v, (groups, 1, out_width))
        old = b.matmul(folded, keys, transpose_y=True)
        new = b.matmul(folded, new_keys, transpose_y=True)
        old = b.add(old, _mask(b, position, size, ring))
        weights = b.softmax(b.concat([old, new], -1))
        seen = b.matmul(b.slice(weights, -1, 0, size), values)
        own = b.mul(b.slice(weights, -1, size, 1), new_values)
        b.env[n] = (b.add(seen, own), new_keys, new_values)
    else:
        # Many queries share one copy of the keys and values behind each other: less than what cutting their scores
        # and weights in two would copy.
        by_head = b.transpose(b.reshape(scaled, (rows, heads, width)), (1, 0, 2))
        new_keys, new_values = b.get(k, (rows, groups, width)), b.get(v, (rows, groups, out_width))
        all_keys = b.concat([keys, b.transpose(new_keys, (1, 0, 2))], 1)
        all_values = b.concat([values, b.transpose(new_values, (1, 0, 2))], 1)
        scores = b.matmul(b.reshape(by_head, (groups, share * rows, width)), all_keys, transpose_y=True)
        scores = b.add(b.reshape(scores, (heads, rows, size + rows)), _whole_mask(b, position, size, ring))
        weights = b.reshape(b.softmax(scores), (groups, share * rows, size + rows))
        out = b.reshape(b.matmul(weights, all_values), (heads, rows, out_width))
        b.env[n] = (b.transpose(out, (1, 0, 2)), new_keys, new_values)
    b.new_rows[k_cache.name], b.new_rows[v_cache.name] = new_keys, new_values


def _mask(b: Builder, position: FxNode, size: int, ring: bool) -> Ref:
    """0 for the rows that each query sees of the cache, a large negative number behind: [T, S].

    Without a ring these are the rows before the chunk. In a ring, row j holds the newest position before the chunk
    that is j modulo S; a query sees it if it exists and is less than S positions back.
    """
    key = ("mask", size, ring)
    if key not in b.memo:
        slots = b.constant(np.arange(size).reshape(1, size), np.int32)
        if not ring:
            seen = b.compare("less", slots, b.reshape(b.get(position), (1, 1)))
        else:
            start = b.reshape(b.get(position), (1, 1))
            whole = b.constant(size, np.int32)
            last = b.binary("sub", start, b.constant(1, np.int32))
            age = b.binary("floor_mod", b.binary("sub", last, slots), whole)
            held = b.binary("sub", last, age)
            at = b.reshape(positions(b, position), (b.rows, 1))
            near = b.compare("less", b.binary("sub", at, held), whole)
            exists = b.compare("greater_equal", held, b.constant(0, np.int32))
            seen = b.compare("logical_and", near, exists)
        b.memo[key] = b.choose(seen, b.constant(0.0), b.constant(MASKED))
    value: Ref = b.memo[key]
    return value


def _whole_mask(b: Builder, position: FxNode, size: int, ring: bool) -> Ref:
    """The cache's mask with the new rows' behind it, which see themselves and what came before: [T, S + T]."""
    key = ("whole mask", size, ring)
    if key not in b.memo:
        later = _later(b)
        b.memo[key] = b.concat([_mask_rows(b, position, size, ring), later], 1)
    value: Ref = b.memo[key]
    return value


def _later(b: Builder) -> Ref:
    """0 for the new rows that each of them sees, itself among them, and a large negative number behind: [T, T]."""
    if not b.store.compact:
        return b.constant(np.triu(np.full((b.rows, b.rows), MASKED, np.float32), 1))
    # An op more a prompt, and a byte for each where there were four.
    behind = b.constant(np.triu(np.ones((b.rows, b.rows), np.bool_), 1), np.bool_)
    return b.choose(behind, b.constant(MASKED), b.constant(0.0))


def _mask_rows(b: Builder, position: FxNode, size: int, ring: bool) -> Ref:
    mask = _mask(b, position, size, ring)
    if mask.dims[0] == b.rows:
        return mask
    return b.add(mask, b.constant(np.zeros((b.rows, 1))))


LOWERINGS: dict[object, Lowering] = {op("cached_attention"): cached_attention}
