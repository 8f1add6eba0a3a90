"""Weights in codebook form: a table of levels is all that Core ML decompresses, and norms multiply outside.

A constant that is nothing but indices into one small float32 table takes what it takes in a container, and is exact.
Norms in its scale would be as exact, but coremltools rewrites that into tables by block, which are half as large again.
So a product is one by group, times the group's norms, summed: ``y[o] = sum_G norm[G, o] (x[G] . u[G, o])``.

Levels and products are float32 in every package, since half precision doesn't hold the levels.

Dimension letters: T positions, O outputs, I inputs, G groups of a row, g elements of a group, N rows looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode, Weight
from needle_export.graph.reference import hadamard
from needle_export.targets.coreml.builder import Builder
from needle_export.targets.views import Dims, Ref

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.linear.default, op("scaled_linear"))


def product(b: Builder, x: Ref, weight: Weight, site: int = 0) -> Ref:
    """x [..., I], rotated, with a coded matrix: [..., O]."""
    levels, norms = _stored(b, weight, site)
    groups, rows, size = levels.dims
    lead = x.dims[:-1]
    key = ("groups", x.value, groups)
    if key not in b.memo:
        count = int(np.prod(lead, dtype=np.int64))
        whole = b.wide(x)
        if count == 1:
            b.memo[key] = b.reshape(whole, (groups, 1, size))
        else:
            b.memo[key] = b.transpose(b.reshape(whole, (count, groups, size)), (1, 0, 2))
    by_group = b.matmul(b.memo[key], levels, transpose_y=True)
    total = b.reduce("sum", b.ref_of(b.op("mul", x=by_group, y=norms)), 0, keep=False)
    return b.reshape(b.narrow(total), (*lead, rows))


def lookup(b: Builder, n: FxNode, weight: Weight) -> None:
    """Rows of a coded table by indices of any shape, not yet rotated back."""
    index = n.args[1]
    levels, norms = _stored(b, weight, 0)
    count = int(np.prod(b.dims_of(index), dtype=np.int64))
    at = b.get(index, (count,))
    units = b.gather(levels, at, 1)  # [G, N, g]
    lengths = b.transpose(b.gather(norms, at, 2), (0, 2, 1))  # [G, N, 1]
    rows = b.ref_of(b.op("mul", x=units, y=lengths))
    rows = b.transpose(rows, (1, 0, 2)) if levels.dims[0] > 1 else rows
    whole = b.reshape(rows, b.dims_of(n))
    b.put(n, whole if all(u.target is op("hadamard") for u in n.users) else b.narrow(whole))


def turn(b: Builder, n: FxNode) -> None:
    """The rotation of groups of the last axis, in float32; read by products, it stays that."""
    x, group = n.args
    dims: Dims = b.dims_of(n)
    matrix = hadamard(torch.eye(group), group).numpy()
    groups, whole = dims[-1] // group, b.wide(b.get(x))
    # Of one row in the shape that a product by groups reads.
    alone = np.prod(dims[:-1], dtype=np.int64) == 1
    parts = b.reshape(whole, (groups, 1, group) if alone else (*dims[:-1], groups, group))
    turned = b.reshape(b.ref_of(b.op("matmul", x=parts, y=matrix, transpose_x=False, transpose_y=False)), dims)
    b.put(n, turned if all(_is_product(b, u) for u in n.users) else b.narrow(turned))


def _is_product(b: Builder, user: FxNode) -> bool:
    """Whether an op multiplies by a coded matrix."""
    if user.target not in _PRODUCTS:
        return False
    table = user.args[1]
    while table.op == "call_function":  # rows of it
        table = table.args[0]
    return bool(b.program.weights[table.name].codes)


def _stored(b: Builder, weight: Weight, site: int) -> tuple[Ref, Ref]:
    """Levels [G, O, g] and norms [G, 1, O] of one of a weight's matrices, both float32."""
    key = ("codes", weight.name, site)
    if key not in b.memo:
        codes = weight.codes[site]
        rows, columns = codes.indices.shape
        groups, size = codes.norms.shape[1], codes.group
        indices = codes.indices.reshape(rows, groups, size).transpose(1, 0, 2)
        norms = codes.norms.T.reshape(groups, 1, rows)
        levels, halves = b.store.codes(weight, site, indices, norms)
        held: Any = b.op("cast", x=halves, dtype="fp32")
        b.memo[key] = Ref(levels, (groups, rows, size)), Ref(held.value, norms.shape)
        assert columns == groups * size
    found: tuple[Ref, Ref] = b.memo[key]
    return found


LOWERINGS: dict[object, Callable[[Builder, FxNode], None]] = {op("hadamard"): turn}
