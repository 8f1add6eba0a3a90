"""Lowerings of views, arithmetic and table look-ups."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import fx

from needle_export.graph.program import FxNode, Weight
from needle_export.targets.constants import piece, whole_table
from needle_export.targets.onnx import codebook
from needle_export.targets.onnx.builder import MICROSOFT, Builder, Dims, Ref
from needle_export.targets.onnx.integers import form_of, lookup, product
from needle_export.weights.forms import Form

aten = torch.ops.aten

Lowering = Callable[[Builder, FxNode], None]

FLOAT, INT64 = int(ir.DataType.FLOAT), int(ir.DataType.INT64)


def view(b: Builder, n: FxNode) -> None:
    """A view keeps elements and their order; its shape is made only when somebody asks for it."""
    b.env[n] = b.ref(n.args[0])


def permute(b: Builder, n: FxNode) -> None:
    """A permutation that only moves dimensions of size 1 is a view."""
    source, order = b.dims_of(n.args[0]), [d % len(n.args[1]) for d in n.args[1]]
    moved = [d for d in order if source[d] != 1]
    if moved == sorted(moved):
        view(b, n)
    else:
        b.put(n, b.op("Transpose", b.get(n.args[0]), perm=order))


def expand(b: Builder, n: FxNode) -> None:
    """Copies along new leading sizes; T is never expanded to."""
    dims = b.dims_of(n)
    if dims == b.dims_of(n.args[0]):
        view(b, n)
        return
    shape = [1 if d is None else d for d in dims]
    source = b.get(n.args[0])
    if b.rows == 1:
        dims = dims[1:]
        shape, source = shape[1:], b.get(n.args[0], b.dims_of(n.args[0])[1:])
    b.put(n, b.op("Expand", source, b.constant(shape, np.int64)), dims)


def binary(kind: str) -> Lowering:
    """Add or Mul."""

    def lower(b: Builder, n: FxNode) -> None:
        left, right = n.args
        if kind == "Add" and _is_zero(b, right):
            view(b, n)
            return
        if not isinstance(right, fx.Node):
            a = b.ref(left)
            dtype = np.float32 if n.meta["val"].dtype == torch.float32 else np.int64
            b.env[n] = Ref(b.op(kind, a.value, b.constant(right, dtype)), a.dims)
            return
        a, c = b.ref(left), b.ref(right)
        shapes = b.dims_of(left), b.dims_of(right)
        if shapes[0] == shapes[1]:
            dims = a.dims if a.dims == c.dims else shapes[0]
            b.env[n] = Ref(b.op(kind, b.shaped(a, dims), b.shaped(c, dims)), dims)
        elif b.rows == 1 and 1 in (b.numel(shapes[0]), b.numel(shapes[1])):
            # One of them is a single number at T = 1: it broadcasts against any shape.
            one, other = (a, c) if b.numel(shapes[0]) == 1 else (c, a)
            b.env[n] = Ref(b.op(kind, other.value, b.shaped(one, (1,))), other.dims)
        else:
            b.put(n, b.op(kind, b.shaped(a, shapes[0]), b.shaped(c, shapes[1])))

    return lower


def _is_zero(b: Builder, arg: object) -> bool:
    """Whether an argument is the position offset of a single row."""
    return isinstance(arg, fx.Node) and arg.target is aten.arange.default and b.rows == 1


def unary(kind: str) -> Lowering:
    """Sigmoid, Cos, Sin."""

    def lower(b: Builder, n: FxNode) -> None:
        a = b.ref(n.args[0])
        b.env[n] = Ref(b.op(kind, a.value), a.dims)

    return lower


def softmax(b: Builder, n: FxNode) -> None:
    """Over the last axis."""
    b.put(n, b.op("Softmax", b.get(n.args[0]), axis=-1))


def silu(b: Builder, n: FxNode) -> None:
    """x * sigmoid(x): one of ONNX Runtime's ops (the standard Swish has a slow kernel), or two standard ones."""
    a = b.ref(n.args[0])
    if b.feature.contrib:
        out = b.op("QuickGelu", a.value, domain=MICROSOFT, alpha=1.0)
    else:
        out = b.op("Mul", a.value, b.op("Sigmoid", a.value))
    b.env[n] = Ref(out, a.dims)


def cast(b: Builder, n: FxNode) -> None:
    """To float32."""
    a = b.ref(n.args[0])
    if n.args[1] != torch.float32:
        raise TypeError(f"a cast to {n.args[1]} has no place in this model")
    b.env[n] = Ref(b.op("Cast", a.value, to=FLOAT), a.dims)


def arange(b: Builder, n: FxNode) -> None:
    """0 .. T-1."""
    if b.rows is not None:
        b.put(n, b.constant(np.arange(b.rows, dtype=np.int64)))
        return
    b.put(n, b.op("Range", b.constant(0, np.int64), rows_of(b), b.constant(1, np.int64)))


