"""Lowerings of ATen ops that the passes leave."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import fx

from needle_export.graph.program import FxNode, Part, Weight
from needle_export.targets.constants import piece, tied_head, whole_table
from needle_export.targets.coreml import codebook
from needle_export.targets.coreml.builder import Builder
from needle_export.targets.views import VIEWS, Ref

Lowering = Callable[[Builder, FxNode], None]

aten = torch.ops.aten


def expand(b: Builder, n: FxNode) -> None:
    """Copies along one axis."""
    value, have, want = n.args[0], b.dims_of(n.args[0]), b.dims_of(n)
    if have == want:
        b.env[n] = b.ref(value)
        return
    b.put(n, b.ref_of(b.op("tile", x=b.get(value), reps=[w // h for h, w in zip(have, want, strict=True)])))


def binary(kind: str) -> Lowering:
    """Elementwise with broadcasting; numbers become constants."""

    def lower(b: Builder, n: FxNode) -> None:
        left, right = n.args
        if not isinstance(left, fx.Node):
            left, right = right, left
        if not isinstance(right, fx.Node):
            assert kind == "mul", "numbers are only multiplied by"
            b.put(n, b.times(b.ref(left), float(right)))
            return
        b.put(n, b.ref_of(b.op(kind, x=b.operand(left, n), y=b.operand(right, n))))

    return lower


def add(b: Builder, n: FxNode) -> None:
    """As :func:`binary`; integers (positions, rows of tables) in 32 bits."""
    if n.meta["val"].dtype.is_floating_point:
        binary("add")(b, n)
        return
    b.put(n, b.sum_of_integers(n, lambda x, y: b.ref_of(b.op("add", x=x, y=y))))


def unary(kind: str) -> Lowering:
    """Elementwise on one value, whatever its shape."""

    def lower(b: Builder, n: FxNode) -> None:
        b.put(n, b.unary(kind, b.ref(n.args[0])))

    return lower


def angles(b: Builder, n: FxNode) -> None:
    """Positions times frequencies, in float32: half precision doesn't hold a position above 2,048."""
    left, right = n.args
    weight = b.program.weights[right.name]
    factors = Ref(b.store.single(weight, weight.value.numpy()), tuple(weight.value.shape))
    b.put(n, b.ref_of(b.op("mul", x=b.get(left), y=factors)))


def mul(b: Builder, n: FxNode) -> None:
    """Elementwise; of positions and frequencies as :func:`angles`."""
    if any(u.target in (aten.cos.default, aten.sin.default) for u in n.users):
        angles(b, n)
    else:
        binary("mul")(b, n)


def turn(kind: str) -> Lowering:
    """Cosine or sine of angles, from float32 to the package's float type."""

    def lower(b: Builder, n: FxNode) -> None:
        b.put(n, b.narrow(b.unary(kind, b.ref(n.args[0]))))

    return lower


def silu(b: Builder, n: FxNode) -> None:
    """x * sigmoid(x)."""
    b.put(n, b.unary("silu", b.ref(n.args[0])))


def softmax(b: Builder, n: FxNode) -> None:
    """Over the last axis."""
    b.put(n, b.unary("softmax", b.get(n.args[0]), axis=-1))


def cast(b: Builder, n: FxNode) -> None:
    """Integers to float32."""
    b.put(n, b.unary("cast", b.ref(n.args[0]), dtype="fp32"))


def embedding(b: Builder, n: FxNode) -> None:
    """Rows of a table [R, D] by indices of any shape."""
    table, index = n.args[:2]
    weight = b.program.weights[table.name]
    if weight.codes:
        codebook.lookup(b, n, weight)
        return
    count = math.prod(b.dims_of(index))
    b.put(n, b.gather(table_of(b, weight), b.get(index, (count,)), 0))


def table_of(b: Builder, weight: Weight) -> object:
    """A table as a constant, one for all that read it."""
    key = ("table", weight.name)
    if key not in b.memo:
        b.memo[key] = b.store.matrix(weight, weight.value.numpy())
    return b.memo[key]


