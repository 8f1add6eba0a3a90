"""Matrices in codebook form as a package's functions make numbers of them: levels by group, and norms outside.

Dimension letters: O outputs (rows of a matrix), I inputs (its columns), G groups of a row, g elements of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.targets.coreml.evaluate.spec import Op, Value

#: What lies between a product and the factor of its rows, and moves no element.
_THROUGH = frozenset({"cast", "reshape", "squeeze", "expand_dims"})


class Strange(Exception):
    """A constant that isn't read as a matrix, in one clause."""


@dataclass(frozen=True)
class Around:
    """What a coded matrix is multiplied by.

    Attributes:
        norms: the constant [G, 1, O].
        factor: the constant [O] that multiplies the results of its rows, if one does.
    """

    norms: str
    factor: str | None


class Ops:
    """Ops of a function by what they read and make."""

    def __init__(self, ops: Any, readers: dict[str, list[Op]]) -> None:
        self.makers: dict[str, Op] = {name: op for op in ops for name, _ in op.outputs}
        self.readers = readers

    def around(self, reader: Op, parameter: str) -> Around:
        """Norms and factor of a matrix [G, O, g] that an op reads.

        Raises:
            Strange: they aren't multiplied as those of codes.
        """
        if reader.type == "matmul" and parameter == "y" and self._number(reader, "transpose_y") == 1:
            times = self._only(reader, "mul")
            norms = self._constant(self._made(self._beside(times, reader), "cast"))
            total = self._only(times, "reduce_sum")
            if self._number(total, "axes") != 0 or self._number(total, "keep_dims") != 0:
                raise Strange("its groups aren't summed")
            return Around(norms, self._factor(total, self._shape(norms)[-1]))
        if reader.type == "gather" and parameter == "x" and self._number(reader, "axis") == 1:
            times = self._only(reader, "mul")
            lengths = self.makers.get(self._beside(times, reader))
            while lengths is not None and lengths.type in ("transpose", "reshape"):
                lengths = self.makers.get(_name(lengths, "x"))
            if lengths is None or lengths.type != "gather" or self._number(lengths, "axis") != 2:
                raise Strange("its norms aren't looked up")
            if lengths.inputs["indices"] != reader.inputs["indices"]:
                raise Strange("its norms are read by other indices")
            return Around(self._constant(self._made(_name(lengths, "x"), "cast")), None)
        raise Strange(f"{reader.type} reads it, not as a matrix by groups")

    def _factor(self, op: Op, rows: int) -> str | None:
        """A constant [O] that multiplies what an op gives, and alone reads it."""
        while True:
            behind = self.readers.get(op.outputs[0][0], [])
            if len(behind) != 1:
                return None
            if behind[0].type == "mul":
                name = self._beside(behind[0], op)
                made = self.makers.get(name)
                constant = made is not None and made.type == "const" and self._shape(name) == (rows,)
                return name if constant else None
            if behind[0].type not in _THROUGH:
                return None
            op = behind[0]

    def _beside(self, times: Op, one: Op) -> str:
        """What else a mul reads."""
        names = [_name(times, key) for key in ("x", "y")]
        mine = one.outputs[0][0]
        return names[1] if names[0] == mine else names[0]

    def _only(self, op: Op, kind: str) -> Op:
        found = self.readers.get(op.outputs[0][0], [])
        if len(found) != 1 or found[0].type != kind:
            raise Strange(f"{found[0].type if found else 'nothing'} reads its results where {kind} should")
        return found[0]

    def _made(self, name: str, kind: str) -> Op:
        op = self.makers.get(name)
        if op is None or op.type != kind:
            raise Strange(f"its norms come from {'nowhere' if op is None else op.type}, not from {kind}")
        return op

    def _constant(self, cast: Op) -> str:
        name = _name(cast, "x")
        shape = self._shape(name)
        if self.makers[name].type != "const" or len(shape) != 3 or shape[1] != 1:
            raise Strange("its norms are no constant by groups")
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        op = self.makers.get(name)
        if op is None:
            raise Strange("its norms are given from outside")
        return next(tuple(t.shape) for n, t in op.outputs if n == name)

    def _number(self, op: Op, key: str) -> int | None:
        """Of a parameter that is one number, or None."""
        given = op.inputs.get(key, ("",))[0]
        while isinstance(given, str):
            if given not in self.makers or self.makers[given].type != "const":
                return None
            given = self.makers[given].inputs["val"][0]
        value = np.asarray(given.value).reshape(-1)
        return int(value[0]) if value.size == 1 else None


def levels_and_norms(inputs: dict[str, Value], norms: Value) -> tuple[NDArray[np.float32], NDArray[np.float32], int]:
    """Levels [O, I] and norms [O, G] of a table [G, O, g], and g.

    Raises:
        Strange: it isn't one of levels for all.
    """
    if set(inputs) != {"indices", "lut"}:
        raise Strange("it is made of other parts than this tool writes")
    indices, lut = (np.asarray(inputs[name].value) for name in ("indices", "lut"))
    lengths = np.asarray(norms.value)
    if lut.dtype != np.float32 or lut.ndim != 5 or lut.size != lut.shape[3]:
        raise Strange("its levels are no float32 table for all")
    groups, rows, size = indices.shape
    if lengths.dtype != np.float16 or lengths.shape != (groups, 1, rows):
        raise Strange(f"its rows have no half-precision norm for each {size} columns")
    values = lut.reshape(-1)[indices].transpose(1, 0, 2).reshape(rows, -1)
    return values, np.ascontiguousarray(lengths.reshape(groups, rows).T.astype(np.float32)), size


def _name(op: Op, key: str) -> str:
    given = op.inputs.get(key, ("",))[0]
    return given if isinstance(given, str) else ""
