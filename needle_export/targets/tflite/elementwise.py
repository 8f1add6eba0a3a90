"""Lowerings of ATen ops that the passes leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import fx

from needle_export.graph.ops import op as needle_op
from needle_export.graph.program import FxNode, Part, Weight
from needle_export.targets.constants import piece, tied_head
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.store import Matrix
from needle_export.targets.views import VIEWS, Ref

Lowering = Callable[[Builder, FxNode], None]

aten = torch.ops.aten


def expand(b: Builder, n: FxNode) -> None:
    """Copies along one axis: the value behind itself; BROADCAST_TO is refused by GPU delegates and slow on CPU."""
    value, have, want = n.args[0], b.dims_of(n.args[0]), b.dims_of(n)
    axes = [i for i, (a, c) in enumerate(zip(have, want, strict=True)) if a != c]
    if not axes:
        b.env[n] = b.ref(value)
        return
    (axis,) = axes
    b.put(n, b.concat([b.get(value)] * want[axis], axis))


def binary(kind: str) -> Lowering:
    """Elementwise with broadcasting; numbers become constants."""

    def lower(b: Builder, n: FxNode) -> None:
        left, right = n.args
        if not isinstance(left, fx.Node):
            left, right = right, left
        if not isinstance(right, fx.Node):
            b.put(n, b.binary(kind, b.ref(left), b.constant(right)))
            return
        diagonal = b.program.weight_of(left)
        if diagonal is not None and diagonal.value.dim() == 1 and b.rows == 1:
            # A factor an entry lies as the value does.
            value = b.ref(right)
            if diagonal.value.numel() == np.prod(value.dims):
                b.put(n, b.binary(kind, b.vector(left, value.dims), value))
                return
        b.put(n, b.binary(kind, b.operand(left, n), b.operand(right, n)))

    return lower


def integer_or_float(kind: str) -> Lowering:
    """As :func:`binary`; integers keep their type (32 bits here)."""
    lower_float = binary(kind)

    def lower(b: Builder, n: FxNode) -> None:
        if n.meta["val"].dtype.is_floating_point:
            lower_float(b, n)
            return
        b.put(n, b.sum_of_integers(n, partial(b.binary, kind)))

    return lower


def unary(kind: str) -> Lowering:
    """Elementwise on one value, whatever its shape."""

    def lower(b: Builder, n: FxNode) -> None:
        if n not in b.env:  # a sigmoid that was made with its neighbours
            b.put(n, b.unary(kind, b.ref(n.args[0])))

    return lower


def silu(b: Builder, n: FxNode) -> None:
    """x * sigmoid(x)."""
    x = b.ref(n.args[0])
    b.put(n, b.mul(x, b.unary("logistic", x)))


def softmax(b: Builder, n: FxNode) -> None:
    """Over the last axis."""
    b.put(n, b.softmax(b.get(n.args[0])))


def cast(b: Builder, n: FxNode) -> None:
    """To float32."""
    b.put(n, b.to_float(b.ref(n.args[0])))


def embedding(b: Builder, n: FxNode) -> None:
    """Rows of a table [N, D] by indices of any shape."""
    table, index = n.args[:2]
    weight = b.program.weights[table.name]
    count = int(np.prod(b.dims_of(index), dtype=np.int64))
    b.put(n, b.lookup(b.store.matrix(weight, weight.value.numpy()), b.get(index, (count,))))


def index_select(b: Builder, n: FxNode) -> None:
    """A fixed permutation of the last axis."""
    index = b.program.weights[n.args[2].name].value.numpy()
    if b.rows > 1:
        # GATHER copies entry by entry along the last axis: turned, an entry is a run of T floats.
        turned = b.transpose(b.get(n.args[0]), (1, 0))
        b.put(n, b.transpose(b.gather(turned, b.constant(index, np.int32), 0), (1, 0)))
        return
    # Of one row, entries can be fetched into any shape: the next product's saves it a reshape.
    shape = _wanted(n) or (1, len(index))
    b.put(n, b.gather(b.get(n.args[0], (len(index),)), b.constant(index.reshape(shape), np.int32), 0))


def _wanted(node: FxNode) -> tuple[int, ...] | None:
    """The shape in which a Kronecker product will read a value, through a diagonal."""
    users = list(node.users)
    if len(users) != 1:
        return None
    (user,) = users
    if user.target is needle_op("kronecker"):
        return tuple(int(f.meta["val"].shape[0]) for f in user.args[1:])
    return _wanted(user) if user.target is aten.mul.Tensor and user.args[1] is node else None


def mean(b: Builder, n: FxNode) -> None:
    """Over one axis."""
    (axis,) = n.args[1]
    keep = len(n.args) > 2 and bool(n.args[2])
    value, dims = b.ref(n.args[0]), b.dims_of(n.args[0])
    if axis == -2 and not keep and (1, *value.dims) == dims:
        # Of one row, which lies without its T: the axis that is kept is that one.
        b.put(n, b.reduce("mean", value, axis))
        return
    b.put(n, b.reduce("mean", b.get(n.args[0]), axis, keep=keep))


def matmul(b: Builder, n: FxNode) -> None:
    """With a weight on the right: one op a matrix; where the result is only cut up, one op a piece."""
    x, weight = n.args[0], b.program.weights[n.args[1].name]
    value = weight.value
    split = next(iter(n.users)) if len(n.users) == 1 else None
    pieces = [int(value.shape[-1])]
    if split is not None and split.target is aten.split_with_sizes.default and _last_axis(b, split):
        pieces = list(split.args[1])
    if value.dim() == 2:
        source = b.ref(x)
        if source.dims[-1] != value.shape[0]:
            source = b.get(x)
        results = [b.linear(source, m) for m in _matrices(b, weight, value, pieces)]
    else:
        results = _batched(b, b.get(x), weight, pieces)
    if len(results) == 1:
        b.put(n, results[0])
    else:
        b.env[n] = tuple(results)


def _batched(b: Builder, x: Ref, weight: Weight, pieces: list[int]) -> list[Ref]:
    """x [S, T, I] with as many matrices [S, I, O]: the results [S, T, O] by piece."""
    sites = x.dims[0]
    columns: list[list[Ref]] = [[] for _ in pieces]
    for site in range(sites):
        rows = b.reshape(b.slice(x, 0, site, 1), x.dims[1:])
        matrices = _matrices(b, weight, weight.value[site], pieces, site)
        for column, matrix in zip(columns, matrices, strict=True):
            column.append(b.reshape(b.linear(rows, matrix), (1, x.dims[1], matrix.operand.dims[0])))
    return [b.concat(column, 0) for column in columns]


def _matrices(
    b: Builder, weight: Weight, value: torch.Tensor, pieces: list[int], site: int = -1
) -> list[Matrix]:
    """Columns of a matrix [I, O] as constants [O', I], each with the parts that lie in it."""
    inner, found, start = int(value.shape[0]), [], 0
    copies = weight.value.numel() // value.numel()
    ends = np.cumsum([p.elements // (inner * copies) for p in weight.parts])
    for size in pieces:
        parts = []
        for part, end in zip(weight.parts, ends, strict=True):
            first = end - part.elements // (inner * copies)
            width = min(end, start + size) - max(first, start)
            if width > 0:
                parts.append(Part(part.source, part.role, part.layer, int(width) * inner))
        data = np.ascontiguousarray(value[:, start : start + size].t().numpy())
        name = weight.name if len(pieces) == 1 else f"{weight.name}[{start}:{start + size}]"
        name = name if site < 0 else f"{name}.{site}"
        found.append(b.store.matrix(piece(weight, name, data, parts), data))
        start += size
    return found


def _last_axis(b: Builder, split: FxNode) -> bool:
    return bool(split.args[2] % len(b.dims_of(split.args[0])) == len(b.dims_of(split.args[0])) - 1)


def linear(b: Builder, n: FxNode) -> None:
    """The tied head: the embedding read as it lies."""
    x, table = n.args
    weight = tied_head(b.program, table, b.dims_of(table)[0])
    b.put(n, b.linear(b.get(x), b.store.matrix(weight, weight.value.numpy())))


def pad(b: Builder, n: FxNode) -> None:
    """Zeros behind the last axis."""
    value, amounts = n.args[:2]
    dims = b.dims_of(value)
    amount = [[0, 0]] * (len(dims) - 1) + [[0, amounts[1]]]
    b.put(n, b.op("pad", (b.get(value), b.constant(amount, np.int32)), (*dims[:-1], dims[-1] + amounts[1])))


def split(b: Builder, n: FxNode) -> None:
    """Pieces along one axis."""
    value, sizes, dim = n.args
    if isinstance(b.env.get(value), tuple):
        b.env[n] = b.env[value]  # a matmul that was made in pieces
        return
    b.env[n] = b.cut(b.get(value), dim, sizes)


def concat(b: Builder, n: FxNode) -> None:
    """Values behind each other: of projections that are stored in several formats."""
    b.put(n, b.concat([b.get(v) for v in n.args[0]], n.args[1] if len(n.args) > 1 else 0))


LOWERINGS: dict[object, Lowering] = {
    **VIEWS,
    aten.expand.default: expand,
    aten.add.Tensor: integer_or_float("add"),
    aten.mul.Tensor: binary("mul"),
    aten.sigmoid.default: unary("logistic"),
    aten.cos.default: unary("cos"),
    aten.sin.default: unary("sin"),
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