def index_select(b: Builder, n: FxNode) -> None:
    """A fixed permutation of the last axis."""
    index = b.program.weights[n.args[2].name].value.numpy()
    dims = b.dims_of(n.args[0])
    b.put(n, b.gather(b.get(n.args[0], dims), b.constant(index, np.int32), len(dims) - 1))


def mean(b: Builder, n: FxNode) -> None:
    """Over one axis; a mean over lanes needs no wider type, as it is of few."""
    (axis,) = n.args[1]
    keep = len(n.args) > 2 and bool(n.args[2])
    b.put(n, b.reduce("mean", b.get(n.args[0]), axis, keep=keep))


def matmul(b: Builder, n: FxNode) -> None:
    """With a weight on the right, as a linear; with one matrix a site, as many linears."""
    x, weight = n.args[0], b.program.weights[n.args[1].name]
    value = weight.value
    if weight.codes and value.dim() == 2:
        b.put(n, codebook.product(b, b.get(x), weight))
        return
    if value.dim() == 2:
        source = b.ref(x)
        if source.dims[-1] != value.shape[0]:
            source = b.get(x)
        data = np.ascontiguousarray(value.t().numpy())
        b.put(n, b.linear(source, b.store.matrix(piece(weight, weight.name, data, weight.parts), data)))
        return
    sites, given = value.shape[0], b.get(x)
    results = []
    for site in range(sites):
        rows = b.reshape(b.slice(given, 0, site, 1), given.dims[1:])
        if weight.codes:
            results.append(codebook.product(b, rows, weight, site))
            continue
        data = np.ascontiguousarray(value[site].t().numpy())
        parts = [Part(p.source, p.role, p.layer, p.elements // sites) for p in weight.parts]
        matrix = b.store.matrix(piece(weight, f"{weight.name}.{site}", data, parts), data)
        results.append(b.linear(rows, matrix))
    made = results[0] if sites == 1 else b.ref_of(b.op("stack", values=results, axis=0))
    b.put(n, made)


def linear(b: Builder, n: FxNode) -> None:
    """The tied head: the embedding read as it lies."""
    x, table = n.args
    whole = whole_table(b.program, table)
    if whole.codes:
        b.put(n, b.slice(codebook.product(b, b.get(x), whole), -1, 0, b.dims_of(table)[0]))
        return
    b.put(n, b.linear(b.get(x), table_of(b, tied_head(b.program, table, b.dims_of(table)[0]))))


def pad(b: Builder, n: FxNode) -> None:
    """Zeros behind the last axis."""
    value, amounts = n.args[:2]
    dims = b.dims_of(value)
    zeros = b.constant(np.zeros((*dims[:-1], amounts[1])))
    b.put(n, b.concat([b.get(value), zeros], -1))


def split(b: Builder, n: FxNode) -> None:
    """Pieces along one axis."""
    value, sizes, dim = n.args
    b.env[n] = b.cut(b.get(value), dim, sizes)


def concat(b: Builder, n: FxNode) -> None:
    """Values behind each other: of projections that are stored in several formats."""
    b.put(n, b.concat([b.get(v) for v in n.args[0]], n.args[1] if len(n.args) > 1 else 0))


LOWERINGS: dict[object, Lowering] = {
    **VIEWS,
    aten.expand.default: expand,
    aten.add.Tensor: add,
    aten.mul.Tensor: mul,
    aten.sigmoid.default: unary("sigmoid"),
    aten.cos.default: turn("cos"),
    aten.sin.default: turn("sin"),
    aten.softmax.int: softmax,
    aten.silu.default: silu,
    aten.to.dtype: cast,
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.mean.dim: mean,
    aten.matmul.default: matmul,
    aten.linear.default: linear,
    aten.pad.default: pad,
    aten.split_with_sizes.default: split,
    aten.cat.default: concat,
}
