"""A package of two functions over one state, small enough to be damaged many times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.targets.coreml.op_cases import mb
from tests.targets.coreml.packages import Array, merge, numbers, whole, write

WIDTH, SLOTS = 48, 20
WEIGHT, SECOND, BIAS = numbers(WIDTH, WIDTH, seed=1), numbers(WIDTH, WIDTH, seed=2), numbers(WIDTH, seed=3)


def step(rows: int) -> Any:
    """Writes projected rows [T, 48] into slots of a transposed cache [1, 48, S], and reads all of it back."""

    def body(x: Any, slot: Any, cache: Any) -> Any:
        half = np.float16
        y = mb.linear(x=x, weight=(WEIGHT / 8).astype(half), bias=BIAS.astype(half))
        y = mb.linear(x=y, weight=(SECOND / 8).astype(half))
        new = mb.expand_dims(x=mb.transpose(x=y, perm=[1, 0]), axes=[0])
        after = mb.slice_update(
            x=mb.read_state(input=cache),
            update=new,
            begin=mb.concat(values=[whole([0, 0]), slot], axis=0),
            end=mb.concat(values=[whole([1, WIDTH]), mb.add(x=slot, y=whole([rows]))], axis=0),
        )
        kept = mb.coreml_update_state(state=cache, value=after)
        return mb.reduce_sum(x=kept, axes=[0], keep_dims=False), y

    return body


def two_functions(folder: Path) -> Path:
    """Decode of one row and prefill of four over one cache."""
    states = {"cache": (1, WIDTH, SLOTS)}
    for name, rows in (("decode", 1), ("prefill", 4)):
        inputs = {"x": ((rows, WIDTH), "fp16"), "slot": ((1,), "int32")}
        write(folder / f"{name}.mlpackage", step(rows), inputs, states)
    sources = {name: folder / f"{name}.mlpackage" for name in ("decode", "prefill")}
    return merge(folder / "both.mlpackage", sources, "decode")


X = numbers(6, WIDTH)


def projected(x: Array) -> Array:
    wide = x.astype(np.float64) @ (WEIGHT / 8).T + BIAS
    return wide @ (SECOND / 8).T
