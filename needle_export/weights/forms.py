"""Names of the forms in which a matrix can be stored by its values alone, and what each makes of a matrix.

``int8``, ``int4``, ``int2`` with ``x<K>``: symmetric integers with a half-precision scale for K columns of a row;
with ``bf16`` behind, scales that bfloat16 holds as well, as XNNPACK's kernels need them.
``palette4`` with ``x<N>``: 16 half-precision levels for N rows.
``cq4``, ``cq2`` with ``x<g>``: the rotated codes of ``weights.cq`` in groups of g, made from floats.
``codebook1`` to ``codebook4`` with ``x<g>``, and ``codebook5`` for three levels, which take two bits: the same, a
container's own: the checkpoint's numbers are theirs already.

A ``w`` behind it: made floats before it is used, so that a runtime that rounds the inputs of integer products doesn't
round this one's. A ``t`` behind that: its rows are inputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from needle_export.weights.codes import Codes
from needle_export.weights.cq import codebook, encode
from needle_export.weights.linear import dequantize_blocks, quantize_blocks
from needle_export.weights.palette import dequantize_palette, palettize

_NAME = re.compile(r"(int|palette|cq|codebook)(\d)x(\d+)(bf16)?(wt?)?")


@dataclass(frozen=True)
class Form:
    """How a matrix [O, I] is stored.

    Attributes:
        kind: ``int``, ``palette``, ``cq`` or ``codebook``.
        bits: of an entry.
        size: columns that share a scale or a norm, or rows that share a palette.
        brain: scales have bfloat16's 8 digits at most.
        widened: whether a runtime makes floats of it before it multiplies.
        turned: whether it is stored as [I, O], and rows and columns are those.
    """

    kind: str
    bits: int
    size: int
    brain: bool = False
    widened: bool = False
    turned: bool = False

    @property
    def name(self) -> str:
        """As a report has it: ``int4x32``."""
        return f"{self.kind}{self.bits}x{self.size}{'bf16' * self.brain}{'w' * self.widened}{'t' * self.turned}"

    @classmethod
    def parse(cls, name: str) -> Form | None:
        """The form of a name, or None if it is another dtype's."""
        match = _NAME.fullmatch(name)
        if match is None or (match.group(1) == "palette" and match.group(4)):
            return None
        kind, bits, size, brain, how = match.groups("")
        return cls(kind, int(bits), int(size), bool(brain), "w" in how, "t" in how)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Values or indices [O, I], or [I, O] where it is turned, and scales or levels; of a float32 weight [O, I]."""
        weight = weight.t().contiguous() if self.turned else weight
        if self.kind == "int":
            return quantize_blocks(weight, self.bits, self.size, self.brain)
        return palettize(weight, self.bits, self.size)

    def dequantize(self, values: Tensor, extra: Tensor) -> Tensor:
        """The inverse, float32 [O, I]."""
        weight = dequantize_blocks(values, extra) if self.kind == "int" else dequantize_palette(values, extra)
        return weight.t() if self.turned else weight

    def encode(self, weight: Tensor) -> Codes:
        """The codes of a float32 weight [O, I]."""
        return Codes(self.bits, *encode(weight.numpy(), self.bits, self.size), codebook(self.bits, self.size))

    def rounded(self, weight: Tensor) -> Tensor:
        """What a weight [O, I] becomes, in float32."""
        if self.kind == "codebook":
            return weight.float()
        if self.kind == "cq":
            return torch.from_numpy(self.encode(weight.float().contiguous()).matrix())
        return self.dequantize(*self.quantize(weight.float().contiguous()))