def rows_of(b: Builder) -> ir.Value:
    """T as an int64 scalar."""
    if "rows" not in b.memo:
        shape = b.op("Shape", b.get(_input(b, "tokens")))
        b.memo["rows"] = b.op("Squeeze", shape)
    value: ir.Value = b.memo["rows"]
    return value


def _input(b: Builder, name: str) -> FxNode:
    return next(n for n in b.program.graph.nodes if n.op == "placeholder" and n.name == name)


def embedding(b: Builder, n: FxNode) -> None:
    """Rows of a table; a half-precision table is widened after the gather, row by row."""
    weight = b.program.weights[n.args[0].name]
    if weight.codes:
        codebook.lookup(b, n, weight)
        return
    form = form_of(b, weight, *weight.value.shape)
    if form is not None:
        b.put(n, lookup(b, b.get(n.args[1]), weight, weight.value.numpy(), form))
        return
    value, half = b.raw_matrix(n.args[0])
    rows = b.op("Gather", value, b.get(n.args[1]), axis=0)
    b.put(n, b.op("Cast", rows, to=FLOAT) if half else rows)


def index_select(b: Builder, n: FxNode) -> None:
    """A fixed permutation of the last axis.

    GatherElements moves 1,024 floats in a ninth of Gather's time, which copies element by element through
    a generic path.
    """
    index = b.program.weights[n.args[2].name].value
    size = index.numel()
    key = ("permutation", n.args[2])
    if key not in b.memo:
        row, _ = b.stored(b.program.weights[n.args[2].name], index.reshape(1, size).numpy())
        if b.rows is None:
            shape = b.op("Concat", b.op("Shape", b.get(_input(b, "tokens"))), b.constant([size], np.int64), axis=0)
            row = b.op("Expand", row, shape)
        b.memo[key] = row
    dims: Dims = (b.rows, size)
    b.put(n, b.op("GatherElements", b.get(n.args[0], dims), b.memo[key], axis=-1), dims)


def mean(b: Builder, n: FxNode) -> None:
    """Over one axis."""
    keep = int(len(n.args) > 2 and bool(n.args[2]))
    rank = len(b.dims_of(n.args[0]))
    axes = b.constant([d % rank for d in n.args[1]], np.int64)
    b.put(n, b.op("ReduceMean", b.get(n.args[0]), axes, keepdims=keep))


def matmul(b: Builder, n: FxNode) -> None:
    """With a weight on the right; integers of several sites, one by one."""
    weight = b.program.weights[n.args[1].name]
    if weight.codes:
        b.put(n, b.op("MatMul", b.get(n.args[0]), codebook.kernel(b, weight)))
        return
    inner, outer = weight.value.shape[-2:]
    form = form_of(b, weight, outer, inner)
    if form is None:
        b.put(n, b.op("MatMul", b.get(n.args[0]), b.matrix(n.args[1])))
    elif weight.value.dim() == 2:
        b.put(n, product(b, b.get(n.args[0]), weight, _turned(weight.value), form))
    else:
        b.put(n, _by_site(b, b.get(n.args[0]), weight, form))


