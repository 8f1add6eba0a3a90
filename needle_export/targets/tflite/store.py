"""Weights of a TFLite file under a scheme: what is stored as what, once, whichever signature reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from litert_converter.mlir import ir

from needle_export.config.rules import Rules
from needle_export.graph.program import Part, Weight
from needle_export.targets import constants
from needle_export.targets.claims import tensor_name
from needle_export.targets.constants import is_constant, short_name
from needle_export.targets.tflite import halves
from needle_export.targets.tflite.blocks import BLOCK, Packed
from needle_export.targets.tflite.layouts import FLAT, TAPS, location
from needle_export.weights.forms import Form
from needle_export.weights.int8 import quantize_rows

#: Matrices with fewer elements stay float32: converting their input at every step would cost more than the bytes. At
#: 4 bits it's the bytes that count.
SMALL = 10_000

#: How 4-bit matrices are stored.
INT4 = Form("int", 4, BLOCK, brain=True)

#: What a Kronecker factor stays float32 for at 8 and 16 bits, where matrices don't.
_FACTOR = "a Kronecker factor of the MLP: the runtime has no product of float32 with integers on the left"

#: What vectors, and what is used as such, stay float32 for there.
_VECTOR = "small: widening it at every step would cost more than the bytes"


@dataclass(frozen=True)
class Stored:
    """A constant in the file.

    Attributes:
        name: of the weight.
        dtype: of its elements.
        parts: where they come from.
        kept_float: why it is a float where the scheme asks for less, or empty.
        as_read: whether halves are of what an op reads, with constants folded in.
    """

    name: str
    dtype: str
    parts: tuple[Part, ...]
    kept_float: str = ""
    as_read: bool = False


@dataclass(frozen=True)
class Matrix:
    """A stored matrix: the operand, and the scales of its rows [O] that multiply behind the op, if it has any.

    Of a matrix in blocks these are factors of the model's own; scales of blocks lie in its tensor.

    Scales of int8 rows are not the tensor's own: tflite-runtime 2.14 reads one scale a tensor, and returns zeros where
    there are more. With a scale of 1 in the tensor and a MUL behind the op, every runtime computes the same.
    """

    operand: Any
    scales: npt.NDArray[np.float32] | None


class WeightStore:
    """Makes constants for all signatures of one file; equal bytes become one attribute and one buffer."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        #: By digest of the stored bytes.
        self.stored: dict[str, Stored] = {}
        self._attributes: dict[tuple[str, str, tuple[int, ...]], Any] = {}
        self._quantized: dict[str, tuple[Any, Any]] = {}
        #: Matrices in blocks, by digest of the int8 constant that carries each through the converter.
        self.carried: dict[str, Packed] = {}
        self._packed: dict[str, Packed] = {}

    @property
    def compact(self) -> bool:
        """Whether the file has 4-bit matrices, so that bytes of small constants count and no older runtime does."""
        return "int4" in self.rules.schemes

    def constant(self, data: npt.NDArray[Any]) -> Any:
        """A constant that belongs to no checkpoint tensor."""
        attribute, kind, _ = self._attribute(data)
        return _constant("tfl.pseudo_const", kind, value=attribute)

    def plain(self, weight: Weight, data: npt.NDArray[np.float32], reason: str = "") -> Any:
        """A vector's values, as a Ref: halves at 4 bits, else float32.

        Args:
            data: as the op reads them.
            reason: why they stay float32, where there is one of their own.
        """
        if not reason and self.rules.of(weight.parts) != "fp32":
            return self._small(weight, data, FLAT, _VECTOR)
        return self._float(weight, data, reason)

    def taps(self, weight: Weight, data: npt.NDArray[np.float32]) -> Any:
        """A convolution's taps, the latest first, [K, C] or [1, K, 1, C], as :meth:`plain`."""
        if self.rules.of(weight.parts) == "fp32":
            return self._float(weight, data, "")
        return self._small(weight, data, TAPS, _VECTOR)

    def kronecker(self, weight: Weight, data: npt.NDArray[np.float32]) -> Any:
        """A factor [O, I] of a Kronecker product, which is a float in every scheme, as a Ref."""
        if self.rules.of(weight.parts) == "fp32":
            return self._float(weight, data, "")
        return self._small(weight, data, "", _FACTOR)

    def _small(self, weight: Weight, data: npt.NDArray[np.float32], layout: str, reason: str) -> Any:
        """Halves where a rule says 4 bits and the reference can follow them; else float32, for a reason."""
        if self.rules.of(weight.parts) != "int4":
            return self._float(weight, data, reason)
        named = halves.named(weight, layout)
        if named is None:
            own = weight.folded or is_constant(weight.parts)
            return self._float(weight, data, halves.FOLDED if own else halves.HEAD)
        if np.abs(data).max(initial=0) > np.finfo(np.float16).max:
            return self._float(weight, data, halves.LARGE)
        return self._half(weight, data, location(*named), named[0], halves.VECTOR if layout else halves.FACTOR)

    def _float(self, weight: Weight, data: npt.NDArray[np.float32], reason: str) -> Any:
        from needle_export.targets.views import Ref

        attribute, kind, digest = self._attribute(data)
        self._note(digest, Stored(short_name(weight.name), "float32", weight.parts, reason))
        return Ref(_constant("tfl.pseudo_const", kind, value=attribute), data.shape)

    def _half(
        self, weight: Weight, data: npt.NDArray[np.float32], called: str, name: str, reason: str = ""
    ) -> Any:
        """Halves that an op widens, which carries the name; those with a reason are what an op reads."""
        from needle_export.targets.views import Ref

        attribute, kind, digest = self._attribute(data.astype(np.float16))
        self._note(digest, Stored(name, "float16", weight.parts, reason, bool(reason)))
        half = _constant("tfl.pseudo_const", kind, value=attribute)
        wide = ir.RankedTensorType.get(data.shape, ir.F32Type.get())
        with ir.Location.name(called):
            value = ir.Operation.create("tfl.dequantize", results=[wide], operands=[half]).result
        return Ref(value, data.shape)

    def matrix(
        self, weight: Weight, data: npt.NDArray[np.float32], factor: npt.NDArray[np.float32] | None = None
    ) -> Matrix:
        """A matrix [O, I] (or a table of rows) as the scheme stores it, ready for an op.

        A ``factor`` a row [O] goes into the matrix in float32; halves and integers stay as they are, and it goes into
        the scales.
        """
        dtype, reason = self.form(weight, data)
        if dtype == "float32":
            data = data if factor is None else data * factor[:, None]
            with _called(weight, weight.folded or factor is not None):
                return Matrix(self._float(weight, data, reason), None)
        if dtype == "float16":
            name = short_name(weight.name)
            return Matrix(self._half(weight, data, tensor_name(name, weight.folded), name), factor)
        if dtype == "int8":
            return self._int8(weight, data, factor)
        return self._int4(weight, data, factor)

    def form(self, weight: Weight, data: npt.NDArray[np.float32]) -> tuple[str, str]:
        """What a matrix [O, I] is stored in, and why that is float32 where the scheme asks for less, or empty."""
        scheme = self.rules.of_matrix(weight.parts)
        if scheme == "fp32":
            return "float32", ""
        if scheme in ("fp16", "int4") and weight.folded:
            kind = "halves" if scheme == "fp16" else "values"
            return "float32", f"constants were folded into it, so its values are not the checkpoint's {kind}"
        if scheme == "int4":
            # A row that no block divides gets one scale, and the 8 bits that make up for it.
            return ("int8" if block_form(scheme, data.shape[1]) is None else INT4.name), ""
        if data.size < SMALL:
            return "float32", "small: converting its input at every step would cost more than the bytes"
        return ("float16" if scheme == "fp16" else "int8"), ""

    def _int8(
        self, weight: Weight, data: npt.NDArray[np.float32], factor: npt.NDArray[np.float32] | None
    ) -> Matrix:
        from needle_export.targets.views import Ref

        source = constants.digest(data)
        if source not in self._quantized:
            values, scales = quantize_rows(torch.from_numpy(data))
            self._quantized[source] = (values.numpy(), scales.numpy())
        values, scales = self._quantized[source]
        scales = scales if factor is None else scales * factor
        attribute, _, digest = self._attribute(values)
        self._note(digest, Stored(short_name(weight.name), "int8", weight.parts))
        shape = "x".join(map(str, data.shape))
        kind = ir.Type.parse(f"tensor<{shape}x!quant.uniform<i8<-127:127>:f32, 1.0>>")
        with _called(weight, weight.folded):
            value = _constant("tfl.pseudo_qconst", kind, value=attribute, qtype=ir.TypeAttr.get(kind))
        attribute, _, digest = self._attribute(scales)
        shared = tuple(replace(p, elements=max(1, p.elements // data.shape[1])) for p in weight.parts)
        self._note(digest, Stored(f"{short_name(weight.name)}.scales", "float32", shared))
        return Matrix(Ref(value, data.shape), scales)

    def _int4(
        self, weight: Weight, data: npt.NDArray[np.float32], factor: npt.NDArray[np.float32] | None
    ) -> Matrix:
        """Carried as int8: the converter writes no scales by block; :mod:`blocks` puts the matrix into the file."""
        from needle_export.targets.views import Ref

        source = constants.digest(data)
        if source not in self._packed:
            try:
                values, scales = INT4.quantize(torch.from_numpy(data))
            except ValueError as fault:
                raise constants.too_large(weight, str(fault)) from None
            self._packed[source] = Packed.of(values.numpy(), scales.numpy())
        packed = self._packed[source]
        attribute, _, carrier = self._attribute(packed.carried())
        self.carried[carrier] = packed
        name, runs = short_name(weight.name), packed.scales.shape[1]
        self._note(constants.digest(packed.levels), Stored(name, INT4.name, weight.parts))
        shared = tuple(replace(p, elements=max(1, p.elements * runs // data.shape[1])) for p in weight.parts)
        self._note(constants.digest(packed.scales), Stored(f"{name}.scales", INT4.name, shared))
        kind = ir.Type.parse(f"tensor<{'x'.join(map(str, data.shape))}x!quant.uniform<i8:f32, 1.0>>")
        with _called(weight, weight.folded):
            value = _constant("tfl.pseudo_qconst", kind, value=attribute, qtype=ir.TypeAttr.get(kind))
        return Matrix(Ref(value, data.shape), factor)

    def _attribute(self, data: npt.NDArray[Any]) -> tuple[Any, Any, str]:
        data = np.ascontiguousarray(data).reshape(data.shape)
        digest = constants.digest(data)
        key = (digest, data.dtype.str, data.shape)
        kind = ir.RankedTensorType.get(data.shape, _element(data.dtype))
        if key not in self._attributes:
            self._attributes[key] = ir.DenseElementsAttr.get(data, type=kind)
        return self._attributes[key], kind, digest

    def _note(self, digest: str, stored: Stored) -> None:
        """Remember what bytes stand for; equal ones of several tensors lie in the file once and stand for all."""
        known = self.stored.setdefault(digest, stored)
        if known.dtype == stored.dtype:
            new = tuple(p for p in stored.parts if p not in known.parts)
            as_read = known.as_read or stored.as_read
            self.stored[digest] = replace(known, parts=(*known.parts, *new), as_read=as_read)


def block_form(scheme: str, columns: int) -> Form | None:
    """How a matrix lies in blocks of integers, or None; int8 has a scale for whole rows."""
    return INT4 if scheme == "int4" and columns % BLOCK == 0 else None


def _constant(op: str, kind: Any, **attributes: Any) -> Any:
    return ir.Operation.create(op, results=[kind], attributes=attributes).result


def _called(weight: Weight, folded: bool) -> Any:
    """While active, a constant is named after the weight: by that name it is found in the file and compared."""
    return ir.Location.name(tensor_name(short_name(weight.name), folded))


def _element(dtype: Any) -> Any:
    if dtype == np.float32:
        return ir.F32Type.get()
    if dtype == np.float16:
        return ir.F16Type.get()
    if dtype == np.bool_:
        return ir.IntegerType.get_signless(1)
    return ir.IntegerType.get_signless(dtype.itemsize * 8)
