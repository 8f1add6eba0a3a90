"""Lowerings of the fused ops, except attention."""

from __future__ import annotations

import math

import numpy as np

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode
from needle_export.graph.reference import HASH_PRIME
from needle_export.targets.constants import is_constant, side_by_side, sigmoid_of
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.elementwise import Lowering
from needle_export.targets.views import Ref

#: Rows up to this width are averaged by a matrix product.
SHORT = 64


def rms_norm(b: Builder, n: FxNode) -> None:
    """Five ops, and a sixth where there is a scale."""
    x, scale, eps = n.args
    ref = b.ref(x)
    if b.rows == 1 and len(b.dims_of(x)) == 2 and _uniform(b, scale) is not None:
        # One row may lie in any shape.
        b.put(n, _norm(b, ref, scale, eps, whole=True))
    else:
        b.put(n, _norm(b, b.get(x), scale, eps))


def _norm(b: Builder, x: Ref, scale: FxNode, eps: float, whole: bool = False) -> Ref:
    """x over its root mean square, times a scale; over the last axis, or over the whole of it."""
    width = math.prod(x.dims) if whole else x.dims[-1]
    axes = tuple(range(len(x.dims))) if whole else (-1,)
    square, factor = b.mul(x, x), _uniform(b, scale)
    if width <= SHORT:
        # A product with a vector of 1/D is the mean, and its bias adds eps: one op instead of two. On long rows it
        # takes seven times as long.
        mean = b.product(square, b.constant(np.full((1, width), 1 / width)), b.constant([eps]))
    else:
        mean = b.add(b.reduce("mean", square, *axes), b.constant(eps))
    root = b.unary("rsqrt", mean)
    if factor == 1:
        return b.mul(x, root)
    # The scale first: the converter folds a constant factor into the matrix that follows, and a copy of the tied
    # embedding would come of it.
    return b.mul(b.mul(x, b.vector(scale)), root)


def _uniform(b: Builder, scale: FxNode) -> float | None:
    """The one value of a scale that no checkpoint tensor stands behind, or None."""
    weight = b.program.weights[scale.name]
    if not is_constant(weight.parts):
        return None
    first = float(weight.value.flatten()[0])
    return first if bool((weight.value == weight.value.flatten()[0]).all()) else None


def add_rms_norm(b: Builder, n: FxNode) -> None:
    """The sum of two and its norm."""
    x, skip, scale, eps = n.args
    total = b.add(b.get(x), b.get(skip))
    b.env[n] = (_norm(b, total, scale, eps), total)


def rotary(b: Builder, n: FxNode) -> None:
    """One product with a rotation matrix, which is built once a step for all blocks; rows side by side."""
    x, cos, sin = n.args
    rows, heads, width = b.dims_of(x)
    key = ("rotation", cos, sin)
    if key not in b.memo:
        b.memo[key] = _rotation(b, b.get(cos.args[0]), width)
    dims = (heads, width) if rows == 1 else (rows, heads, width)
    b.put(n, b.matmul(b.get(x, dims), b.memo[key]))


def _rotation(b: Builder, angles: Ref, width: int) -> Ref:
    """R with x @ R = x rotated: cos on the diagonal, plus and minus sin half a width beside it; angles [T, Dqk/2]."""
    half, rows = width // 2, angles.dims[0]
    turn = np.zeros((width, width), np.float32)
    turn[np.arange(half), np.arange(half) + half] = 1
    turn[np.arange(half) + half, np.arange(half)] = -1
    twice = b.concat([angles, angles], -1)
    if rows > 1:
        twice = b.reshape(twice, (rows, 1, width))
    c, s = b.unary("cos", twice), b.unary("sin", twice)
    return b.add(b.mul(b.constant(np.eye(width)), c), b.mul(b.constant(turn), s))


def sinkhorn(b: Builder, n: FxNode) -> None:
    """A softmax, which is exp and rows at once, then a sum and a quotient each half iteration."""
    logits, iterations = n.args
    dims = b.dims_of(n)
    if b.rows > 1:
        # Each sum beside each entry that it divides, by a product with ones and zeros: many small matrices take a
        # quarter of the time. A single one takes a little longer, as all these constants must be read.
        lanes = dims[-1]
        value = b.reshape(b.softmax(b.get(logits, dims)), (b.rows, lanes * lanes))
        ones, eye = np.ones((lanes, lanes)), np.eye(lanes)
        sums = b.constant(np.kron(eye, ones)), b.constant(np.kron(ones, eye))
        for half in range(1, 2 * iterations):
            value = b.binary("div", value, b.product(value, sums[half % 2]))
        b.put(n, value)
        return
    value = b.softmax(b.get(logits, dims[1:]))
    for half in range(1, 2 * iterations):
        value = b.binary("div", value, b.reduce("sum", value, -2 if half % 2 else -1))
    b.put(n, value)


