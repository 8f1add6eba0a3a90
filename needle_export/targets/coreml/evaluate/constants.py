"""Constants as torch tensors: decompressed once, or row by row where a table is only looked up.

Shapes: D.. are the sizes of a constant; a LUT has the sizes of its indices divided by its blocks, then
P palettes and V values a palette.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from needle_export.targets.coreml.evaluate.spec import Immediate, Stored, Value
from needle_export.targets.coreml.evaluate.types import BITS, FLOATS, TensorType, unpack

#: What elements are computed in. The two unsigned types that torch has no arithmetic for take a wider one.
RUNTIME = {
    "bool": torch.bool,
    "float16": torch.float32,
    "float32": torch.float32,
    "int4": torch.int8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint1": torch.uint8,
    "uint2": torch.uint8,
    "uint3": torch.uint8,
    "uint4": torch.uint8,
    "uint6": torch.uint8,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int64,
}

#: Elements that are decoded at a time, so that temporary tensors stay small.
_CHUNK = 1 << 20


def to_fp16(values: Tensor) -> Tensor:
    """Values rounded to float16, as float32."""
    return values.to(torch.float16).to(torch.float32)


class Constant(ABC):
    """A value that doesn't depend on a function's inputs.

    Args:
        type: that it has once it is decompressed.
        key: what makes it the same as another.
        rounds: whether results of decompression are rounded to a declared float16.
    """

    def __init__(self, type: TensorType, key: Hashable, rounds: bool) -> None:
        self.type = type
        self.key = key
        self._rounds = rounds and type.dtype == "float16"

    @cached_property
    def dense(self) -> Tensor:
        """All elements [D..]; made once."""
        return self._rows(None)

    def select(self, axis: int, index: Tensor) -> Tensor:
        """Elements at places [I] of an axis: [D.., I, D..]. Only they are decompressed.

        Raises:
            IndexError: a place is outside the axis.
        """
        if "dense" in self.__dict__:
            return self.dense.index_select(axis, index)
        return self._rows((axis, index))

    @abstractmethod
    def _rows(self, at: tuple[int, Tensor] | None) -> Tensor:
        """Elements at places of an axis, or all."""

    def merged(self, count: int) -> Constant | None:
        """The same with its first dimensions as one, or None where its compression doesn't allow it."""
        return None

    def _merged_type(self, count: int) -> TensorType:
        shape = self.type.shape
        return TensorType(self.type.dtype, (math.prod(shape[:count]), *shape[count:]))

    def _finish(self, values: Tensor) -> Tensor:
        return to_fp16(values) if self._rounds else values


class Plain(Constant):
    """Elements as they are stored."""

    def __init__(self, value: Value, shape: tuple[int, ...] | None = None) -> None:
        declared = value.type if shape is None else TensorType(value.type.dtype, shape)
        key: Hashable = id(value) if isinstance(value, Immediate) else (value.file.path, value.offset)
        super().__init__(declared, (key, declared), False)
        self.source = value

    @cached_property
    def _stored(self) -> Tensor:
        """Elements in the type that they are stored in; a mapped one isn't copied."""
        assert not isinstance(self.source.value, str)
        array = np.asarray(self.source.value).reshape(self.type.shape)
        if self.type.dtype in ("uint16", "uint32"):
            array = array.astype(np.int64)
        return torch.from_numpy(array)

    def _widen(self, values: Tensor) -> Tensor:
        return values.to(RUNTIME[self.type.dtype])

    def _rows(self, at: tuple[int, Tensor] | None) -> Tensor:
        if at is None:
            return self._widen(self._stored)
        axis, index = at
        bits = BITS[self.type.dtype]
        inner = math.prod(self.type.shape[1:])
        if bits < 8 and axis == 0 and bits * inner % 8 == 0 and isinstance(self.source, Stored):
            # Rows begin at bytes: only theirs are unpacked.
            packed = torch.from_numpy(self.source.packed).view(self.type.shape[0], -1).index_select(0, index)
            codes = unpack(packed.reshape(-1).numpy(), self.type.dtype, len(index) * inner)
            return torch.from_numpy(codes.reshape(len(index), *self.type.shape[1:]))
        return self._widen(self._stored.index_select(axis, index))

    def merged(self, count: int) -> Constant | None:
        return Plain(self.source, self._merged_type(count).shape)

    def unusual(self) -> dict[str, int]:
        """How many elements are NaN or infinite, by kind; read in parts."""
        counts: dict[str, int] = {}
        if self.type.dtype not in FLOATS:
            return counts
        assert not isinstance(self.source.value, str)
        flat = np.asarray(self.source.value).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            if not np.isfinite(part).all():
                for kind, found in (("nan", np.isnan(part)), ("infinite", np.isinf(part))):
                    if count := int(found.sum()):
                        counts[kind] = counts.get(kind, 0) + count
        return counts


