"""What a package holds, counted from its specification: no weight is read for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from needle_export.targets.coreml.evaluate.package import Package
from needle_export.targets.coreml.evaluate.spec import FunctionInfo, Immediate, Op, Stored
from needle_export.targets.coreml.evaluate.types import FLOATS, TensorType

#: The oldest systems that read a version of the format.
SYSTEMS = {
    6: "iOS 15, macOS 12",
    7: "iOS 16, macOS 13",
    8: "iOS 17, macOS 14",
    9: "iOS 18, macOS 15",
    10: "iOS 26, macOS 26",
}

#: Parameters of constexpr ops that hold the elements, in whatever form; the others say how to read them.
_ELEMENTS = frozenset({"indices", "data", "quantized_data", "nonzero_data", "source_val"})


def describe(package: Package) -> dict[str, Any]:
    """What the package holds, ready for JSON.

    Constants are told by form: ``dense float16``, ``lut4`` (indices of 4 bits and their palettes), ``int4 blocks``
    (with a scale for each block), ``int8 channels``. Bytes are those in the weight files, each counted once, and
    ``in the specification`` what lies outside of them.
    """
    forms: Counter[str] = Counter()
    users: dict[tuple[str, int], set[str]] = {}
    sizes: dict[tuple[str, int], int] = {}
    inline = 0
    for function in package.functions.values():
        for form, value in _constants(function):
            if isinstance(value, Immediate):
                inline += _inline_bytes(value)
                continue
            key = (str(value.file.path), value.offset)
            if key not in users:
                sizes[key] = value.type.bytes
                forms[form] += value.type.bytes
            users.setdefault(key, set()).add(function.name)
    stored = sum(sizes.values())
    shared = sum(sizes[key] for key, names in users.items() if len(names) > 1)
    states: dict[str, TensorType] = {}
    for function in package.functions.values():
        states |= function.states
    return {
        "specification": package.specification,
        "minimum_os": SYSTEMS.get(package.specification, "unknown"),
        "default_function": package.default,
        "metadata": package.metadata,
        "functions": {name: _function(function) for name, function in package.functions.items()},
        "states": _features(states),
        "state_bytes": sum(declared.bytes for declared in states.values()),
        "constants": {
            "bytes": stored,
            "forms": dict(sorted(forms.items(), key=lambda item: (-item[1], item[0]))),
            "in_specification": inline,
            "shared_bytes": shared,
            "shared": round(shared / stored, 6) if stored else 0.0,
        },
        "weight_file_bytes": sum(file.size for file in package.weights.values()),
    }


def _features(types: dict[str, TensorType]) -> dict[str, dict[str, Any]]:
    return {name: {"dtype": declared.dtype, "shape": list(declared.shape)} for name, declared in types.items()}


def is_constant(op: Op) -> bool:
    """Whether an op only says what a constant is."""
    return op.type == "const" or op.type.startswith("constexpr_")


def _function(function: FunctionInfo) -> dict[str, Any]:
    ops = [op for op in function.ops if not is_constant(op)]
    written = {**function.inputs, **function.states}
    for op in function.ops:
        written |= dict(op.outputs)
    return {
        "opset": function.opset,
        "inputs": _features(function.inputs),
        "states": list(function.states),
        "outputs": _features(function.outputs),
        "ops": len(ops),
        "op_types": _ordered(op.type for op in ops),
        "precisions": _ordered(_precision(op, written) for op in ops),
    }


def _ordered(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _precision(op: Op, types: dict[str, TensorType]) -> str:
    """In what an op computes: its result's type; for a comparison, and for a write, that of what it is given."""
    declared = op.outputs[0][1].dtype if op.outputs else "bool"
    if declared == "bool":
        for parameter in ("x", "data", "value"):
            for one in op.inputs.get(parameter, ()):
                declared = types[one].dtype if isinstance(one, str) else one.type.dtype
    if declared in FLOATS:
        return "fp16" if declared == "float16" else "fp32"
    return "bool" if declared == "bool" else "int"


def _constants(function: FunctionInfo) -> Iterator[tuple[str, Immediate | Stored]]:
    """Every constant with the form that it belongs to; those that a constexpr op reads have the op's."""
    # A constant may be written apart and named by the constexpr op that reads it.
    apart = {op.outputs[0][0]: op.inputs["val"][0] for op in function.ops if op.type == "const" and "val" in op.inputs}
    read = {
        one
        for op in function.ops
        if op.type.startswith("constexpr_")
        for argument in op.inputs.values()
        for one in argument
        if isinstance(one, str)
    }
    for op in function.ops:
        if op.type == "const" and op.outputs[0][0] in read:
            continue
        form = _form(op, apart)
        for argument in op.inputs.values():
            for one in argument:
                value = apart.get(one) if isinstance(one, str) and is_constant(op) else one
                if value is not None and not isinstance(value, str):
                    yield form or f"dense {value.type.dtype}", value


def _form(op: Op, apart: dict[str, Any]) -> str:
    """What a constexpr op's constants are called, or nothing for another op's."""
    if not op.type.startswith("constexpr_"):
        return ""
    types = {}
    for parameter, argument in op.inputs.items():
        value = apart.get(argument[0]) if isinstance(argument[0], str) else argument[0]
        if value is not None:
            types[parameter] = value.type
    elements = next((types[name] for name in sorted(_ELEMENTS & set(types))), None)
    dtype = elements.dtype if elements is not None else "?"
    if op.type == "constexpr_lut_to_dense":
        if "shape" in types and "lut" in types:
            return f"lut{max(types['lut'].elements - 1, 1).bit_length()}"
        return f"lut{dtype.removeprefix('uint')}"
    if op.type == "constexpr_blockwise_shift_scale":
        return f"{dtype} {_granularity(elements, types.get('scale'))}"
    if op.type == "constexpr_affine_dequantize":
        scale = types.get("scale")
        return f"{dtype} {'channels' if scale is not None and scale.elements > 1 else 'tensor'}"
    return {"constexpr_sparse_to_dense": "sparse", "constexpr_cast": f"dense {dtype}"}.get(op.type, op.type)


def _granularity(data: TensorType | None, scale: TensorType | None) -> str:
    if data is None or scale is None or len(data.shape) != len(scale.shape):
        return "scaled"
    if scale.elements == 1:
        return "tensor"
    whole = all(count in (1, size) for size, count in zip(data.shape, scale.shape, strict=True))
    return "channels" if whole else "blocks"


def _inline_bytes(value: Immediate) -> int:
    return len(value.value.encode()) if isinstance(value.value, str) else value.type.bytes