def causal_taps(b: Builder, n: FxNode) -> None:
    """Depthwise convolution over past and new rows; the new rows themselves are what the host keeps."""
    x, history, taps, dilation = n.args
    weight = b.program.weights[taps.name]
    count, channels = weight.value.shape
    reach = (count - 1) * dilation
    new = b.get(x)
    window = b.concat([b.get(history), new], 0)
    if b.rows == 1 and (dilation == 1 or not b.store.compact):
        kernel = np.zeros((reach + 1, channels), np.float32)
        kernel[reach::-dilation] = weight.value.numpy()
        # Rows that no tap reads meet zeros: to pick the others would take an op that XNNPACK leaves out.
        filtered = b.reduce("sum", b.mul(window, b.store.taps(weight, kernel)), 0)
    else:
        kernel = np.ascontiguousarray(weight.value.numpy()[::-1]).reshape(1, count, 1, channels)
        tall = b.reshape(window, (1, reach + b.rows, 1, channels))
        filtered = b.op(
            "depthwise_conv_2d",
            (tall, b.store.taps(weight, kernel), b.constant(np.zeros(channels))),
            (1, b.rows, 1, channels),
            dilation_h_factor=dilation,
            dilation_w_factor=1,
            stride_h=1,
            stride_w=1,
            depth_multiplier=1,
            padding="VALID",
            fused_activation_function="NONE",
        )
    b.new_rows[history.name] = new
    b.env[n] = (filtered, new)


def kronecker(b: Builder, n: FxNode) -> None:
    """A product with the transposed first factor on the left, and one with the second on the right."""
    x, a, c = n.args
    left, right = (b.program.weights[f.name] for f in (a, c))
    rows, inner = left.value.shape[0], right.value.shape[0]
    lead = () if b.rows == 1 else (b.rows,)
    value = b.get(x, (*lead, rows, inner))
    value = b.matmul(b.store.kronecker(left, np.ascontiguousarray(left.value.t().numpy())), value)
    b.put(n, b.product(value, b.store.kronecker(right, np.ascontiguousarray(right.value.t().numpy()))))


def scaled_linear(b: Builder, n: FxNode) -> None:
    """A product with factor and bias; in schemes that scale behind the op, one for all that read the same."""
    x = n.args[0]
    readers = [u for u in x.users if u.target is n.target]
    if all(b.store.rules.of(b.program.weights[r.args[1].name].parts) == "fp32" for r in readers):
        b.put(n, _scaled(b, x, [n]))
        return
    if n is readers[0] and len(readers) > 1:
        # Those that a sigmoid follows side by side, so that it is one op.
        gates = [r for r in readers if sigmoid_of(r) is not None]
        others = [r for r in readers if r not in gates]
        whole, start = _scaled(b, x, [*gates, *others]), 0
        for group, opened in ((gates, True), (others, False)):
            widths = [b.dims_of(r)[-1] for r in group]
            if not group:
                continue
            part = b.slice(whole, -1, start, sum(widths))
            part = b.unary("logistic", part) if opened else part
            for reader, value in zip(group, b.cut(part, -1, widths), strict=True):
                b.put(sigmoid_of(reader) if opened else reader, value)
            start += sum(widths)
    elif len(readers) == 1:
        b.put(n, _scaled(b, x, readers))


def _scaled(b: Builder, x: FxNode, nodes: list[FxNode]) -> Ref:
    """The results of linears that read the same input, side by side."""
    joined = side_by_side(b.program, nodes)
    matrix = b.store.matrix(joined.weight, joined.weight.value.numpy(), joined.factor)
    # One row may lie in any shape, unless a reshape follows: the converter would draw that one into the product.
    source = b.ref(x) if b.rows == 1 and len(nodes) > 1 else b.get(x)
    return b.linear(source, matrix, (joined.bias, joined.bias.value.numpy()))


def row_dot(b: Builder, n: FxNode) -> None:
    """Inner product of matching rows."""
    left, right, scale = n.args
    total = b.reduce("sum", b.mul(b.get(left), b.get(right)), -1)
    b.put(n, total if scale == 1 else b.mul(total, b.constant(scale)))


