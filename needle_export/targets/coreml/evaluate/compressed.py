"""The constexpr ops: how a program says that a constant is compressed, in the forms of iOS 16 and iOS 18."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.coreml.evaluate.constants import Computed, Constant, Lut, Plain, Scaled, python_value
from needle_export.targets.coreml.evaluate.spec import Op
from needle_export.targets.coreml.evaluate.types import TensorType, unpack


def decompress(op: Op, inputs: Mapping[str, Constant], rounds: bool, function: str) -> Constant:
    """What a constexpr op makes of its inputs; nothing is decompressed yet.

    Args:
        op: with one output.
        inputs: by parameter.
        rounds: whether the result is rounded to a declared float16.
        function: that the op is in, for messages.

    Raises:
        Unsupported: an op that isn't known, or a parameter of it.
        BadInput: sizes that don't fit each other.
    """
    reader = _Reader(op, dict(inputs), function)
    makers = {
        "constexpr_affine_dequantize": _affine,
        "constexpr_blockwise_shift_scale": _blockwise,
        "constexpr_cast": _cast,
        "constexpr_lut_to_dense": _lut,
        "constexpr_sparse_to_dense": _sparse,
    }
    if op.type not in makers or len(op.outputs) != 1:
        raise Unsupported(f"op {op.name!r} has type {op.type!r}, which the evaluator doesn't know", where=function)
    key = (op.type, op.outputs[0][1], tuple(sorted((name, one.key) for name, one in inputs.items())))
    constant = makers[op.type](reader, op.outputs[0][1], key, rounds)
    if reader.left:
        raise Unsupported(
            f"op {op.name!r} of type {op.type!r} has parameter {sorted(reader.left)[0]!r}", where=function
        )
    return constant


_Key = tuple[object, ...]


class _Reader:
    """Inputs of one op, each taken once."""

    def __init__(self, op: Op, inputs: dict[str, Constant], function: str) -> None:
        self.op, self.left, self.function = op, inputs, function

    def fail(self, what: str) -> NoReturn:
        raise BadInput(f"op {self.op.name!r} of type {self.op.type!r} {what}", where=self.function)

    def take(self, name: str) -> Constant:
        if name not in self.left:
            self.fail(f"has no parameter {name!r}")
        return self.left.pop(name)

    def maybe(self, name: str) -> Constant | None:
        return self.left.pop(name, None)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)


def _blockwise(reader: _Reader, type: TensorType, key: _Key, rounds: bool) -> Constant:
    data, scale, offset = reader.take("data"), reader.take("scale"), reader.maybe("offset")
    _divides(reader, scale.type.shape, data.type.shape)
    reader.check(data.type.shape == type.shape, "declares another shape than its data has")
    reader.check(
        offset is None or offset.type.shape == scale.type.shape, "has an offset of another shape than its scale"
    )
    return Scaled(type, key, rounds, data, scale.dense, None if offset is None else offset.dense.to(torch.float32))


def _affine(reader: _Reader, type: TensorType, key: _Key, rounds: bool) -> Constant:
    data, scale, zero = reader.take("quantized_data"), reader.take("scale"), reader.take("zero_point")
    axis = int(python_value(reader.take("axis")))
    reader.check(data.type.shape == type.shape, "declares another shape than its data has")
    rank = len(type.shape)
    reader.check(-rank <= axis < rank, "has an axis that its data hasn't")

    def spread(constant: Constant) -> Tensor:
        reader.check(
            constant.type.shape in ((), (type.shape[axis],)),
            "has a scale or zero point of neither one nor all channels",
        )
        sizes = [1] * rank
        if constant.type.shape:
            sizes[axis] = type.shape[axis]
        return constant.dense.to(torch.float32).reshape(sizes)

    return Scaled(type, key, rounds, data, spread(scale), spread(zero))


def _lut(reader: _Reader, type: TensorType, key: _Key, rounds: bool) -> Constant:
    indices, lut = reader.take("indices"), reader.take("lut")
    shape = reader.maybe("shape")
    if shape is not None:
        # iOS 16: indices are bytes that hold the packed codes, and the palette is a vector.
        sizes = tuple(int(size) for size in python_value(shape))
        bits = round(math.log2(max(lut.type.elements, 1)))
        reader.check(lut.type.elements == 1 << bits and bits in (1, 2, 4, 6, 8), "has a palette of no power of two")
        reader.check(sizes == type.shape, "declares another shape than its parameter says")
        reader.check(
            len(indices.type.shape) == 1 and indices.type.elements == -(-bits * type.elements // 8),
            "has too few or too many packed indices",
        )

        def codes() -> Tensor:
            packed = indices.dense.numpy().astype(np.uint8)
            return torch.from_numpy(np.ascontiguousarray(unpack(packed, f"uint{bits}", type.elements))).view(sizes)

        unpacked = Computed(TensorType(f"uint{bits}", sizes), (key, "codes"), False, codes)
        return Lut(type, key, rounds, unpacked, lut.dense.view(*(1,) * len(sizes), -1, 1), None)
    vector = reader.maybe("vector_axis")
    rank = len(indices.type.shape)
    reader.check(len(lut.type.shape) == rank + 2, "has a LUT whose rank isn't that of its indices and two")
    _divides(reader, lut.type.shape[:rank], indices.type.shape)
    bits = int(indices.type.dtype.removeprefix("uint")) if indices.type.dtype.startswith("uint") else 0
    reader.check(lut.type.shape[rank] == 1 << bits, "has a palette that isn't as long as its indices reach")
    values = lut.type.shape[-1]
    sizes_out = list(indices.type.shape)
    axis = None
    if values > 1:
        if vector is None:
            reader.fail("has vectors in its LUT and no axis for them")
        axis = int(python_value(vector))
        reader.check(-rank <= axis < rank, "has an axis that its indices haven't")
        axis %= rank
        sizes_out[axis] *= values
    reader.check(tuple(sizes_out) == type.shape, "declares another shape than its indices give")
    return Lut(type, key, rounds, indices, lut.dense, axis)


def _cast(reader: _Reader, type: TensorType, key: _Key, rounds: bool) -> Constant:
    source, wanted = reader.take("source_val"), python_value(reader.take("output_dtype"))
    reader.check((source.type.dtype, wanted, type.dtype) == ("float16", "fp32", "float32"), "casts to no float32")
    reader.check(source.type.shape == type.shape, "declares another shape than its source has")
    return Computed(type, key, rounds, lambda: source.dense)


def _sparse(reader: _Reader, type: TensorType, key: _Key, rounds: bool) -> Constant:
    values, mask, shape = reader.take("nonzero_data"), reader.take("mask"), reader.maybe("shape")
    if shape is not None:
        reader.check(tuple(python_value(shape)) == type.shape, "declares another shape than its parameter says")
        reader.check(mask.type.bytes == -(-type.elements // 8), "has a mask of another size")
        assert isinstance(mask, Plain)
        packed = mask.dense.numpy().astype(np.uint8)
        bits = torch.from_numpy(np.unpackbits(packed, bitorder="little", count=type.elements)).bool()
    else:
        reader.check(mask.type.shape == type.shape, "declares another shape than its mask has")
        bits = mask.dense.reshape(-1).bool()
    reader.check(int(bits.sum()) == values.type.elements, "has another number of values than its mask has bits")

    def make() -> Tensor:
        whole = torch.zeros(type.elements, dtype=values.dense.dtype)
        whole[bits] = values.dense.reshape(-1)
        return whole.reshape(type.shape)

    return Computed(type, key, rounds, make)


def _divides(reader: _Reader, blocks: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    reader.check(
        len(blocks) == len(sizes)
        and all(block > 0 and size % block == 0 for block, size in zip(blocks, sizes, strict=True)),
        f"has blocks {list(blocks)} that don't divide {list(sizes)}",
    )
