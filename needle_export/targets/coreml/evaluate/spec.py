"""Program messages into plain values: types, constants, ops, functions; every name must lead somewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.coreml.evaluate.blobs import WeightFile
from needle_export.targets.coreml.evaluate.types import BITS, TensorType, storage, unpack

#: Element types as MIL.proto numbers them.
_TYPES = {
    1: "bool",
    2: "string",
    10: "float16",
    11: "float32",
    21: "int8",
    22: "int16",
    23: "int32",
    24: "int64",
    25: "int4",
    31: "uint8",
    32: "uint16",
    33: "uint32",
    35: "uint4",
    36: "uint2",
    37: "uint1",
    38: "uint6",
    39: "uint3",
}

#: Types whose immediate values are bytes, and the fields of the others'.
_IN_BYTES = frozenset({"float16", "int4", "int8", "uint1", "uint2", "uint3", "uint4", "uint6", "uint8", "uint32"})
_FIELDS = {"bool": "bools", "float32": "floats", "int64": "longInts"}


@dataclass(frozen=True, eq=False)
class Immediate:
    """A constant within the specification; ``value`` has the type's shape, or is a text."""

    type: TensorType
    value: NDArray[np.generic] | str


@dataclass(frozen=True)
class Stored:
    """A constant in a weight file; equal ones are the same bytes."""

    type: TensorType
    file: WeightFile
    offset: int

    @property
    def packed(self) -> NDArray[np.uint8]:
        """Its bytes, mapped."""
        return self.file.packed(self.offset, self.type)

    @property
    def value(self) -> NDArray[np.generic]:
        """Its elements in the type's shape; mapped where a byte holds no two."""
        return self.file.array(self.offset, self.type)


Value = Immediate | Stored


@dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        type: of operation.
        name: as the program calls it.
        inputs: by parameter: names of earlier values, or constants written in place.
        outputs: names and types; none for a write into a state.
    """

    type: str
    name: str
    inputs: dict[str, tuple[str | Value, ...]]
    outputs: tuple[tuple[str, TensorType], ...]


@dataclass(frozen=True)
class FunctionInfo:
    """A function: interface and ops in order; ``ops`` has constants too."""

    name: str
    opset: str
    inputs: dict[str, TensorType]
    states: dict[str, TensorType]
    outputs: dict[str, TensorType]
    ops: tuple[Op, ...]


class SpecReader:
    """Reads functions of one specification.

    Args:
        path: of the specification, for messages.
        weight_file: opens a weight file by the name that constants give it.
    """

    def __init__(self, path: Path, weight_file: Callable[[str], WeightFile]) -> None:
        self._path = path
        self._weight_file = weight_file

    def _fail(self, what: str) -> NoReturn:
        raise BadInput(what, where=str(self._path), fix="the package is damaged: build it anew")

    def function(self, name: str, message: Any) -> FunctionInfo:
        """A function.

        Raises:
            BadInput: a value is used before it is there or is made twice, or a constant isn't what it is declared.
            Unsupported: a type, or control flow, that the evaluator doesn't know.
        """
        inputs: dict[str, TensorType] = {}
        states: dict[str, TensorType] = {}
        for entry in message.inputs:
            if entry.type.WhichOneof("type") == "stateType":
                states[entry.name] = self._tensor(entry.type.stateType.wrappedType, entry.name)
            else:
                inputs[entry.name] = self._tensor(entry.type, entry.name)
        if message.opset not in message.block_specializations:
            self._fail(f"function {name!r} has no block for its opset {message.opset!r}")
        block = message.block_specializations[message.opset]
        known = {**inputs, **states}
        ops = []
        for entry in block.operations:
            op = self._op(name, entry)
            for argument in op.inputs.values():
                for one in argument:
                    if isinstance(one, str) and one not in known:
                        self._fail(f"op {op.name!r} of function {name!r} uses {one!r}, which nothing has made yet")
            for output, declared in op.outputs:
                if output in known:
                    self._fail(f"function {name!r} makes {output!r} twice")
                known[output] = declared
            ops.append(op)
        for output in block.outputs:
            if output not in known:
                self._fail(f"function {name!r} returns {output!r}, which nothing makes")
        return FunctionInfo(
            name, message.opset, inputs, states, {output: known[output] for output in block.outputs}, tuple(ops)
        )

    def _op(self, function: str, message: Any) -> Op:
        attributes = dict(message.attributes)
        naming = attributes.pop("name", None)
        outputs = tuple((entry.name, self._tensor(entry.type, entry.name)) for entry in message.outputs)
        name = self._value(naming, "name").value if naming is not None else (outputs[0][0] if outputs else "")
        if not isinstance(name, str):
            self._fail(f"an op of type {message.type!r} in function {function!r} has a name that isn't a text")
        if message.blocks:
            raise Unsupported(
                f"op {name!r} of type {message.type!r} in function {function!r} has blocks of its own",
                where=str(self._path),
                fix="the evaluator knows no control flow",
            )
        inputs: dict[str, tuple[str | Value, ...]] = {}
        for parameter, argument in message.inputs.items():
            inputs[parameter] = tuple(
                binding.name if binding.WhichOneof("binding") == "name" else self._value(binding.value, name)
                for binding in argument.arguments
            )
        for parameter, value in attributes.items():
            inputs[parameter] = (self._value(value, name),)
        return Op(message.type, name, inputs, outputs)

    def _tensor(self, message: Any, owner: str) -> TensorType:
        if message.WhichOneof("type") != "tensorType":
            raise Unsupported(
                f"{owner!r} isn't a tensor", where=str(self._path), fix="the evaluator knows tensors only"
            )
        tensor = message.tensorType
        if tensor.dataType not in _TYPES:
            raise Unsupported(
                f"{owner!r} has element type number {tensor.dataType}",
                where=str(self._path),
                fix="the evaluator doesn't know it",
            )
        if tensor.rank != len(tensor.dimensions):
            self._fail(f"{owner!r} has rank {tensor.rank} and {len(tensor.dimensions)} sizes")
        shape = []
        for size in tensor.dimensions:
            if size.WhichOneof("dimension") == "constant":
                shape.append(size.constant.size)
            elif size.unknown.variadic:
                raise Unsupported(f"{owner!r} has no fixed rank", where=str(self._path))
            else:
                shape.append(-1)
        return TensorType(_TYPES[tensor.dataType], tuple(shape))

    def _value(self, message: Any, owner: str) -> Value:
        declared = self._tensor(message.type, owner)
        if -1 in declared.shape:
            self._fail(f"the constant of {owner!r} has no fixed shape")
        kind = message.WhichOneof("value")
        if kind == "blobFileValue":
            if declared.dtype not in BITS:
                self._fail(f"the constant of {owner!r} is a {declared.dtype} in a weight file")
            file = self._weight_file(message.blobFileValue.fileName)
            file.record(message.blobFileValue.offset, declared)
            return Stored(declared, file, message.blobFileValue.offset)
        if kind != "immediateValue" or message.immediateValue.WhichOneof("value") != "tensor":
            raise Unsupported(f"a constant of {owner!r} isn't a tensor", where=str(self._path))
        return Immediate(declared, self._immediate(declared, message.immediateValue.tensor, owner))

    def _immediate(self, declared: TensorType, tensor: Any, owner: str) -> NDArray[np.generic] | str:
        field = tensor.WhichOneof("value")
        if declared.dtype == "string":
            if field != "strings" or len(tensor.strings.values) != 1 or declared.shape:
                raise Unsupported(f"a constant of {owner!r} isn't a single text", where=str(self._path))
            return str(tensor.strings.values[0])
        if declared.dtype in _IN_BYTES:
            # A copy, because torch wants arrays that it may write to.
            raw = np.frombuffer(tensor.bytes.values, np.uint8).copy()
            if field != "bytes" or len(raw) != declared.bytes:
                self._fail(f"a constant of {owner!r} has {len(raw):,} bytes and is declared {declared}")
            return unpack(raw, declared.dtype, declared.elements).reshape(declared.shape)
        expected = _FIELDS.get(declared.dtype, "ints")
        values = getattr(tensor, expected).values
        if field != expected or len(values) != declared.elements:
            self._fail(f"a constant of {owner!r} has {len(values):,} elements and is declared {declared}")
        return np.array(values, dtype=storage(declared.dtype)).reshape(declared.shape)
