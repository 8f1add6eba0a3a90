"""Lowerings of the fused ops, except attention.

In packages that compute in half precision, the sums of squares of norms and all of Sinkhorn's iterations are taken in
float32: a square overflows from 256 on, and Sinkhorn's small entries vanish.
"""

from __future__ import annotations

import math

import numpy as np

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode
from needle_export.targets.constants import is_constant, side_by_side
from needle_export.targets.coreml import codebook
from needle_export.targets.coreml.builder import Builder
from needle_export.targets.coreml.elementwise import Lowering
from needle_export.targets.views import Ref

#: Added to a variance where the op wants something; far below what float32 tells from 1.
TINY = 1e-20


def rms_norm(b: Builder, n: FxNode) -> None:
    """Four ops, and one where there is a scale; in half precision two casts more."""
    x, scale, eps = n.args
    rows, width = math.prod(b.dims_of(x)[:-1]), b.dims_of(x)[-1]
    held = b.ref(x)
    # Lanes side by side are summed as they lie.
    whole = _ones(b, scale) and rows == b.rows and (rows == 1 or held.dims[0] == rows)
    b.put(n, _norm(b, held if whole else b.get(x), scale, eps, width))


def _norm(b: Builder, x: Ref, scale: FxNode, eps: float, width: int) -> Ref:
    """x over the root mean square of its last axes, which have D entries, times a scale.

    The mean's 1/D moves out of the root: x / sqrt(sum(x^2) + D eps) * sqrt(D). It is not drawn into the scale, which
    in half precision would be rounded anew.

    Args:
        width: D.
    """
    wide, count, axis = b.wide(x), 1, len(x.dims)
    while count < width:
        axis -= 1
        count *= x.dims[axis]
    power = b.reduce("sum_square", wide, *range(axis, len(x.dims)))
    root = b.unary("rsqrt", power, epsilon=np.float32(eps * width))
    root = b.ref_of(b.op("mul", x=root, y=np.float32(math.sqrt(width))))
    unit = b.narrow(b.ref_of(b.op("mul", x=wide, y=root)))
    return unit if _ones(b, scale) else b.mul(unit, b.vector(scale))


def _ones(b: Builder, scale: FxNode) -> bool:
    """Whether a scale is 1 and no checkpoint tensor stands behind it."""
    weight = b.program.weights[scale.name]
    return is_constant(weight.parts) and bool((weight.value == 1).all())


def add_rms_norm(b: Builder, n: FxNode) -> None:
    """The sum of two and its norm."""
    x, skip, scale, eps = n.args
    total = b.add(b.get(x), b.get(skip))
    b.env[n] = (_norm(b, total, scale, eps, total.dims[-1]), total)


