"""Tiny TFLite models, built op by op.

Nothing is optimised on the way: the file holds the ops that were asked for, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The second item of a :class:`Tiny` input: its type, in the notation of the graph's text form.
FLOAT, INT, INT64, BOOL = "f32", "i32", "i64", "i1"

#: Attributes that ops demand, in the notation of the graph's text form.
_ATTRIBUTES = {
    "add": '{fused_activation_function = "NONE"}',
    "batch_matmul": "{adj_x = false, adj_y = false}",
    "concatenation": '{axis = 0 : i32, fused_activation_function = "NONE"}',
    "div": '{fused_activation_function = "NONE"}',
    "fully_connected": (
        '{fused_activation_function = "NONE", weights_format = "DEFAULT", keep_num_dims = true,'
        " asymmetric_quantize_inputs = false}"
    ),
    "gather": "{axis = 0 : i32, batch_dims = 0 : i32}",
    "mul": '{fused_activation_function = "NONE"}',
    "softmax": "{beta = 1.0 : f32}",
    "sum": "{keep_dims = true}",
}


class Tiny:
    """The body of one signature while it is written."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def constant(self, array: NDArray[Any], quantized: str = "") -> Any:
        """A constant; ``quantized`` is an element type such as ``!quant.uniform<i8:f32, 0.5>``."""
        from litert_converter.mlir import ir

        array = np.ascontiguousarray(array)
        if not quantized:
            attribute = ir.DenseElementsAttr.get(array)
            return ir.Operation.create(
                "tfl.pseudo_const", results=[attribute.type], attributes={"value": attribute}
            ).result
        kind = ir.Type.parse(f"tensor<{'x'.join(map(str, array.shape))}x{quantized}>")
        attributes = {"qtype": ir.TypeAttr.get(kind), "value": ir.DenseElementsAttr.get(array)}
        return ir.Operation.create("tfl.pseudo_qconst", results=[kind], attributes=attributes).result

    def absent(self) -> Any:
        from litert_converter.mlir import ir

        attributes = {"value": ir.UnitAttr.get()}
        return ir.Operation.create("tfl.no_value", results=[ir.NoneType.get()], attributes=attributes).result

    def op(
        self, name: str, shape: Sequence[int | str], *operands: Any, dtype: str = FLOAT, attributes: str = ""
    ) -> Any:
        """An op with one result of this shape ("?" for an unknown size)."""
        from litert_converter.mlir import ir

        parsed = ir.DictAttr.parse(attributes or _ATTRIBUTES.get(name, "{}"))
        return ir.Operation.create(
            f"tfl.{name}",
            results=[_tensor(shape, dtype)],
            operands=list(operands),
            attributes={entry.name: entry.attr for entry in parsed},
        ).result


Inputs = Mapping[str, tuple[Sequence[int | str], str]]
Body = Callable[[Tiny], Mapping[str, Any]]


def save(path: Path, signatures: Mapping[str, tuple[Inputs, Body]], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a model; a body takes its inputs from a :class:`Tiny` and returns its outputs by name."""
    from litert_converter.mlir import ir
    from litert_converter.mlir._mlir_libs import converter_api_ext as converter

    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context, ir.Location.unknown():
        modules = [_module(name, inputs, body) for name, (inputs, body) in signatures.items()]
    merged = converter.merge_modules(modules)
    whole = getattr(merged, "operation", merged)
    if metadata:
        with context:
            entries = {key: ir.StringAttr.get(text) for key, text in metadata.items()}
            whole.attributes["tfl.metadata"] = ir.DictAttr.get(entries)
    converter.export_flatbuffer_to_file(whole, str(path))
    return path


def _tensor(shape: Sequence[int | str], dtype: str) -> Any:
    from litert_converter.mlir import ir

    return ir.Type.parse(f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>")


def _module(name: str, inputs: Inputs, body: Body) -> Any:
    from litert_converter.mlir import ir
    from litert_converter.mlir._mlir_libs import converter_api_ext as converter
    from litert_converter.mlir.dialects import func

    module = ir.Module.create()
    kinds = [_tensor(shape, dtype) for shape, dtype in inputs.values()]
    function = func.FuncOp("main", ir.FunctionType.get(kinds, []), ip=ir.InsertionPoint.at_block_begin(module.body))
    with ir.InsertionPoint(function.add_entry_block()):
        outputs = body(Tiny(dict(zip(inputs, function.arguments, strict=True))))
        func.ReturnOp(list(outputs.values()))
    whole = ir.FunctionType.get(kinds, [value.type for value in outputs.values()])
    function.attributes["function_type"] = ir.TypeAttr.get(whole)
    function.attributes["sym_visibility"] = ir.StringAttr.get("public")
    module.operation.verify()
    converter.set_signature(module.operation, signature_name=name, input_names=list(inputs), output_names=list(outputs))
    return module