def _blocks(values: Tensor, sizes: tuple[int, ...], at: tuple[int, Tensor] | None) -> Tensor:
    """Values that each stand for a block [B..] of elements, spread to where they broadcast over the elements."""
    for axis, size in enumerate(sizes):
        count = values.shape[axis]
        places = at[1] if at is not None and at[0] == axis else None
        if count == 1:
            continue
        if places is not None:
            values = values.index_select(axis, places // (size // count))
        elif count != size:
            values = values.repeat_interleave(size // count, axis)
    return values


class Scaled(Constant):
    """``scale * (data - offset)``, scale and offset [B..] one for each block of the data [D..].

    The sizes of a block are those of the data divided by those of the scale.
    """

    def __init__(
        self, type: TensorType, key: Hashable, rounds: bool, data: Constant, scale: Tensor, offset: Tensor | None
    ) -> None:
        super().__init__(type, key, rounds)
        self._data, self._scale, self._offset = data, scale, offset

    def _rows(self, at: tuple[int, Tensor] | None) -> Tensor:
        data = (self._data.dense if at is None else self._data.select(*at)).to(torch.float32)
        if self._offset is not None:
            data = data - _blocks(self._offset, self.type.shape, at)
        return self._finish(data * _blocks(self._scale, self.type.shape, at))

    def merged(self, count: int) -> Constant | None:
        sizes = tuple(self._scale.shape[:count])
        if sizes != (1,) * count and sizes != self.type.shape[:count]:
            return None
        data = self._data.merged(count)
        if data is None:
            return None
        offset = None if self._offset is None else self._offset.flatten(0, count - 1)
        scale = self._scale.flatten(0, count - 1)
        return Scaled(self._merged_type(count), (self.key, count), self._rounds, data, scale, offset)


class Lut(Constant):
    """Indices [D..] into palettes: ``lut`` is [B.., P, V], one palette for each block of indices.

    With V above 1, the values of an entry lie one after the other along ``axis``.
    """

    def __init__(
        self, type: TensorType, key: Hashable, rounds: bool, indices: Constant, lut: Tensor, axis: int | None
    ) -> None:
        super().__init__(type, key, rounds)
        self._indices, self._lut, self._axis = indices, lut, axis

    def select(self, axis: int, index: Tensor) -> Tensor:
        if self._axis is not None:
            # A place of the result is a part of an entry.
            return self.dense.index_select(axis, index)
        return super().select(axis, index)

    def _rows(self, at: tuple[int, Tensor] | None) -> Tensor:
        codes = self._indices.dense if at is None else self._indices.select(*at)
        palettes, values = self._lut.shape[-2:]
        table = self._lut.reshape(-1, values)
        # Which palette an element has: a number for each axis, and they broadcast.
        first = torch.zeros((1,) * codes.dim(), dtype=torch.int64)
        stride = palettes
        for axis in reversed(range(codes.dim())):
            count = self._lut.shape[axis]
            if count > 1:
                size = self._indices.type.shape[axis]
                places = at[1] if at is not None and at[0] == axis else torch.arange(size)
                number = (places // (size // count)).to(torch.int64) * stride
                first = first + number.view(-1, *(1,) * (codes.dim() - 1 - axis))
            stride *= count
        found = torch.empty((codes.numel(), values), dtype=table.dtype)
        flat, spread = codes.reshape(-1), first.expand(codes.shape)
        spread_flat = None if first.numel() == 1 else spread.reshape(-1)
        for start in range(0, codes.numel(), _CHUNK):
            part = slice(start, min(start + _CHUNK, codes.numel()))
            entry = flat[part].to(torch.int64)
            if spread_flat is not None:
                entry = entry + spread_flat[part]
            torch.index_select(table, 0, entry, out=found[part])
        if self._axis is None:
            return self._finish(found.view(codes.shape))
        whole = found.view(*codes.shape, values).movedim(-1, self._axis + 1)
        return self._finish(whole.reshape(self.type.shape))

    def merged(self, count: int) -> Constant | None:
        indices = self._indices.merged(count)
        if self._axis is not None or indices is None or any(size != 1 for size in self._lut.shape[:count]):
            return None
        lut = self._lut.flatten(0, count - 1)
        return Lut(self._merged_type(count), (self.key, count), self._rounds, indices, lut, None)


class Computed(Constant):
    """A constant that is made whole by a function."""

    def __init__(self, type: TensorType, key: Hashable, rounds: bool, make: Callable[[], Tensor]) -> None:
        super().__init__(type, key, rounds)
        self._make = make

    def _rows(self, at: tuple[int, Tensor] | None) -> Tensor:
        whole = self._finish(self._make())
        if at is None:
            return whole
        return self.dense.index_select(*at)


def python_value(constant: Constant) -> Any:
    """A constant as a number, a text, or lists of numbers."""
    if isinstance(constant, Plain) and isinstance(constant.source.value, str):
        return constant.source.value
    return constant.dense.tolist()
