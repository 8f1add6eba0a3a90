"""The one file that holds every weight of an ONNX artifact, shared by its graphs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from needle_export.graph.program import Part

#: Large tensors start on a page, so that a runtime can map them; small ones on a cache line.
_PAGE, _LINE, _LARGE = 4096, 64, 1 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor in the file: where it is, what it is, what it is made of.

    Attributes:
        dtype: as reports have it: NumPy's, or the name of a form of ``weights.forms``.
        kind: of its bytes, NumPy's.
    """

    name: str
    offset: int
    length: int
    dtype: str
    kind: npt.DTypeLike
    parts: tuple[Part, ...]
    kept_float: str = ""


def packed(levels: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Numbers of so many bits, as many to a byte as fit, the first in its lowest: [O, I] as [O, I * bits / 8]."""
    each = 8 // bits
    whole = np.zeros((len(levels), levels.shape[1] // each), np.uint8)
    for place in range(each):
        whole |= levels[:, place::each] << np.uint8(place * bits)
    return whole


class Weights:
    """Takes tensors and writes nothing: for lowering just to count nodes.

    Args:
        path: of the file that there would be.

    Attributes:
        quantized: integers and scales by what they were made of, so that a second graph needn't make them again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quantized: dict[tuple[str, str], tuple[Any, Any]] = {}

    def add(
        self,
        name: str,
        array: npt.NDArray[np.generic],
        parts: tuple[Part, ...],
        kept_float: str = "",
        dtype: str = "",
    ) -> Stored:
        """Store a tensor, or find the equal one that is there already.

        Args:
            dtype: as reports are to have it; the array's own if left out.
        """
        stored = Stored(name, 0, array.nbytes, dtype or array.dtype.name, array.dtype, parts, kept_float)
        return self._placed(stored, array)

    def _placed(self, stored: Stored, array: npt.NDArray[np.generic]) -> Stored:
        return stored


class WeightFile(Weights):
    """Writes tensors one behind the other; equal ones are stored once, whatever their shapes.

    Args:
        path: the file to create.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stored: list[Stored] = []
        #: Places in ``stored``.
        self._by_content: dict[tuple[str, bytes], int] = {}
        self._file: BinaryIO = path.open("wb")
        self._end = 0

    def _placed(self, stored: Stored, array: npt.NDArray[np.generic]) -> Stored:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        key = (stored.dtype, hashlib.sha256(data).digest())
        at = self._by_content.get(key)
        if at is not None:
            found = self.stored[at]
            # It lies in the file once and stands for all of them, each rounded like the other.
            new = tuple(p for p in stored.parts if p not in found.parts)
            self.stored[at] = replace(found, parts=(*found.parts, *new))
            return found
        step = _PAGE if len(data) >= _LARGE else _LINE
        offset = -(-self._end // step) * step
        self._file.write(b"\0" * (offset - self._end))
        self._file.write(data)
        self._end = offset + len(data)
        placed = replace(stored, offset=offset)
        self._by_content[key] = len(self.stored)
        self.stored.append(placed)
        return placed

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self) -> None:
        """Let readers of the file see everything that was added."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