def rotary(b: Builder, n: FxNode) -> None:
    """x cos + turned(x) sin, where one constant product turns: (x1, x2) to (-x2, x1)."""
    x, cos, sin = n.args
    rows, _, width = b.dims_of(x)
    key = ("rotation", cos, sin)
    if key not in b.memo:
        turns = []
        for part in (cos, sin):
            half = b.get(part, (rows, 1, width // 2))
            turns.append(b.concat([half, half], -1))
        b.memo[key] = turns
    c, s = b.memo[key]
    pairs = width // 2
    turn = np.zeros((width, width))
    turn[np.arange(pairs), np.arange(pairs) + pairs] = 1
    turn[np.arange(pairs) + pairs, np.arange(pairs)] = -1
    value = b.get(x)
    turned = b.matmul(value, b.constant(turn))
    b.put(n, b.add(b.mul(value, c), b.mul(turned, s)))


def sinkhorn(b: Builder, n: FxNode) -> None:
    """One op a half iteration.

    A softmax is exp and the first rows at once. Then square roots stand for the entries: dividing roots by the length
    of their row is dividing entries by their row's sum. With the roots' negatives beside them the mean of a row is 0,
    its variance the mean square, and a layer norm over both does the division.
    """
    logits, iterations = n.args
    rows, lanes, _ = b.dims_of(n)
    wide = b.wide(b.get(logits, (rows, lanes, 1, lanes)))
    root = b.unary("sqrt", b.unary("softmax", wide, axis=-1))
    value = b.ref_of(b.op("mul", x=root, y=np.asarray([[1], [-1]], np.float32)))
    for half in range(1, 2 * iterations):
        axes = [1, 2] if half % 2 else [2, 3]
        value = b.unary("layer_norm", value, axes=axes, epsilon=np.float32(TINY))
    # Entries of unit variance: over 2n values, n of them squares of roots, the sum of squares is n. Each counts twice.
    twice = b.reduce("sum_square", value, 2, keep=False)
    mixed = b.ref_of(b.op("mul", x=twice, y=np.float32(1 / (2 * lanes))))
    b.put(n, b.narrow(mixed))


def causal_taps(b: Builder, n: FxNode) -> None:
    """Depthwise convolution over past and new rows; the rows that the next call needs are left behind."""
    x, history, taps, dilation = n.args
    weight = b.program.weights[taps.name]
    count, channels = weight.value.shape
    reach = (count - 1) * dilation
    held = _history(b, history, reach, channels)
    window = b.concat([held, b.get(x, (1, b.rows, channels))], 1)
    if b.rows == 1:
        kernel = np.zeros((reach + 1, channels), np.float32)
        kernel[reach::-dilation] = weight.value.numpy()
        product = b.mul(window, Ref(b.store.plain(weight, kernel, every=dilation), kernel.shape))
        filtered = b.reduce("sum", product, 1, keep=False)
        b.left[history.name] = b.slice(window, 1, 1, reach)
    else:
        kernel = np.ascontiguousarray(weight.value.numpy()[::-1].T).reshape(channels, 1, count)
        wide = b.op(
            "conv",
            x=b.transpose(window, (0, 2, 1)),
            weight=b.store.plain(weight, kernel, every=1),
            strides=[1],
            pad_type="valid",
            pad=[0, 0],
            dilations=[dilation],
            groups=channels,
        )
        filtered = b.transpose(wide, (0, 2, 1))
        # The last rows of those that are real: padding behind them must not be remembered.
        begin = b.memo.get("count_begin")
        if begin is None:
            zero = b.constant(np.zeros(1), np.int32)
            begin = b.concat([zero, Ref(b.inputs["count"], (1,)), zero], 0)
            b.memo["count_begin"] = begin
        b.left[history.name] = b.ref_of(
            b.op("slice_by_size", x=window, begin=begin, size=np.asarray((1, reach, channels), np.int32))
        )
    b.env[n] = (filtered, None)


def _history(b: Builder, node: FxNode, reach: int, channels: int) -> Ref:
    """Rows before the new ones, [1, reach, channels], in the float type."""
    name = node.name
    layer = int(name.rpartition("_")[2]) if name.startswith("taps_") else -1
    port = "taps" if layer >= 0 else name
    if port not in b.memo:
        held = read_state(b, port)
        b.memo[port] = b.cut(held, 0, [1] * held.dims[0]) if layer >= 0 else (held,)
    pieces: tuple[Ref, ...] = b.memo[port]
    return b.reshape(pieces[max(layer, 0)], (1, reach, channels))


def read_state(b: Builder, port: str) -> Ref:
    """A state's value, in the float type; states are in half precision whatever the scheme."""
    if not b.stateful:
        value = b.inputs[port]
        return Ref(value, tuple(int(d) for d in value.shape))
    held = b.ref_of(b.op("read_state", input=b.inputs[port]))
    return held if b.store.half else b.ref_of(b.op("cast", x=held, dtype="fp32"))


def write_state(b: Builder, port: str, value: Ref) -> Ref:
    """Replace a state; its new value, in half precision."""
    half = value if b.store.half else b.ref_of(b.op("cast", x=value, dtype="fp16"))
    return b.ref_of(b.op("coreml_update_state", state=b.inputs[port], value=half))


def kronecker(b: Builder, n: FxNode) -> None:
    """A product with the transposed first factor on the left, and one with the second on the right."""
    x, a, c = n.args
    left, right = (b.program.weights[f.name] for f in (a, c))
    rows, inner = left.value.shape[0], right.value.shape[0]
    value = b.get(x, (b.rows, rows, inner))
    # Under one shape in every function, so that all share it.
    turned = np.ascontiguousarray(left.value.t().numpy())[None]
    value = b.matmul(Ref(b.store.plain(left, turned, every=1), turned.shape), value)
    b.put(n, b.linear(value, b.store.plain(right, np.ascontiguousarray(right.value.t().numpy()), every=1)))


def scaled_linear(b: Builder, n: FxNode) -> None:
    """A product with factor and bias, one for all that read the same."""
    x = n.args[0]
    # Codes of several widths have no levels in common.
    readers = [u for u in x.users if u.target is n.target and _codes(b, u) == _codes(b, n)]
    if n is not readers[0]:
        return
    joined = side_by_side(b.program, readers)
    bias = Ref(b.store.plain(joined.bias, joined.bias.value.numpy()), joined.factor.shape)
    if joined.weight.codes:
        product = b.add(b.mul(codebook.product(b, b.get(x), joined.weight), b.constant(joined.factor)), bias)
    elif (joined.factor == 1).all():
        product = b.linear(b.get(x), b.store.matrix(joined.weight, joined.weight.value.numpy()), bias)
    else:
        matrix = b.store.matrix(joined.weight, joined.weight.value.numpy())
        product = b.add(b.mul(b.linear(b.get(x), matrix), b.constant(joined.factor)), bias)
    for reader, value in zip(readers, b.cut(product, -1, joined.widths), strict=True):
        b.put(reader, value)


def _codes(b: Builder, n: FxNode) -> list[str]:
    """Forms of the codes of what a product multiplies by."""
    return [c.form for c in b.program.weights[n.args[1].name].codes]


def row_dot(b: Builder, n: FxNode) -> None:
    """Inner product of matching rows; summed in float32."""
    left, right, scale = n.args
    product = b.wide(b.mul(b.get(left), b.get(right)))
    total = b.reduce("sum", product, -1)
    b.put(n, b.narrow(b.ref_of(b.op("mul", x=total, y=np.float32(scale)))))


def lane_read(b: Builder, n: FxNode) -> None:
    """Weighted sum of the lanes."""
    stream, gates = n.args
    rows, lanes, width = b.dims_of(stream)
    lead = () if rows == 1 else (rows,)
    b.put(n, b.matmul(b.get(gates, (*lead, 1, lanes)), b.get(stream, (*lead, lanes, width))))


def lane_write(b: Builder, n: FxNode) -> None:
    """Lane mixing, and the outer product of gates and vector."""
    stream, mix, gates, y, gain = n.args
    rows, lanes, width = b.dims_of(stream)
    lead = () if rows == 1 else (rows,)
    mixed = b.matmul(b.get(mix, (*lead, lanes, lanes)), b.get(stream, (*lead, lanes, width)))
    row = b.mul(b.get(y, (*lead, 1, width)), gain)
    b.put(n, b.add(mixed, b.mul(b.get(gates, (*lead, lanes, 1)), row)))


def ngram_rows(b: Builder, n: FxNode) -> None:
    """Inputs: MIL has no unsigned arithmetic to hash with, and the host does it in a few lines."""
    rows, valid = b.inputs["ngram_rows"], b.inputs["ngram_valid"]
    tables = int(rows.shape[1])
    b.env[n] = (Ref(rows, (b.rows, tables)), Ref(valid, (b.rows, tables)), None)


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
