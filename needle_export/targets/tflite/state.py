"""The state of a TFLite artifact in the layout of the reference model; needs numpy only, as the loop does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.targets.tflite.session import Loop


def reference_state(loop: Loop) -> dict[str, NDArray[Any]]:
    """Copies of a loop's state by name: caches [rows in use, G, D], histories [R, C], tokens int64 [R].

    A cache lies [G, S, D] here, so that attention reads a group in one piece; the reference has its rows first.
    A file with probe heads answers them too, each under its name, as they follow from the state alone; their pools are
    handed over as means.
    Rows that no position has reached hold zeros, or what a sequence before left there, and are cut off.
    """
    found: dict[str, NDArray[Any]] = {}
    for spec in loop.state:
        held = loop.inputs[spec["name"]]
        if spec["kind"] in ("keys", "values"):
            rows = min(loop.position, held.shape[1])
            found[spec["name"]] = np.ascontiguousarray(held[:, :rows].swapaxes(0, 1))
        else:
            found[spec["name"]] = held.astype(np.int64) if spec["kind"] == "tokens" else held.copy()
    if loop.position:
        for name in loop.heads:
            # The mean that they stand for: by themselves both move with the largest score so far.
            found[f"probe_{name}_pool"] /= found[f"probe_{name}_sum"]
        found.update({name: loop.head(name) for name in loop.heads})
    return found
