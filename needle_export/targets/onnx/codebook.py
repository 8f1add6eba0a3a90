"""Weights in codebook form: the file holds packed indices and norms, exactly; the runtime makes numbers of them.

Matrices are unpacked by nodes of constants alone, which the runtime computes when it loads the file: from then on a
product is one of float32. Of a table only the rows that are looked up are unpacked, at every step.

Dimension letters: O outputs, I inputs, G groups of a row, g elements of a group, P indices in a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from needle_export.graph.ops import op
from needle_export.graph.program import FxNode, Weight
from needle_export.graph.reference import hadamard
from needle_export.targets.claims import coded_name, norms_name
from needle_export.targets.constants import short_name
from needle_export.targets.onnx.builder import Builder, Dims
from needle_export.targets.onnx.store import packed

_FLOAT = int(ir.DataType.FLOAT)

#: Bits that an index takes in the file, by those that it needs: bytes divide into no threes.
WIDTHS = {1: 1, 2: 2, 3: 4, 4: 4}


def matrix(b: Builder, weight: Weight, site: int = 0) -> ir.Value:
    """One of a weight's coded matrices as float32 [O, I]; nodes of constants alone."""
    key = ("codes", weight.name, site)
    if key not in b.memo:
        codes = weight.codes[site]
        stream, norms, levels = _stored(b, weight, site)
        b.memo[key] = _numbers(b, stream, norms, levels, codes.indices.shape, codes.group)
    value: ir.Value = b.memo[key]
    return value


def kernel(b: Builder, weight: Weight) -> ir.Value:
    """A coded kernel, float32 [I, O], or [S, I, O] for S sites; nodes of constants alone."""
    whole = [matrix(b, weight, site) for site in range(len(weight.codes))]
    if weight.value.dim() == 2:
        turned: ir.Value = b.op("Transpose", whole[0], perm=[1, 0])
        return turned
    rows, columns = weight.codes[0].indices.shape
    stacked = b.op("Reshape", b.op("Concat", *whole, axis=0), b.constant([len(whole), rows, columns], np.int64))
    value: ir.Value = b.op("Transpose", stacked, perm=[0, 2, 1])
    return value


def lookup(b: Builder, n: FxNode, weight: Weight) -> None:
    """Rows of a coded table by indices of any shape, not yet rotated back."""
    codes, dims = weight.codes[0], b.dims_of(n)
    stream, norms, levels = _stored(b, weight, 0)
    index = b.get(n.args[1], (None,))
    rows = [b.op("Gather", table, index, axis=0) for table in (stream, norms)]
    whole = _numbers(b, rows[0], rows[1], levels, (-1, codes.indices.shape[1]), codes.group)
    b.put(n, whole, (_lead(b, dims), dims[-1]))


def turn(b: Builder, n: FxNode) -> None:
    """The rotation of groups of the last axis."""
    x, group = n.args
    dims = b.dims_of(n)
    apart = (_lead(b, dims), int(dims[-1] or 0) // group, group)
    b.put(n, b.op("MatMul", b.get(x, apart), b.constant(hadamard(torch.eye(group), group).numpy())), apart)


def _lead(b: Builder, dims: Dims) -> int | None:
    """How many rows there are, the last axis apart; None where T is among them."""
    return None if None in dims[:-1] else b.numel(dims[:-1])


def _numbers(
    b: Builder, stream: ir.Value, norms: ir.Value, levels: ir.Value, shape: tuple[int, int], group: int
) -> ir.Value:
    """Packed indices [O, I / P] and norms [O, G] as float32 [O, I]."""
    rows, columns = shape
    pieces = b.op("Gather", levels, b.op("Cast", stream, to=int(ir.DataType.INT32)), axis=0)
    units = b.op("Reshape", pieces, b.constant([rows, columns // group, group], np.int64))
    lengths = b.op("Reshape", b.op("Cast", norms, to=_FLOAT), b.constant([rows, columns // group, 1], np.int64))
    whole: ir.Value = b.op("Reshape", b.op("Mul", units, lengths), b.constant([rows, columns], np.int64))
    return whole


def _stored(b: Builder, weight: Weight, site: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Packed indices uint8 [O, I / P], norms float16 [O, G], and the levels of every byte, float32 [256, P]."""
    codes = weight.codes[site]
    width = WIDTHS[codes.bits]
    each = 8 // width
    parts = tuple(replace(p, elements=p.elements // len(weight.codes)) for p in weight.parts)
    shared = tuple(replace(p, elements=max(1, p.elements // codes.group)) for p in parts)
    name = short_name(weight.name) if weight.value.dim() == 2 else f"{short_name(weight.name)}.{site}"
    stream = packed(codes.indices, width)
    indices = b.part(b.store.add(name, stream, parts, dtype=codes.form), stream.shape, coded_name(name))
    # Not called halves: those are numbers of the checkpoint's tensor, which the reference rounds.
    norms = b.part(b.store.add(f"{name}.norms", codes.norms, shared, dtype=f"{codes.form} norms"), codes.norms.shape,
                   norms_name(name))
    every = np.arange(256)[:, None] >> (np.arange(each) * width) & (2**width - 1)
    return indices, norms, b.constant(np.resize(codes.levels, 2**width)[every])


LOWERINGS: dict[object, Callable[[Builder, FxNode], None]] = {op("hadamard"): turn}
