"""From a fused program to an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from needle_export.config.options import IR_VERSIONS
from needle_export.config.rules import Rules
from needle_export.errors import Unsupported
from needle_export.graph.program import FxNode, Program
from needle_export.targets.onnx import attention, caches, codebook, elementwise, fused
from needle_export.targets.onnx.builder import MICROSOFT, Builder, Dims, Ref, features
from needle_export.targets.onnx.contract import SCALE, Port
from needle_export.targets.onnx.load_time import computed
from needle_export.targets.onnx.store import Weights

_LOWERINGS = {**elementwise.LOWERINGS, **codebook.LOWERINGS, **fused.LOWERINGS, **attention.LOWERINGS}

#: ONNX IR version that came with an opset.


def lower(
    program: Program,
    inputs: Mapping[str, Port],
    outputs: Mapping[str, Port],
    store: Weights,
    *,
    name: str,
    opset: int,
    weights: Rules,
    data_name: str,
    metadata: Mapping[str, str],
) -> ir.Model:
    """Lower a program; weights go to ``store``.

    Args:
        inputs, outputs: ports by the program's input and output names.
        weights: which scheme every weight has.

    Raises:
        Unsupported: an op that has no lowering, by name.
    """
    b = Builder(program, store, features(opset), weights, data_name)
    b.at_load = computed
    graph_inputs = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            port = inputs[node.name]
            value = _input(port)
            dims: Dims = b.dims_of(node)
            if node.name not in ("tokens", "position", "token_history"):
                dims = tuple(d if isinstance(d, int) else None for d in port.shape)
            b.env[node] = Ref(value, dims)
            graph_inputs.append(value)
            if node.name + SCALE in inputs:
                graph_inputs.append(_input(inputs[node.name + SCALE]))
                caches.give_scales(b, value, graph_inputs[-1])
    results: tuple[FxNode, ...] = ()
    streams = {node: index for index, node in program.streams.items()}
    for node in program.graph.nodes:
        if node.op == "output":
            results = tuple(node.args[0])
        elif node.op == "call_function":
            lowering = _LOWERINGS.get(node.target)
            if lowering is None:
                raise Unsupported(f"{node.target} has no ONNX lowering", where=node.name)
            b.at(node)
            if node not in b.env:  # or it was made with its neighbours
                lowering(b, node)
            if node in streams:
                # A stable name, by which verification finds the stream behind a block.
                b.ref(node).value.name = f"stream_{streams[node]:02d}"
    graph_outputs = []
    for result, output in zip(results, program.outputs, strict=True):
        port = outputs[output]
        ref = b.ref(result)
        value = b.get(result) if output in ("logits", "token_history_next") else ref.value
        scales = caches.scales_of(b, value)
        graph_outputs.append(_output(b, value, port))
        if scales is not None:
            name_of_cache = output.removesuffix("_next")
            graph_outputs.append(_output(b, scales, outputs[f"{name_of_cache}{SCALE}_next"]))
    imports = {"": opset}
    if any(n.domain == MICROSOFT for n in b.nodes):
        imports[MICROSOFT] = 1
    graph = ir.Graph(
        graph_inputs,
        graph_outputs,
        nodes=b.nodes,
        initializers=list(b.initializers.values()),
        opset_imports=imports,
        name=name,
    )
    graph.sort()
    model = ir.Model(graph, ir_version=IR_VERSIONS[opset], producer_name="needle-export")
    model.metadata_props.update(metadata)
    return model


def _input(port: Port) -> ir.Value:
    kind = ir.TensorType(ir.DataType[port.dtype.upper()])
    return ir.Value(name=port.name, shape=ir.Shape(port.shape), type=kind, doc_string=port.doc)


def _output(b: Builder, value: ir.Value, port: Port) -> ir.Value:
    if value.producer() is None:
        value = b.op("Identity", value)
    value.name = port.name
    value.shape = ir.Shape(port.shape)
    value.type = ir.TensorType(ir.DataType[port.dtype.upper()])
    value.doc_string = port.doc
    return value


def count_ops(model: ir.Model) -> dict[str, int]:
    """Nodes by op type."""
    counts: dict[str, int] = {}
    for node in model.graph:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def count_at_load(model: ir.Model) -> int:
    """Nodes that depend on weights alone, which a runtime computes when it loads the model."""
    constant: set[ir.Value | None] = {None, *model.graph.initializers.values()}
    count = 0
    for node in model.graph:
        if all(value in constant for value in node.inputs):
            constant.update(node.outputs)
            count += 1
    return count