def lane_read(b: Builder, n: FxNode) -> None:
    """Weighted sum of the lanes."""
    stream, gates = n.args
    rows, lanes, width = b.dims_of(stream)
    if rows == 1:
        b.put(n, b.matmul(b.get(gates), b.get(stream, (lanes, width))))
        return
    # Many rows: a product would pack the whole stream anew.
    b.put(n, b.reduce("sum", b.mul(b.get(gates, (rows, lanes, 1)), b.get(stream)), 1))


def lane_write(b: Builder, n: FxNode) -> None:
    """Lane mixing, and the outer product of gates and vector."""
    stream, mix, gates, y, gain = n.args
    rows, lanes, width = b.dims_of(stream)
    lead = () if rows == 1 else (rows,)
    matrix, value = b.get(mix, (*lead, lanes, lanes)), b.get(stream, (*lead, lanes, width))
    gate, row = b.get(gates, (*lead, lanes, 1)), b.get(y, (*lead, 1, width))
    if rows == 1 and gain == 2:
        # One product: the vector as two further lanes, which is the gain of 2 as well.
        b.put(n, b.matmul(b.concat([matrix, gate, gate], -1), b.concat([value, row, row], -2)))
        return
    written = b.mul(b.mul(gate, b.constant(gain)), row)
    b.put(n, b.add(b.matmul(matrix, value), written))


def ngram_rows(b: Builder, n: FxNode) -> None:
    """The n-gram hash in 32-bit integers, all tables at once.

    Products wrap modulo 2^32 whatever the sign. A logical shift is a floor division, and the division's sign bits
    cut off by a remainder; the remainder of the unsigned number is that of the signed one with 2^32 mod slots
    added where it is negative.
    """
    tokens, history, position, seeds, orders, slots = n.args
    count = max(orders) - 1
    initial = b.program.weights[seeds.name].value.numpy().astype(np.uint32).view(np.int32)
    per_order = len(initial) // len(orders)
    order_of = np.repeat(np.asarray(orders), per_order)
    window = b.concat([b.get(history), b.get(tokens)], 0) if count else b.get(tokens)
    value = b.constant(initial.reshape(1, -1), np.int32)
    prime = b.constant(np.int32(HASH_PRIME), np.int32)
    for j in range(max(orders)):
        token = b.slice(window, 0, count - j, b.rows)
        token = token if b.rows == 1 else b.reshape(token, (b.rows, 1))
        mixed = b.binary("mul", b.binary("bitwise_xor", value, token), prime)
        live = (order_of > j).reshape(1, -1)
        value = mixed if live.all() else b.choose(b.constant(live, np.bool_), mixed, value)
    shifted = b.binary("floor_div", value, b.constant(1 << 15, np.int32))
    shifted = b.binary("floor_mod", shifted, b.constant(1 << 17, np.int32))
    value = b.binary("bitwise_xor", value, shifted)
    wrap = b.constant((1 << 32) % slots, np.int32)
    limit = b.constant(slots, np.int32)
    negative = b.compare("less", value, b.constant(0, np.int32))
    carry = b.choose(negative, wrap, b.constant(0, np.int32))
    rows = b.binary("add", b.binary("floor_mod", value, limit), carry)
    rows = b.binary("floor_mod", rows, limit)
    at = positions(b, position)
    at = at if b.rows == 1 else b.reshape(at, (b.rows, 1))
    reached = b.compare("greater_equal", at, b.constant([order_of - 1], np.int32))
    b.env[n] = (rows, b.to_float(reached), b.get(tokens))


def positions(b: Builder, position: FxNode) -> Ref:
    """Positions of the new rows, [T] int32."""
    if b.rows == 1:
        return b.get(position)
    if "positions" not in b.memo:
        b.memo["positions"] = b.binary("add", b.get(position), b.constant(np.arange(b.rows), np.int32))
    value: Ref = b.memo["positions"]
    return value


LOWERINGS: dict[object, Lowering] = {
    op("rms_norm"): rms_norm,
    op("add_rms_norm"): add_rms_norm,
    op("rotary"): rotary,
    op("sinkhorn"): sinkhorn,
    op("causal_taps"): causal_taps,
    op("kronecker"): kronecker,
    op("scaled_linear"): scaled_linear,
    op("row_dot"): row_dot,
    op("lane_read"): lane_read,
    op("lane_write"): lane_write,
    op("ngram_rows"): ngram_rows,
}
