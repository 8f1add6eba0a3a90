"""What a tensor of a Core ML program may be, and how elements below a byte are packed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Bits of an element, by the name that this package gives a type.
BITS = {
    "bool": 8,
    "float16": 16,
    "float32": 32,
    "int4": 4,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint1": 1,
    "uint2": 2,
    "uint3": 3,
    "uint4": 4,
    "uint6": 6,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
}

FLOATS = frozenset({"float16", "float32"})


@dataclass(frozen=True)
class TensorType:
    """Element type and sizes of a tensor; -1 for a size that is known only at run time."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has; nonsense where a size isn't known."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that its elements take in a file, packed."""
        return packed_bytes(self.dtype, self.elements)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if size < 0 else str(size) for size in self.shape)}]"


def packed_bytes(dtype: str, elements: int) -> int:
    """Bytes that so many elements take, packed without gaps."""
    return -(-BITS[dtype] * elements // 8)


def storage(dtype: str) -> np.dtype[np.generic]:
    """The numpy type of one unpacked element: elements below a byte take a byte each."""
    bits = BITS[dtype]
    if bits < 8:
        return np.dtype(np.int8 if dtype.startswith("int") else np.uint8)
    return np.dtype(dtype)


def unpack(raw: NDArray[np.uint8], dtype: str, elements: int) -> NDArray[np.generic]:
    """Elements [elements] of packed bytes; of the bytes themselves, not a copy, where a byte holds no two.

    Bits fill a byte from its lowest end, and an element may straddle two bytes.
    """
    bits = BITS[dtype]
    if bits >= 8:
        return raw.view(storage(dtype))
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = ((raw[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:elements]
    else:
        spread = np.unpackbits(raw, bitorder="little", count=bits * elements).reshape(elements, bits)
        codes = (spread << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
    if dtype == "int4":
        # Two's complement: the highest of the four bits is the sign.
        return ((codes ^ np.uint8(8)).astype(np.int8) - np.int8(8)).astype(np.int8)
    return codes
