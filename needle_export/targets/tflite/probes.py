"""Lowerings for probe heads: what a step adds to a head's pools, and the answer that the pools give."""

from __future__ import annotations

import numpy as np

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode
from needle_export.graph.reference import PROBE_PADDING
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.elementwise import Lowering, aten
from needle_export.targets.views import Ref

#: XNNPACK joins up to so many values at once; a longer CONCATENATION would cut the step in two.
JOINED = 5

#: Why the probes stay float32 where matrices don't.
_FLOAT = "multiplied entry by entry in a step, which is done in float32"


def stack(b: Builder, n: FxNode) -> None:
    """Rows of probe heads, [T, C] each, behind each other; joined in turns of a few."""
    # Along a new first axis, as the model stacks them.
    joined = [b.get(v) for v in n.args[0]]
    while len(joined) > 1:
        size = -(-len(joined) // -(-len(joined) // JOINED))
        joined = [b.concat(joined[i : i + size], 0) for i in range(0, len(joined), size)]
    b.put(n, joined[0])


def probe_absorb(b: Builder, n: FxNode) -> None:
    """A running softmax over positions: 13 ops at one position, 17 at many.

    At one position there is no padding: a call without a token would not be made.
    """
    cells, probes, count, best, total, pool, scale = n.args
    many = b.rows > 1
    weight = b.program.weights[probes.name]
    reason = "" if b.store.rules.of(weight.parts) == "fp32" else _FLOAT
    scaled = b.store.plain(weight, weight.value.numpy() * np.float32(scale), reason)
    read = b.get(cells)
    if many:
        # Probes on the left, so that a position's scores lie as its weights must lie below.
        scores = b.add(b.matmul(scaled, read, transpose_y=True), _padding(b, count))
    else:
        # The product would lay out the cells anew for the few probes: it takes 147 us where these two take 9.
        scores = b.reduce("sum", b.mul(scaled, read), -1)
    largest = b.reduce("reduce_max", scores, -1) if many else scores
    top = b.binary("maximum", b.get(best), largest)
    kept = b.unary("exp", b.binary("sub", b.get(best), top))
    weights = b.unary("exp", b.binary("sub", scores, top))
    added = b.reduce("sum", weights, -1) if many else weights
    picked = b.matmul(weights, read) if many else b.mul(weights, read)
    b.env[n] = (
        top,
        b.add(b.mul(b.get(total), kept), added),
        b.add(b.mul(b.get(pool), kept), picked),
    )


def _padding(b: Builder, count: FxNode) -> Ref:
    """0 for real positions and a large negative number behind, [1, 1, T]; the same for all heads."""
    if "padding" not in b.memo:
        places = b.constant(np.arange(b.rows).reshape(1, 1, -1), np.int32)
        real = b.compare("less", places, b.get(count))
        b.memo["padding"] = b.choose(real, b.constant(0.0), b.constant(PROBE_PADDING))
    value: Ref = b.memo["padding"]
    return value


def probe_answer(b: Builder, n: FxNode) -> None:
    """The pools' norms, a softmax of each query over all of them, and the projection."""
    total, pool, gain, query, row_bias, kernel, bias, scale, eps, unit = n.args
    rows, probes, width = b.dims_of(pool)
    pooled = b.binary("div", b.get(pool), b.get(total))
    power = b.add(b.reduce("mean", b.mul(pooled, pooled), -1), b.constant(eps))
    pooled = b.mul(b.mul(pooled, b.vector(gain, (rows, probes, 1))), b.unary("rsqrt", power))
    pooled = b.reshape(pooled, (rows * probes, width))
    queries = b.dims_of(query)[0]
    match = b.matmul(b.vector(query, factor=scale), pooled, transpose_y=True)
    match = b.add(match, b.vector(row_bias, (queries, rows * probes)))
    picked = b.reshape(b.matmul(b.softmax(match), pooled), (1, queries * width))
    matrix = b.program.weights[kernel.name]
    data = np.ascontiguousarray(matrix.value.numpy().T)
    addend = b.program.weights[bias.name]
    out = b.linear(picked, b.store.matrix(matrix, data), (addend, addend.value.numpy()))
    if unit:
        length = b.add(b.reduce("sum", b.mul(out, out), -1), b.constant(1e-12))
        out = b.mul(out, b.unary("rsqrt", length))
    b.put(n, out)


LOWERINGS: dict[object, Lowering] = {
    aten.stack.default: stack,
    op("probe_absorb"): probe_absorb,
    op("probe_answer"): probe_answer,
}
