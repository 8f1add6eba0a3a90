"""The weight file of a Core ML package: records of constants, found by their place and checked against it.

Written from the format and not with the library that wrote the file, so that the two can disagree.

The file begins with 64 bytes: the number of records and the version (2), 32 bits each. A record is 64 bytes
of description (a mark, the element type, the bytes, where they begin, the bits of padding behind the last
element) and the bytes; both begin at multiples of 64. A program refers to a record by the place of its
description. The file is mapped: nothing is read that nobody asks for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput
from needle_export.targets.coreml.evaluate.types import TensorType, unpack

_ALIGNMENT = 64
_VERSION = 2
_MARK = 0xDEADBEEF
_HEADER = struct.Struct("<II")
_RECORD = struct.Struct("<IIQQQ")

#: Element types as a record numbers them.
_TYPES = {
    1: "float16",
    2: "float32",
    3: "uint8",
    4: "int8",
    6: "int16",
    7: "uint16",
    8: "int4",
    9: "uint1",
    10: "uint2",
    11: "uint4",
    12: "uint3",
    13: "uint6",
    14: "int32",
    15: "uint32",
}


@dataclass(frozen=True)
class Record:
    """One constant of the file: its element type, where its bytes begin, and how many they are."""

    dtype: str
    start: int
    bytes: int


class WeightFile:
    """A mapped weight file; every record was looked at, no constant was read.

    Args:
        path: of the file.

    Raises:
        BadInput: it can't be read, is cut short, or isn't a chain of records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as handle:
                # Private and writable: torch takes the arrays as they are, and nothing ever writes to them.
                self._data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise BadInput("the weight file can't be read", where=str(path), fix="build the package anew") from error
        self.size = len(self._data)
        self.records = self._walk()

    def _fail(self, what: str) -> NoReturn:
        raise BadInput(what, where=str(self.path), fix="the weight file is damaged or cut short: build it anew")

    def _walk(self) -> dict[int, Record]:
        if self.size < _ALIGNMENT:
            self._fail("the weight file has no header")
        count, version = _HEADER.unpack_from(self._data)
        if version != _VERSION:
            self._fail(f"the weight file has format version {version}, not {_VERSION}")
        records: dict[int, Record] = {}
        at = _ALIGNMENT
        for _ in range(count):
            if at + _ALIGNMENT > self.size:
                self._fail(f"the weight file announces {count:,} constants and ends after {len(records):,}")
            mark, kind, size, start, padding = _RECORD.unpack_from(self._data, at)
            if mark != _MARK or kind not in _TYPES or padding > 7:
                self._fail(f"no constant is described at byte {at:,}")
            if start != at + _ALIGNMENT or start + size > self.size:
                self._fail(f"the constant described at byte {at:,} lies outside the file")
            records[at] = Record(_TYPES[kind], start, size)
            at = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        return records

    def record(self, offset: int, declared: TensorType) -> Record:
        """The record at a place, which must be of the declared type and size.

        Raises:
            BadInput: there is none, or it is another.
        """
        record = self.records.get(offset)
        if record is None:
            self._fail(f"the program refers to a constant at byte {offset:,}, where none is described")
        if record.dtype != declared.dtype or record.bytes != declared.bytes:
            self._fail(
                f"the constant at byte {offset:,} holds {record.bytes:,} bytes of {record.dtype}, and the program"
                f" declares {declared}"
            )
        return record

    def packed(self, offset: int, declared: TensorType) -> NDArray[np.uint8]:
        """The bytes of a constant, mapped."""
        record = self.record(offset, declared)
        return np.frombuffer(self._data, np.uint8, record.bytes, record.start)

    def array(self, offset: int, declared: TensorType) -> NDArray[np.generic]:
        """A constant in its declared shape; a view of the mapped file where a byte holds no two elements."""
        return unpack(self.packed(offset, declared), declared.dtype, declared.elements).reshape(declared.shape)
