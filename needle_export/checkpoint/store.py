"""Tensors by name, computed when they are asked for.

Dequantising a container multiplies its size by eight, and merging or slicing copies every stacked
tensor; most commands need shapes only. So a store knows names and shapes at once and makes an array
on access. An array that is still in use is handed out again instead of being made twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape, its array dtype ("float16" or "float32"), how to make it.

    ``stored`` is the number format in the file ("float16", "bfloat16", "float32", or "cq<bits>").
    """

    shape: tuple[int, ...]
    dtype: str
    stored: str
    make: Callable[[], Array]


class TensorStore(Mapping[str, np.ndarray]):
    """A read-only mapping from tensor name to array; see the module's text for when arrays exist."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._alive: weakref.WeakValueDictionary[str, Array] = weakref.WeakValueDictionary()

    def __getitem__(self, name: str) -> Array:
        array = self._alive.get(name)
        if array is None:
            entry = self._entries[name]
            array = entry.make()
            if array.shape != entry.shape or array.dtype != np.dtype(entry.dtype):
                raise AssertionError(f"{name}: made {array.dtype}{array.shape}, promised {entry}")
            array.flags.writeable = False
            self._alive[name] = array
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Shape and formats of a tensor without making it; KeyError for an unknown name."""
        return self._entries[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors without making any."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def replaced(self, changes: Mapping[str, Entry | None]) -> TensorStore:
        """A store with some entries exchanged, added, or (None) removed; arrays aren't shared."""
        entries: dict[str, Entry] = {}
        for name, entry in (self._entries | dict(changes)).items():
            if entry is not None:
                entries[name] = entry
        return TensorStore(entries)


def as_store(tensors: Mapping[str, Array]) -> TensorStore:
    """A store over arrays that exist already (or the same store, when it is one)."""
    if isinstance(tensors, TensorStore):
        return tensors

    def entry(array: Array) -> Entry:
        return Entry(array.shape, array.dtype.name, array.dtype.name, lambda: array.view())

    return TensorStore({name: entry(array) for name, array in tensors.items()})
