"""Integer weights in ONNX Runtime's own ops: MatMulNBits multiplies by them, GatherBlockQuantized reads their rows.

Both read the same bytes: unsigned levels, as many to a byte as fit, the first in its lowest bits, and a
float32 scale for each run of columns of a row. A tied embedding lies in the file once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from needle_export.config import schemes
from needle_export.config.options import OWN_OPS_SCHEMES
from needle_export.graph.program import Weight
from needle_export.targets.constants import digest, short_name, too_large
from needle_export.targets.onnx.builder import MATRIX, MICROSOFT, Builder, matrix_name
from needle_export.targets.onnx.store import packed
from needle_export.weights.forms import Form

#: Bits of a level by scheme.
BITS = {s.name: s.bits for s in schemes.ALL if s.name in OWN_OPS_SCHEMES}

#: Columns that share a scale, as far as they divide a row.
BLOCK = 128

#: The fewest that the ops take, by bits; of 16 the two-bit one makes floats and multiplies them by floats.
_LEAST = {8: 16, 4: 16, 2: 32}

#: Inputs are rounded to int8 in the product. At level 0, the default, it is up to a hundred times slower.
_ACCURACY = 4


def form_of(b: Builder, weight: Weight, rows: int, columns: int) -> Form | None:
    """How a matrix [O, I] is stored under its scheme, or None where it stays a float."""
    scheme = b.rules.of_matrix(weight.parts)
    return None if weight.folded else block_form(scheme, rows, columns)


def block_form(scheme: str, rows: int, columns: int) -> Form | None:
    """As :func:`form_of`, of a checkpoint's own matrix."""
    bits, block = BITS.get(scheme), math.gcd(BLOCK, columns)
    if bits is None or rows * columns < MATRIX or block < _LEAST[bits]:
        return None
    return Form("int", bits, block)


def widened_form(b: Builder, weight: Weight) -> Form | None:
    """How a matrix [I, O] is stored under its scheme where a runtime makes floats of it when it loads it.

    In four bits at least, as the runtime's Cast takes no narrower ones.
    """
    bits, shape = BITS.get(b.rules.of_matrix(weight.parts)), tuple(weight.value.shape)
    if bits is None or weight.folded or len(shape) != 2 or weight.value.numel() < MATRIX:
        return None
    bits, blocks = max(4, bits), [math.gcd(BLOCK, columns) for columns in shape]
    least = _LEAST[bits]
    turned = blocks[0] < least
    return Form("int", bits, blocks[turned], widened=True, turned=turned) if blocks[turned] >= least else None


def widened(b: Builder, weight: Weight, form: Form) -> ir.Value:
    """A matrix [I, O] in floats, from integers; standard ops, as constant folding leaves the others alone."""
    data = np.ascontiguousarray(weight.value.t().numpy())
    levels, scales = _stored(b, weight, data, form, None)
    rows, columns = weight.value.shape if form.turned else data.shape
    runs = (rows, columns // form.size)
    kind = ir.DataType.UINT4 if form.bits == 4 else ir.DataType.UINT8
    # As constants are folded into it behind, no row of it is compared.
    name = matrix_name(replace(weight, folded=True))
    values = b.op("Cast", b.part(levels, (*runs, form.size), name, kind), to=int(ir.DataType.FLOAT))
    centred = b.op("Sub", values, b.constant(2 ** (form.bits - 1), np.float32))
    scaled = b.op("Mul", centred, b.part(scales, (*runs, 1)))
    matrix: ir.Value = b.op("Reshape", scaled, b.constant((rows, columns), np.int64))
    return matrix if form.turned else b.op("Transpose", matrix, perm=[1, 0])


def product(
    b: Builder,
    x: ir.Value,
    weight: Weight,
    data: NDArray[np.float32],
    form: Form,
    factor: NDArray[np.float32] | None = None,
    bias: ir.Value | None = None,
    rows: int | None = None,
) -> ir.Value:
    """x [..., I] with a matrix [O, I] in integers: [..., O].

    Args:
        factor: of each row's results, [O]; it goes into the scales.
        bias: [O].
        rows: how many of the first are read; all if left out.
    """
    levels, scales = _stored(b, weight, data, form, factor)
    count, columns = (len(data) if rows is None else rows), data.shape[1]
    runs = columns // form.size
    name = matrix_name(weight, count if count < len(data) else None)
    operand = b.part(levels, (count, runs, form.size * form.bits // 8), name)
    out: ir.Value = b.op(
        "MatMulNBits",
        x,
        operand,
        b.part(scales, (count, runs)),
        *([None, None, bias] if bias is not None else []),
        domain=MICROSOFT,
        K=columns,
        N=count,
        bits=form.bits,
        block_size=form.size,
        accuracy_level=_ACCURACY,
    )
    return out


def lookup(b: Builder, index: ir.Value, weight: Weight, data: NDArray[np.float32], form: Form) -> ir.Value:
    """Rows of a table [N, D] in integers, by indices of any shape."""
    levels, scales = _stored(b, weight, data, form, None)
    rows, columns = data.shape
    out: ir.Value = b.op(
        "GatherBlockQuantized",
        b.part(levels, (rows, columns * form.bits // 8), matrix_name(weight)),
        index,
        b.part(scales, (rows, columns // form.size)),
        domain=MICROSOFT,
        bits=form.bits,
        block_size=form.size,
        gather_axis=0,
        quantize_axis=1,
    )
    return out


def _stored(
    b: Builder, weight: Weight, data: NDArray[np.float32], form: Form, factor: NDArray[np.float32] | None
) -> Sequence[Any]:
    """Levels and scales in the weight file.

    Raises:
        Unsupported: a scale is beyond half precision.
    """
    key = (digest(data), form.name)
    if key not in b.store.quantized:
        try:
            values, scales = form.quantize(torch.from_numpy(data))
        except ValueError as fault:
            raise too_large(weight, str(fault)) from fault
        b.store.quantized[key] = _packed(values.numpy(), form.bits), scales.float().numpy()
    levels, scales = b.store.quantized[key]
    if factor is not None:
        scales = scales * factor[:, None]
    columns = levels.shape[1] * 8 // form.bits
    shared = tuple(replace(p, elements=max(1, p.elements // columns)) for p in weight.parts)
    name = short_name(weight.name)
    return (
        b.store.add(name, levels, weight.parts, dtype=form.name),
        b.store.add(f"{name}.scales", scales, shared),
    )


def _packed(values: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Levels about 0 as unsigned ones about half their range, [O, I * bits / 8]."""
    return packed((values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8), bits)
