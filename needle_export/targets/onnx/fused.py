"""Lowerings of the fused ops, except attention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode
from needle_export.targets.constants import side_by_side, sigmoid_of
from needle_export.targets.onnx import codebook
from needle_export.targets.onnx.builder import MICROSOFT, Builder, Dims, Ref
from needle_export.targets.onnx.elementwise import Lowering, rows_of
from needle_export.targets.onnx.integers import form_of, product
from needle_export.targets.onnx.load_time import taps_kernel


def rms_norm(b: Builder, n: FxNode) -> None:
    """One op from opset 23 on; before, the mean of squares written out."""
    x, scale, eps = n.args
    dims = b.dims_of(x)
    weight = b.program.weights[scale.name]
    data = weight.value.numpy()
    if b.rows == 1 and len(dims) == 3 and dims[0] == 1 and b.feature.attention:
        # [1, H, D] as [1, H, 1, D]: the shape that the rotation behind it takes.
        dims = (1, dims[1], 1, dims[2])
        data = data.reshape(data.shape[0], 1, data.shape[1]) if data.ndim == 2 else data
    value, gain = b.get(x, dims), b.array(weight, data)
    if data.ndim > 1 and not b.feature.contrib:
        # ONNX Runtime 1.23 takes scales of one axis only.
        unit = b.constant(np.ones(data.shape[-1], np.float32))
        b.put(n, b.op("Mul", _norm(b, value, unit, eps), gain), dims)
        return
    b.put(n, _norm(b, value, gain, eps), dims)


def _norm(b: Builder, value: ir.Value, gain: ir.Value, eps: float) -> ir.Value:
    if b.feature.attention:
        out: ir.Value = b.op("RMSNormalization", value, gain, axis=-1, epsilon=eps)
        return out
    square = b.op("ReduceMean", b.op("Mul", value, value), b.constant([-1], np.int64), keepdims=1)
    root = b.op("Sqrt", b.op("Add", square, b.constant(eps, np.float32)))
    scaled: ir.Value = b.op("Mul", b.op("Div", value, root), gain)
    return scaled


def add_rms_norm(b: Builder, n: FxNode) -> None:
    """The sum of two and its norm."""
    x, skip, scale, eps = n.args
    dims = b.dims_of(x)
    left, right, gain = b.get(x), b.get(skip), b.weight(scale)
    if b.feature.contrib:
        out = b.op("SkipSimplifiedLayerNormalization", left, right, gain, outputs=4, domain=MICROSOFT, epsilon=eps)
        for unused in out[1:3]:
            unused.name = ""
        b.env[n] = (Ref(out[0], dims), Ref(out[3], dims))
        return
    total = b.op("Add", left, right)
    b.env[n] = (Ref(_norm(b, total, gain, eps), dims), Ref(total, dims))


def rotary(b: Builder, n: FxNode) -> None:
    """Half-split rotation of all heads."""
    x, cos, sin = n.args
    dims = b.dims_of(x)
    rows, heads, width = dims
    half = width // 2 if width is not None else 0
    if not b.feature.attention:
        left, right = b.op("Split", b.get(x), b.constant([half, half], np.int64), outputs=2, axis=-1)
        c, s = (b.get(a, (rows, 1, half)) for a in (cos, sin))
        first = b.op("Sub", b.op("Mul", left, c), b.op("Mul", right, s))
        second = b.op("Add", b.op("Mul", right, c), b.op("Mul", left, s))
        b.put(n, b.op("Concat", first, second, axis=-1))
        return
    c, s = (b.get(a, (1, rows, half)) for a in (cos, sin))
    if b.rows == 1:
        flat: Dims = (1, heads, 1, width)
        b.put(n, b.op("RotaryEmbedding", b.get(x, flat), c, s), flat)
        return
    assert heads is not None and width is not None
    flat = (1, rows, heads * width)
    b.put(n, b.op("RotaryEmbedding", b.get(x, flat), c, s, num_heads=heads), flat)


def sinkhorn(b: Builder, n: FxNode) -> None:
    """One op a half iteration.

    The first is a softmax, which is exp and rows at once and can't overflow; or all in the log domain, which
    takes half as long again.
    """
    logits, iterations = n.args
    size = b.dims_of(n)[-1]
    dims: Dims = (size, size) if b.rows == 1 else (b.rows, size, size)
    value = b.get(logits, dims)
    if b.feature.lp_normalization:
        value = b.op("Softmax", value, axis=-1)
        for half in range(1, 2 * iterations):
            value = b.op("LpNormalization", value, axis=-2 if half % 2 else -1, p=1)
    else:
        for half in range(2 * iterations):
            value = b.op("LogSoftmax", value, axis=-2 if half % 2 else -1)
        value = b.op("Exp", value)
    b.put(n, value, dims)


def causal_taps(b: Builder, n: FxNode) -> None:
    """Depthwise convolution with carried history; its state lies channels first, [1, C, reach]."""
    x, history, taps, dilation = n.args
    weight = b.program.weights[taps.name]
    count, channels = weight.value.shape
    reach = (count - 1) * dilation
    by_hand = b.rows == 1 and not b.feature.contrib
    kernel = taps_kernel(b, weight, dilation, by_hand)
    past = b.ref(history).value
    if b.rows == 1:
        column = b.get(x, (1, channels, 1))
    else:
        turned = Ref(b.op("Transpose", b.get(x), perm=[1, 0]), (channels, None))
        column = b.shaped(turned, (1, channels, None))
    if b.feature.contrib:
        y, following = b.op(
            "CausalConvWithState",
            column,
            kernel,
            None,
            past,
            outputs=2,
            domain=MICROSOFT,
        )
    else:
        window = b.op("Concat", past, column, axis=2)
        if by_hand:
            y = b.op("ReduceSum", b.op("Mul", window, kernel), b.constant([2], np.int64), keepdims=1)
        else:
            y = b.op("Conv", window, kernel, group=channels, kernel_shape=[reach + 1])
        ends = [b.constant([e], np.int64) for e in (-reach, np.iinfo(np.int64).max, 2)]
        following = b.op("Slice", window, *ends)
    state = Ref(following, (1, channels, reach))
    if b.rows == 1:
        b.env[n] = (Ref(y, (1, channels, 1)), state)
        return
    rows = b.shaped(Ref(y, (1, channels, None)), (channels, None))
    b.env[n] = (Ref(b.op("Transpose", rows, perm=[1, 0]), (None, channels)), state)


def kronecker(b: Builder, n: FxNode) -> None:
    """Two small matmuls, in the order that multiplies less at one row."""
    x, a, c = n.args
    rows, out = b.program.weights[a.name].value.shape
    inner, width = b.program.weights[c.name].value.shape
    lead: tuple[int | None, ...] = () if b.rows == 1 else (None,)
    value = b.get(x, (*lead, rows, inner))
    left, right = b.matrix(a, transpose=True), b.matrix(c)
    if b.rows == 1 and rows > out:
        value = b.op("MatMul", b.op("MatMul", left, value), right)
    else:
        value = b.op("MatMul", left, b.op("MatMul", value, right))
    b.put(n, value, (*lead, out, width))


def scaled_linear(b: Builder, n: FxNode) -> None:
    """A matmul with a factor and a bias in one op; in integers, one for all that read the same."""
    x, weight, bias, alpha = n.args
    codes = b.program.weights[weight.name]
    if codes.codes:
        b.put(n, b.op("Gemm", b.get(x), codebook.matrix(b, codes), b.weight(bias), alpha=b.number(alpha), transB=1))
        return
    if ("joined", x) in b.memo:
        return
    alike = [u for u in x.users if u.target is n.target]
    # Those that a sigmoid follows side by side, so that it is one op.
    gates = [u for u in alike if sigmoid_of(u) is not None]
    readers = [*gates, *(u for u in alike if u not in gates)]
    joined = side_by_side(b.program, readers)
    form = form_of(b, joined.weight, *joined.weight.value.shape)
    if form is None:
        b.put(n, b.op("Gemm", b.get(x), b.matrix(weight), b.weight(bias), alpha=b.number(alpha)))
        return
    b.memo["joined", x] = True
    addend = b.small(joined.bias)
    whole = product(b, b.get(x), joined.weight, joined.weight.value.numpy(), form, joined.factor, addend)
    opened = sum(joined.widths[: len(gates)])
    cuts = [w for w in (opened, sum(joined.widths) - opened) if w]
    parts = b.op("Split", whole, b.constant(cuts, np.int64), outputs=2, axis=-1) if len(cuts) > 1 else (whole,)
    for part, nodes in zip(parts, [g for g in (gates, readers[len(gates) :]) if g], strict=True):
        results = [sigmoid_of(u) if nodes is gates else u for u in nodes]
        value = b.op("Sigmoid", part) if nodes is gates else part
        widths = [int(b.dims_of(u)[-1] or 0) for u in nodes]
        values = (value,)
        if len(nodes) > 1:
            values = b.op("Split", value, b.constant(widths, np.int64), outputs=len(nodes), axis=-1)
        for result, piece in zip(results, values, strict=True):
            b.put(result, piece)


def row_dot(b: Builder, n: FxNode) -> None:
    """Inner product of matching rows; at one row, a matmul."""
    left, right, scale = n.args
    if b.rows == 1:
        b.put(n, b.op("Gemm", b.get(left), b.get(right), transB=1, alpha=scale))
        return
    product = b.op("Mul", b.get(left), b.get(right))
    total = b.op("ReduceSum", product, b.constant([-1], np.int64), keepdims=1)
    b.put(n, b.op("Mul", total, b.constant(scale, np.float32)))


def lane_read(b: Builder, n: FxNode) -> None:
    """Weighted sum of the lanes."""
    stream, gates = n.args
    _, lanes, width = b.dims_of(stream)
    if b.rows == 1:
        b.put(n, b.op("MatMul", b.get(gates), b.get(stream, (lanes, width))))
        return
    b.put(n, b.op("MatMul", b.get(gates, (None, 1, lanes)), b.get(stream)), (None, 1, width))


def lane_write(b: Builder, n: FxNode) -> None:
    """Lane mixing and the outer product written back; at one row, two matmuls with an addend."""
    stream, mix, gates, y, gain = n.args
    _, lanes, width = b.dims_of(stream)
    if b.rows == 1:
        square: Dims = (lanes, lanes)
        outer = b.op("Gemm", b.get(gates), b.get(y), transA=1, alpha=gain)
        value = b.op("Gemm", b.get(mix, square), b.get(stream, (lanes, width)), outer)
        b.put(n, value, (lanes, width))
        return
    strength = b.op("Mul", b.get(gates), b.constant(gain, np.float32))
    column = b.shaped(Ref(strength, (None, lanes)), (None, lanes, 1))
    written = b.op("Mul", column, b.get(y, (None, 1, width)))
    b.put(n, b.op("Add", b.op("MatMul", b.get(mix), b.get(stream)), written))


def ngram_rows(b: Builder, n: FxNode) -> None:
    """The n-gram hash, all tables at once.

    int64 holds every product: the accumulator is below 2^32 and the prime below 2^25.
    """
    tokens, history, position, seeds, orders, slots = n.args
    count = max(orders) - 1
    total = b.program.weights[seeds.name].value.numel()
    per_order = total // len(orders)
    order_of = np.repeat(np.asarray(orders), per_order)
    window = b.op("Concat", b.get(history), b.get(tokens), axis=0) if count else b.get(tokens)
    if b.rows == 1 and count:
        pieces = b.op("Split", window, b.constant([1] * (count + 1), np.int64), outputs=count + 1, axis=0)
        back = [Ref(p, (1,)) for p in reversed(pieces)]
    else:
        ends = [np.iinfo(np.int64).max, *(-j for j in range(1, count + 1))]
        back = [
            Ref(
                b.op("Slice", window, *(b.constant([v], np.int64) for v in (count - j, ends[j], 0))),
                (b.rows,),
            )
            for j in range(count + 1)
        ]
    value = b.constant(b.program.weights[seeds.name].value.numpy().reshape(1, total))
    prime, mask = b.constant(0x01000193, np.int64), b.constant(0xFFFFFFFF, np.int64)
    for j in range(max(orders)):
        mixed = b.op("BitwiseXor", value, b.shaped(back[j], (b.rows, 1)))
        following = b.op("BitwiseAnd", b.op("Mul", mixed, prime), mask)
        live = order_of > j
        value = following if live.all() else b.op("Where", b.constant(live.reshape(1, total)), following, value)
    value = b.op("BitwiseXor", value, b.op("Div", value, b.constant(1 << 15, np.int64)))
    rows = b.op("Mod", value, b.constant(slots, np.int64))
    at = b.shaped(Ref(positions(b, position), (b.rows,)), (b.rows, 1))
    reached = b.op("GreaterOrEqual", at, b.constant((order_of - 1).reshape(1, total).astype(np.int64)))
    valid = b.op("Cast", reached, to=int(ir.DataType.FLOAT))
    tail = [b.constant([v], np.int64) for v in (-count, np.iinfo(np.int64).max, 0)]
    following_history = b.op("Slice", window, *tail) if count else window
    dims: Dims = (b.rows, total)
    b.env[n] = (Ref(rows, dims), Ref(valid, dims), Ref(following_history, (count,)))


def positions(b: Builder, position: FxNode) -> ir.Value:
    """Positions of the new rows, [T] int64."""
    if b.rows == 1:
        return b.get(position)
    if "positions" not in b.memo:
        steps = b.op("Range", b.constant(0, np.int64), rows_of(b), b.constant(1, np.int64))
        b.memo["positions"] = b.op("Add", b.get(position), steps)
    value: ir.Value = b.memo["positions"]
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
