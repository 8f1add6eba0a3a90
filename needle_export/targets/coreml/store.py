"""Weights of a Core ML package under a scheme: what is stored as what, once, whichever function reads it.

Letters: O outputs (rows of a matrix), I inputs (its columns).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from coremltools.converters.mil import Builder as MilOps
from coremltools.converters.mil.mil import types

from needle_export.config.rules import Rules
from needle_export.graph.program import Part, Weight
from needle_export.targets.base import StoredWeight, WeightShare
from needle_export.targets.claims import coded_name, identifier, kernel_name
from needle_export.targets.constants import digest, short_name, too_large
from needle_export.targets.coreml.names import constant_name
from needle_export.weights.forms import Form

Array = npt.NDArray[Any]

#: Matrices with fewer elements stay float: what decompressing costs is more than the bytes.
SMALL = 10_000

#: Columns that share a scale in int4, and rows that share a palette.
BLOCK, GROUP = 32, 16

#: Types of indices by their bits; three have none.
_INDICES = {1: types.np_uint1_dtype, 2: types.np_uint2_dtype, 3: types.np_uint3_dtype, 4: types.np_uint4_dtype}

#: Constants with fewer elements lie in the specification instead of the weight file.
INLINE = 10


@dataclass(frozen=True)
class Stored:
    """A constant of a package.

    Attributes:
        name: of the weight.
        bytes: it takes.
        dtype: of its elements.
        parts: where they come from.
        kept_float: why it is float where the scheme asks for less, or empty.
    """

    name: str
    bytes: int
    dtype: str
    parts: tuple[Part, ...]
    kept_float: str = ""


class WeightStore:
    """Makes constants for all functions of one package; equal bytes are written once.

    Args:
        rules: which scheme every weight has.
        blocks: whether the package may have scales and palettes by block (iOS 18 on).

    Attributes:
        half: whether what isn't compressed is stored, and computed with, in half precision.
    """

    def __init__(self, rules: Rules, blocks: bool) -> None:
        self.rules, self.blocks = rules, blocks
        self.half = rules.base != "fp32"
        self.stored: dict[str, Stored] = {}
        self._quantized: dict[str, tuple[Array, ...]] = {}
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """Count names anew: they are one function's own."""
        self._counts.clear()

    @property
    def dtype(self) -> Any:
        """Of floating-point constants."""
        return np.float16 if self.half else np.float32

    def constant(self, data: Array, kind: Any = None, name: str = "") -> Any:
        """A constant of these bytes; functions of one package share it in the weight file.

        Args:
            kind: coremltools' dtype of entries below a byte, which NumPy forgets on the way.
            name: to be found by; a number is appended.
        """
        data = np.ascontiguousarray(data).reshape(data.shape)
        made = self._made("const", name, val=data if data.ndim else data[()])
        if data.size >= INLINE:
            made.op.weight_id = f"{'' if kind is None else kind.metadata}{_key(data)}"
        return made

    def word(self, text: str) -> Any:
        """A constant that is a word, such as a type."""
        return self._made("const", "", val=text)

    def _made(self, kind: str, found_by: str, **given: Any) -> Any:
        """What an op for constants gives; the op is called as it is to be found, and what it gives has a short name.

        coremltools keeps the two names apart, and Core ML must: an op of several results has one more than these.
        """
        self._counts[""] += 1
        short = constant_name(self._counts[""])
        if found_by:
            self._counts[found_by] += 1
        made = getattr(MilOps, kind)(**given, name=f"{found_by}{self._counts[found_by]}" if found_by else short)
        made.set_name(short)
        return made

    def plain(self, weight: Weight, data: Array, reason: str = "", every: int = 0) -> Any:
        """A weight's values in the package's float type.

        Args:
            every: of a matrix, 1, and of taps the positions between them: then it is named to be found and compared.

        Raises:
            Unsupported: one is beyond it.
        """
        with np.errstate(over="ignore"):  # told below, by name
            held = data.astype(self.dtype)
        return self._float(weight, held, reason, _found_by(weight, every) if every else "")

    def single(self, weight: Weight, data: Array) -> Any:
        """A weight's values in float32, whatever the scheme."""
        return self._float(weight, data.astype(np.float32), "read in float32" if self.half else "")

    def matrix(self, weight: Weight, data: npt.NDArray[np.float32]) -> Any:
        """A matrix [O, I], or a table of rows, as the scheme stores it."""
        form = self._form(weight, data)
        if form is None:
            small = self.rules.of_matrix(weight.parts) not in ("fp32", "fp16")
            reason = weight.uncoded or ("small: decompressing it costs more than the bytes" if small else "")
            return self.plain(weight, data, reason, 1)
        source = digest(data)
        if source not in self._quantized:
            try:
                values, extra = (t.numpy() for t in form.quantize(torch.from_numpy(data)))
                # What an op gives is of its scales' or levels' type.
                self._quantized[source] = values, extra.astype(self.dtype)
            except ValueError as fault:
                raise too_large(weight, str(fault)) from fault
        values, extra = self._quantized[source]
        count = values.size * form.bits // 8 + extra.nbytes
        self._note(f"{form.name}{source}", Stored(short_name(weight.name), count, form.name, weight.parts))
        name = _found_by(weight)
        if form.kind == "palette":
            indices = self.constant(values.astype(types.np_uint4_dtype), types.np_uint4_dtype)
            levels = self.constant(extra.reshape(extra.shape[0], 1, extra.shape[1], 1))
            return self._made("constexpr_lut_to_dense", name, indices=indices, lut=levels)
        if not self.blocks:
            given = {"quantized_data": values, "zero_point": np.int8(0), "scale": extra[:, 0], "axis": 0}
            return self._made("constexpr_affine_dequantize", name, **given)
        grid = self.constant(values.astype(types.np_int4_dtype), types.np_int4_dtype) if form.bits == 4 else None
        grid = self.constant(values) if grid is None else grid
        return self._made("constexpr_blockwise_shift_scale", name, data=grid, scale=self.constant(extra))

    def codes(self, weight: Weight, site: int, indices: Array, norms: Array) -> tuple[Any, Array]:
        """One of a weight's matrices in codebook form, by group: levels float32 [G, O, g], norms float16 [G, 1, O].

        Args:
            indices: [G, O, g], into the weight's levels.
            norms: as they are stored.
        """
        coded = weight.codes[site]
        parts = [replace(p, elements=p.elements // len(weight.codes)) for p in weight.parts]
        key = f"{coded.form}{digest(indices)}{digest(norms)}"
        self._note(key, Stored(short_name(weight.name), coded.nbytes, coded.form, tuple(parts)))
        name = short_name(weight.name) if weight.value.dim() == 2 else f"{short_name(weight.name)}.{site}"
        kind = _INDICES[coded.bits]
        levels = np.resize(coded.levels, 2**coded.bits)  # three levels take two bits, and nothing points to the fourth
        shape = (1, 1, 1, len(levels), 1)
        found_by = f"{identifier(coded_name(name))}_"
        given = {"indices": self.constant(indices.astype(kind), kind), "lut": self.constant(levels.reshape(shape))}
        return self._made("constexpr_lut_to_dense", found_by, **given), norms

    def _form(self, weight: Weight, data: npt.NDArray[np.float32]) -> Form | None:
        """What the scheme makes of a matrix, or None for a float."""
        scheme, columns = self.rules.of_matrix(weight.parts), data.shape[1]
        if scheme != "palette4" or data.size < SMALL:
            return block_form(scheme, *data.shape)
        # A palette serves rows of one checkpoint tensor only, so that its levels don't depend on what lies beside it.
        return Form("palette", 4, math.gcd(GROUP, *(p.elements // columns for p in weight.parts)))

    def _float(self, weight: Weight, data: Array, reason: str, name: str = "") -> Any:
        if data.dtype == np.float16 and not np.isfinite(data).all():
            raise too_large(weight, "a value is beyond half precision")
        self._note(_key(data), Stored(short_name(weight.name), data.nbytes, data.dtype.name, weight.parts, reason))
        return self.constant(data, name=name)

    def _note(self, key: str, stored: Stored) -> None:
        """Remember what bytes stand for; equal ones of several tensors lie in the file once and stand for all."""
        known = self.stored.setdefault(key, stored)
        if known.dtype == stored.dtype:
            new = tuple(p for p in stored.parts if p not in known.parts)
            self.stored[key] = replace(known, parts=(*known.parts, *new))

    def listed(self) -> list[StoredWeight]:
        """Everything that was stored, for the report."""
        return [
            StoredWeight(
                s.name,
                s.bytes,
                s.dtype,
                tuple(WeightShare(p.source, p.role, p.layer, p.elements) for p in s.parts),
                s.kept_float,
            )
            for s in self.stored.values()
        ]


def block_form(scheme: str, rows: int, columns: int) -> Form | None:
    """How a matrix lies in blocks of integers, or None."""
    if scheme not in ("int8", "int4") or rows * columns < SMALL:
        return None
    return Form("int", 8, columns) if scheme == "int8" else Form("int", 4, math.gcd(BLOCK, columns))


def _found_by(weight: Weight, every: int = 1) -> str:
    """What the constant of a matrix is called, up to a number; ``readback`` finds it by that."""
    return f"{identifier(kernel_name(short_name(weight.name), weight.folded, every))}_"


def _key(data: Array) -> str:
    return f"{data.dtype.str}{data.shape}{digest(data)}"
