"""Which weights lie in a finished file, found by their bytes: nothing is taken on trust from what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from needle_export.errors import Unsupported
from needle_export.targets.base import StoredWeight, WeightShare
from needle_export.targets.constants import digest

if TYPE_CHECKING:
    from needle_export.targets.tflite.store import Stored


def digests(path: Path) -> dict[str, int]:
    """Bytes of every constant buffer of a file, by digest."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAsModel(np.memmap(path, np.uint8, "r"), 0)
    found = {}
    for index in range(model.BuffersLength()):
        buffer = model.Buffers(index)
        if buffer.DataLength():
            data = buffer.DataAsNumpy()
            found[digest(data)] = len(data)
    return found


def stored_weights(path: Path, stored: dict[str, Stored]) -> list[StoredWeight]:
    """The weights that were handed to the converter, each with the bytes that it takes in the file.

    Raises:
        Unsupported: the file lacks one: the converter has changed it, and nobody knows what it computes then.
    """
    present = digests(path)
    weights = []
    for key, weight in stored.items():
        if key not in present:
            raise Unsupported(
                "the converter changed this weight",
                where=weight.name,
                fix="another version of litert-converter is installed than the one that was tested",
            )
        shares = tuple(WeightShare(p.source, p.role, p.layer, p.elements) for p in weight.parts)
        weights.append(StoredWeight(weight.name, present[key], weight.dtype, shares, weight.kept_float, weight.as_read))
    return weights
