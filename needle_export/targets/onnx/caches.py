"""Rows of keys and values in their stored form: how new ones are rounded, written, and read.

Rows are [s, G, D], in one of three forms, which the cache's input says: float32 as it is; float16, which is cast where
attention reads it; int8 with float32 scales [s, G, 1] beside it. A product with int8 rows has the scales behind it, one
for each score, or in front, one for each weight: there are D / R times fewer of these than of numbers (R query heads a
group). At one row of queries and 1,024 of keys, one layer, that took 1.4 times as long as float32, scales on the rows
2.3 times, and DequantizeLinear with a block a row 6.6 times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from needle_export.graph.program import FxNode
from needle_export.targets.onnx.builder import Builder
from needle_export.weights.caches import LEAST


@dataclass(frozen=True)
class Rows:
    """Rows of a cache, or new ones on their way there.

    Attributes:
        values: [s, G, D] in the cache's form.
        half: whether they are float16.
        scales: float32 [s, G, 1] of int8, or None.
    """

    values: ir.Value
    half: bool = False
    scales: ir.Value | None = None


def each(made: Callable[..., ir.Value], *rows: Rows) -> Rows:
    """The values of rows of one form, and their scales if they have any, each through ``made``."""
    first = rows[0]
    scales = None if first.scales is None else made(*(r.scales for r in rows))
    return Rows(made(*(r.values for r in rows)), first.half, scales)


def give_scales(b: Builder, values: ir.Value, scales: ir.Value) -> None:
    """Note that a cache of int8 has these scales."""
    b.memo["scales", values] = scales


def scales_of(b: Builder, values: ir.Value) -> ir.Value | None:
    """A cache's scales, of int8."""
    found: ir.Value | None = b.memo.get(("scales", values))
    return found


def bound(b: Builder, cache: FxNode) -> Rows:
    """A cache as the host has bound it."""
    values = b.ref(cache).value
    return Rows(values, values.dtype == ir.DataType.FLOAT16, scales_of(b, values))


def as_stored(b: Builder, cache: Rows, rows: ir.Value) -> Rows:
    """New rows, float32 [..., D], in the form of the cache that they go to; as ``weights.caches`` rounds them."""
    if cache.scales is not None:
        peak = b.op("ReduceMax", b.op("Abs", rows), b.constant([-1], np.int64), keepdims=1)
        step = b.op("Div", peak, b.constant(127.0, np.float32))
        scales = b.op("Max", step, b.constant(LEAST, np.float32))
        levels = b.op("Round", b.op("Div", rows, scales))
        return Rows(b.op("Cast", levels, to=int(ir.DataType.INT8)), scales=scales)
    return Rows(b.op("Cast", rows, to=int(ir.DataType.FLOAT16)), half=True) if cache.half else Rows(rows)


def written(b: Builder, cache: Rows, target: ir.Value, rows: Rows) -> Rows:
    """A cache with rows in the places that ``target`` names, as ScatterND has it."""
    return each(lambda old, new: b.op("ScatterND", old, target, new), cache, rows)


def behind_each_other(b: Builder, old: Rows, new: Rows) -> Rows:
    """Rows of a cache and new ones."""
    return each(lambda a, c: b.op("Concat", a, c, axis=0), old, new)


def widened(b: Builder, rows: Rows) -> ir.Value:
    """As float32, without their scales."""
    if rows.scales is None and not rows.half:
        return rows.values
    value: ir.Value = b.op("Cast", rows.values, to=int(ir.DataType.FLOAT))
    return value


def floats(b: Builder, rows: Rows) -> ir.Value:
    """What rows stand for, in float32."""
    value = widened(b, rows)
    return value if rows.scales is None else b.op("Mul", value, rows.scales)


def scaled(b: Builder, columns: ir.Value, rows: Rows) -> ir.Value:
    """[G, .., s] times the scales of s rows: scores with keys, or weights of values."""
    if rows.scales is None:
        return columns
    value: ir.Value = b.op("Mul", columns, b.op("Transpose", rows.scales, perm=[1, 2, 0]))
    return value
