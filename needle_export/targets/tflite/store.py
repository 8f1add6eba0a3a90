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
from needle_export.targets.constants import short_name
from needle_export.targets.tflite.readback import tensor_name
from needle_export.weights.int8 import quantize_rows

#: Matrices with fewer elements stay float32: converting their input at every step would cost more than the bytes.
SMALL = 10_000


@dataclass(frozen=True)
class Stored:
    """A constant in the file.

    Attributes:
        name: of the weight.
        dtype: of its elements.
        parts: where they come from.
        kept_float: why it is float32 where the scheme asks for less, or empty.
    """

    name: str
    dtype: str
    parts: tuple[Part, ...]
    kept_float: str = ""


@dataclass(frozen=True)
class Matrix:
    """A stored matrix: the operand, and the scales of its rows [O] that multiply behind the op, if it has any.

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

    def constant(self, data: npt.NDArray[Any]) -> Any:
        """A constant that belongs to no checkpoint tensor."""
        attribute, kind, _ = self._attribute(data)
        return _constant("tfl.pseudo_const", kind, value=attribute)

    def plain(self, weight: Weight, data: npt.NDArray[np.float32], reason: str = "") -> Any:
        """A weight's values in float32, as a Ref."""
        from needle_export.targets.views import Ref

        attribute, kind, digest = self._attribute(data)
        self._note(digest, Stored(short_name(weight.name), "float32", weight.parts, reason))
        return Ref(_constant("tfl.pseudo_const", kind, value=attribute), data.shape)

    def matrix(
        self, weight: Weight, data: npt.NDArray[np.float32], factor: npt.NDArray[np.float32] | None = None
    ) -> Matrix:
        """A matrix [O, I] (or a table of rows) as the scheme stores it, ready for an op.

        A ``factor`` a row [O] goes into the matrix in float32; halves and integers stay as they are, and it goes into
        the scales.
        """
        from needle_export.targets.views import Ref

        scheme = self.rules.of_matrix(weight.parts)
        reason = _why_float(scheme, weight, data.size)
        if scheme == "fp32" or reason:
            data = data if factor is None else data * factor[:, None]
            with _called(weight, weight.folded or factor is not None):
                return Matrix(self.plain(weight, data, reason), None)
        if scheme == "fp16":
            halves = data.astype(np.float16)
            attribute, kind, digest = self._attribute(halves)
            self._note(digest, Stored(short_name(weight.name), "float16", weight.parts))
            half = _constant("tfl.pseudo_const", kind, value=attribute)
            wide = ir.RankedTensorType.get(data.shape, ir.F32Type.get())
            with _called(weight, weight.folded):
                value = ir.Operation.create("tfl.dequantize", results=[wide], operands=[half]).result
            return Matrix(Ref(value, data.shape), factor)
        return self._int8(weight, data, factor)

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
            self.stored[digest] = replace(known, parts=(*known.parts, *new))


def _why_float(scheme: str, weight: Weight, size: int) -> str:
    """Why a matrix stays float32 under its scheme, or empty."""
    if scheme == "fp32":
        return ""
    if scheme == "fp16" and weight.folded:
        return "constants were folded into it, so its values are not the checkpoint's halves"
    if size < SMALL:
        return "small: converting its input at every step would cost more than the bytes"
    return ""


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