def _by_site(b: Builder, x: ir.Value, weight: Weight, form: Form) -> ir.Value:
    """x [S, T, I] with as many matrices [S, I, O]: [S, T, O]; the op takes one matrix."""
    sites = len(weight.value)
    rows = (x,) if sites == 1 else b.op("Split", x, b.constant([1] * sites, np.int64), outputs=sites, axis=0)
    results = []
    for site, (row, value) in enumerate(zip(rows, weight.value, strict=True)):
        data = _turned(value)
        parts = tuple(replace(p, elements=p.elements // sites) for p in weight.parts)
        results.append(product(b, row, piece(weight, f"{weight.name}.{site}", data, parts), data, form))
    joined: ir.Value = results[0] if sites == 1 else b.op("Concat", *results, axis=0)
    return joined


def _turned(value: torch.Tensor) -> npt.NDArray[np.float32]:
    """A matrix [I, O] as rows [O, I]."""
    return np.ascontiguousarray(value.t().numpy())


def linear(b: Builder, n: FxNode) -> None:
    """The tied head: the embedding read as it lies, transposed by the op."""
    x, table = n.args
    rows, weight = int(b.dims_of(table)[0] or 0), whole_table(b.program, table)
    form = form_of(b, weight, *weight.value.shape)
    if weight.codes:
        whole = codebook.matrix(b, weight)
        if rows != len(weight.value):
            whole = b.op("Slice", whole, *(b.constant([at], np.int64) for at in (0, rows, 0)))
        b.put(n, b.op("Gemm", b.get(x), whole, transB=1))
    elif form is None:
        whole = b.matrix(table) if b.program.weight_of(table) is not None else b.get(table)
        b.put(n, b.op("Gemm", b.get(x), whole, transB=1))
    else:
        b.put(n, product(b, b.get(x), weight, weight.value.numpy(), form, rows=rows))


def slice_(b: Builder, n: FxNode) -> None:
    """A range of one axis."""
    value, dim, start, end = n.args
    weight = b.program.weight_of(value)
    if weight is not None and (weight.codes or form_of(b, weight, *weight.value.shape) is not None):
        return  # the tied head reads rows of the whole itself
    size = b.dims_of(value)[dim]
    if size is not None and start == 0 and end >= size:
        view(b, n)
        return
    parts = [b.constant([x], np.int64) for x in (start, end, dim)]
    b.put(n, b.op("Slice", b.get(value) if weight is None else b.matrix(value), *parts))


def pad(b: Builder, n: FxNode) -> None:
    """Zeros behind the last axis."""
    value, amounts = n.args[:2]
    rank = len(b.dims_of(value))
    pads = [0] * (2 * rank)
    pads[-1] = amounts[1]
    b.put(n, b.op("Pad", b.get(value), b.constant(pads, np.int64)))


def split(b: Builder, n: FxNode) -> None:
    """Pieces along one axis, cut where the axis is contiguous with everything behind it."""
    value, sizes, dim = n.args
    logical = b.dims_of(value)
    dim %= len(logical)
    inner = b.numel(logical[dim + 1 :])
    ref = b.ref(value)
    if b.rows == 1 and len(sizes) > 2:
        # One reshape before the cut instead of one behind each piece.
        flat_dims = tuple(d for i, d in enumerate(logical) if d != 1 or i == dim)
        dims = flat_dims if dim == 0 else (1, b.numel(logical))
        ref = Ref(b.shaped(ref, dims), dims)
    lengths = [s * inner for s in sizes]
    # At T = 1 a value is one run of elements: any axis that holds it all can be cut.
    axis = next((i for i, d in enumerate(ref.dims) if d == sum(lengths) == b.numel(ref.dims)), None)
    if axis is None and b.rows == 1 and dim == 0:
        axis, lengths = 0, list(sizes)
    if axis is None and b.rows == 1 and ref.dims == (1, logical[dim], 1, inner) and len(logical) == 3:
        axis, lengths = 1, list(sizes)
    if b.rows is None and None in logical[dim + 1 :]:
        ref, axis, lengths = Ref(b.shaped(ref, logical), logical), dim, list(sizes)
    elif b.rows is None or axis is None:
        outer = logical[:dim]
        flat: Dims = (*outer, sum(lengths)) if outer else (sum(lengths),)
        ref, axis = Ref(b.shaped(ref, flat), flat), len(flat) - 1
    pieces = b.op("Split", ref.value, b.constant(lengths, np.int64), outputs=len(sizes), axis=axis)
    b.env[n] = tuple(
        Ref(p, (*ref.dims[:axis], size, *ref.dims[axis + 1 :])) for p, size in zip(pieces, lengths, strict=True)
    )


def select(b: Builder, n: FxNode) -> None:
    """One index of one axis."""
    value, dim, index = n.args
    if b.dims_of(value)[dim] == 1:
        view(b, n)
    else:
        b.put(n, b.op("Gather", b.get(value), b.constant(index, np.int64), axis=dim))


def getitem(b: Builder, n: FxNode) -> None:
    """One result of several."""
    results = b.env[n.args[0]]
    if isinstance(results, Ref):
        raise TypeError(f"{n.args[0]} has one result")
    b.env[n] = results[n.args[1]]


def concat(b: Builder, n: FxNode) -> None:
    """Values behind each other: of projections that are stored in several formats."""
    axis = n.args[1] if len(n.args) > 1 else 0
    b.put(n, b.op("Concat", *[b.get(v) for v in n.args[0]], axis=axis % len(b.dims_of(n))))


def ignored(b: Builder, n: FxNode) -> None:
    """T as a number: shapes carry it, nothing is computed."""


LOWERINGS: dict[object, Lowering] = {
    operator.getitem: getitem,
    aten.sym_size.int: ignored,
    operator.add: ignored,
    operator.mul: ignored,
    aten.reshape.default: view,
    aten.view.default: view,
    aten.flatten.using_ints: view,
    aten.unflatten.int: view,
    aten.unsqueeze.default: view,
    aten.squeeze.dim: view,
    aten.permute.default: permute,
    aten.expand.default: expand,
    aten.add.Tensor: binary("Add"),
    aten.mul.Tensor: binary("Mul"),
    aten.sigmoid.default: unary("Sigmoid"),
    aten.cos.default: unary("Cos"),
    aten.sin.default: unary("Sin"),
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
    aten.cat.default: concat,
}
