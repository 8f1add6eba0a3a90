"""From fused programs to one TFLite file with a signature each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from litert_converter.mlir import ir, passmanager
from litert_converter.mlir._mlir_libs import converter_api_ext
from litert_converter.mlir.dialects import func
from litert_torch.backend import export, export_utils, lowerings

from needle_export.config.rules import Rules
from needle_export.errors import Unsupported
from needle_export.graph.program import FxNode, Program
from needle_export.targets.ports import CONTRACT_KEY, Port
from needle_export.targets.tflite import attention, elementwise, fused, probes
from needle_export.targets.tflite.blocks import put_blocks
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.store import WeightStore
from needle_export.targets.views import Ref

_LOWERINGS = {**elementwise.LOWERINGS, **fused.LOWERINGS, **attention.LOWERINGS, **probes.LOWERINGS}


class _Lowering(export.LoweringInterpreter):  # type: ignore[misc]  # litert-torch is untyped
    """litert-torch's walk over a graph with our lowerings only: an op that we don't know is refused."""

    def __init__(self, program: Program, context: Any, builder: Builder) -> None:
        super().__init__(program.module, context)
        self.builder = builder

    def run_node(self, node: FxNode) -> Any:
        """Lower one node; results are the builder's, which knows shapes that FX doesn't."""
        if node.op == "call_function":
            lowering = _LOWERINGS.get(node.target)
            if lowering is None:
                raise Unsupported(f"{node.target} has no TFLite lowering", where=node.name)
            self.builder.at(node)
            lowering(self.builder, node)
        return None


class Exporter:
    """Collects signatures and writes them into one file."""

    def __init__(self, store: WeightStore, context: Any) -> None:
        self.store = store
        self.context = context
        self.modules: list[Any] = []

    def add(self, name: str, program: Program, rows: int, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> None:
        """Lower a program as a signature.

        Args:
            rows: T of a step; 0 for a probe head's end.
            inputs: an input of the program that has no port is one that its lowering at this T doesn't read.
            outputs: results of the program, or new rows of its states.
        """
        with ir.Location.unknown():
            module = ir.Module.create()
            types = [ir.RankedTensorType.get(p.shape, _element(p.dtype)) for p in inputs]
            start = ir.InsertionPoint.at_block_begin(module.body)
            draft = func.FuncOp("main", ir.FunctionType.get(types, []), ip=start)
            builder = Builder(program, self.store, rows)
            placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
            with ir.InsertionPoint(draft.add_entry_block()):
                for port, argument in zip(inputs, draft.arguments, strict=True):
                    if port.name in placeholders:
                        builder.put(placeholders[port.name], Ref(argument, port.shape))
                lowering = _Lowering(program, lowerings.context.LoweringContext(self.context, module), builder)
                for node in program.graph.nodes:
                    lowering.run_node(node)
                results = _results(builder, program, outputs)
                func.ReturnOp([r.value for r in results])
            draft.attributes["function_type"] = ir.TypeAttr.get(
                ir.FunctionType.get(types, [r.value.type for r in results])
            )
            draft.attributes["sym_visibility"] = ir.StringAttr.get("public")
            module.operation.verify()
        converter_api_ext.set_signature(
            module.operation,
            signature_name=name,
            input_names=[p.name for p in inputs],
            output_names=[p.name for p in outputs],
        )
        self.modules.append(module)

    def write(self, path: Path, contract: str) -> None:
        """Merge the signatures, run the converter's own passes and write the file."""
        merged = converter_api_ext.merge_modules(self.modules)
        self.modules.clear()
        operation = getattr(merged, "operation", merged)
        operation.attributes["tfl.metadata"] = ir.DictAttr.get({CONTRACT_KEY: ir.StringAttr.get(contract)})
        config = converter_api_ext.ConvertToTFLConfig()
        config.model_origin_framework = "PYTORCH"
        config.canonicalizing_inf_as_min_max_float = False
        config.enable_x64 = False
        converter_api_ext.run_convert_to_tfl_passes(merged, passmanager.PassManager(), config)
        converter_api_ext.export_flatbuffer_to_file(operation, str(path))
        if self.store.carried:
            put_blocks(path, self.store.carried)


@contextlib.contextmanager
def exporter(rules: Rules) -> Iterator[Exporter]:
    """An exporter in an MLIR context of its own."""
    context = export_utils.create_ir_context()
    with context:
        yield Exporter(WeightStore(rules), context)


def _results(b: Builder, program: Program, outputs: tuple[Port, ...]) -> list[Ref]:
    last = next(n for n in program.graph.nodes if n.op == "output")
    whole = dict(zip(program.outputs, last.args[0], strict=True))
    found = []
    for port in outputs:
        if port.name in whole:
            found.append(b.reshape(b.ref(whole[port.name]), port.shape))
            continue
        prefix = {"k_rows": "k_", "v_rows": "v_", "taps_rows": "taps_"}.get(port.name)
        if prefix is None:
            found.append(b.reshape(b.new_rows[port.name.replace("_rows", "_history")], port.shape))
            continue
        rows = [b.new_rows[name] for name in sorted(b.new_rows) if name.startswith(prefix)]
        found.append(b.reshape(b.concat(rows, 0), port.shape))
    return found


def _element(dtype: str) -> Any:
    return ir.F32Type.get() if dtype == "float32" else ir.IntegerType.get_signless(32)
