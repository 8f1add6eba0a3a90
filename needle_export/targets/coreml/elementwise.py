"""Lowerings of ATen ops that the passes leave."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
import torch
from torch import fx

from needle_export.graph.program import FxNode, Part, Weight
from needle_export.targets.coreml.builder import Builder, Ref
from needle_export.targets.coreml.store import piece

Lowering = Callable[[Builder, FxNode], None]

aten = torch.ops.aten


def view(b: Builder, n: FxNode) -> None:
    """Another shape of the same elements: nothing to emit."""
    b.env[n] = b.ref(n.args[0])


def permute(b: Builder, n: FxNode) -> None:
    """Free where only axes of length 1 move."""
    value, order = n.args
    dims = b.dims_of(value)
    moved = [i for i in order if dims[i] != 1]
    if moved == sorted(moved):
        view(b, n)
    else:
        b.put(n, b.transpose(b.get(value), order))


def expand(b: Builder, n: FxNode) -> None:
    """Copies along one axis."""
    value, have, want = n.args[0], b.dims_of(n.args[0]), b.dims_of(n)
    if have == want:
        view(b, n)
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
        x, y = _operand(b, left, n), _operand(b, right, n)
        b.put(n, b.ref_of(b.op(kind, x=x, y=y)))

    return lower


def _operand(b: Builder, node: FxNode, result: FxNode) -> Ref:
    """A value as it lies, where that has the result's shape already; else in its logical shape."""
    ref = b.ref(node)
    return ref if ref.dims == b.dims_of(result) else b.get(node)


def add(b: Builder, n: FxNode) -> None:
    """As :func:`binary`; integers (positions, rows of tables) in 32 bits."""
    if n.meta["val"].dtype.is_floating_point:
        binary("add")(b, n)
        return
    left, right = (_integers(b, a) for a in n.args)
    if b.rows == 1 and right is b.memo.get("arange"):
        b.put(n, left)  # plus 0 .. 0
        return
    b.put(n, b.ref_of(b.op("add", x=left, y=right)))


def _integers(b: Builder, node: FxNode) -> Ref:
    weight = b.program.weight_of(node)
    if weight is not None:
        return b.constant(weight.value.numpy(), np.int32)
    return b.get(node)


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


def arange(b: Builder, n: FxNode) -> None:
    """0 .. T-1, known when the graph is written."""
    b.memo["arange"] = b.constant(np.arange(n.args[0]), np.int32)
    b.put(n, b.memo["arange"])


def embedding(b: Builder, n: FxNode) -> None:
    """Rows of a table [R, D] by indices of any shape."""
    table, index = n.args[:2]
    weight = b.program.weights[table.name]
    count = math.prod(b.dims_of(index))
    rows = b.gather(table_of(b, table.name, weight), b.get(index, (count,)), 0)
    b.put(n, rows)


def table_of(b: Builder, name: str, weight: Weight) -> object:
    """A table as a constant, one for all that read it."""
    key = ("table", name)
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
        data = np.ascontiguousarray(value[site].t().numpy())
        parts = [Part(p.source, p.role, p.layer, p.elements // sites) for p in weight.parts]
        matrix = b.store.matrix(piece(weight, f"{weight.name}.{site}", data, parts), data)
        results.append(b.linear(rows, matrix))
    made = results[0] if sites == 1 else b.ref_of(b.op("stack", values=results, axis=0))
    b.put(n, made)


def linear(b: Builder, n: FxNode) -> None:
    """The tied head: the embedding read as it lies."""
    x, table = n.args
    source = _behind(table)
    weight = b.program.weights[source.name]
    rows = b.dims_of(table)[0]
    data = weight.value.numpy()
    if rows < len(data):
        width = data.shape[1]
        parts = (Part(weight.parts[0].source, weight.parts[0].role, -1, rows * width),)
        cut = piece(weight, f"{weight.name}[:{rows}]", np.ascontiguousarray(data[:rows]), parts)
        matrix = b.store.matrix(cut, cut.value.numpy())
    else:
        matrix = table_of(b, source.name, weight)
    b.put(n, b.linear(b.get(x), matrix))


def _behind(node: FxNode) -> FxNode:
    return _behind(node.args[0]) if node.target is aten.slice.Tensor else node


def slice_(b: Builder, n: FxNode) -> None:
    """A range of one axis; of a weight, nothing (the reader takes it from the weight)."""
    value, dim, start, end = n.args
    if b.program.weight_of(value) is not None:
        return
    dims = b.dims_of(value)
    b.put(n, b.slice(b.get(value), dim, start, min(end, dims[dim]) - start))


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


def select(b: Builder, n: FxNode) -> None:
    """One index of one axis."""
    value, dim, index = n.args
    b.put(n, b.slice(b.get(value), dim, index, 1))


def getitem(b: Builder, n: FxNode) -> None:
    """One result of several; a next state is nobody's value here."""
    results = b.env[n.args[0]]
    if isinstance(results, Ref):
        raise TypeError(f"{n.args[0]} has one result")
    found = results[n.args[1]]
    if found is not None:
        b.env[n] = found


LOWERINGS: dict[object, Lowering] = {
    operator.getitem: getitem,
    aten.reshape.default: view,
    aten.flatten.using_ints: view,
    aten.unsqueeze.default: view,
    aten.squeeze.dim: view,
    aten.permute.default: permute,
    aten.expand.default: expand,
    aten.add.Tensor: add,
    aten.mul.Tensor: mul,
    aten.sigmoid.default: unary("sigmoid"),
    aten.cos.default: turn("cos"),
    aten.sin.default: turn("sin"),
    aten.softmax.int: softmax,
    aten.silu.default: silu,
    aten.to.dtype: cast,
    aten.arange.default: arange,
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.mean.dim: mean,
    aten.matmul.default: matmul,
    aten.linear.default: linear,
    aten.pad.default: pad,
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.split_with_sizes.default: split,
}
