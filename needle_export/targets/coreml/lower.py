"""From fused programs to one Core ML package with a function each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import coremltools as ct
from coremltools.converters.mil import Builder as MilOps
from coremltools.converters.mil.converter import mil_convert
from coremltools.converters.mil.mil import Function, types
from coremltools.converters.mil.mil import Program as MilProgram
from coremltools.proto import Model_pb2

from needle_export.errors import Unsupported
from needle_export.graph.program import Program
from needle_export.targets.coreml import attention, codebook, elementwise, fused
from needle_export.targets.coreml.builder import Builder
from needle_export.targets.coreml.contract import SPECIFICATIONS, package_name, stateful
from needle_export.targets.coreml.store import WeightStore
from needle_export.targets.ports import CONTRACT_KEY, Port
from needle_export.targets.views import Ref

_LOWERINGS = {**elementwise.LOWERINGS, **codebook.LOWERINGS, **fused.LOWERINGS, **attention.LOWERINGS}

_TYPES = {"float16": types.fp16, "float32": types.fp32, "int32": types.int32}

_OPSETS = {"ios17": ct.target.iOS17, "ios18": ct.target.iOS18, "ios26": ct.target.iOS26}


class Exporter:
    """Collects functions and writes them into one package.

    Args:
        store: of the weights.
        system: the least operating system that is to run it.
    """

    def __init__(self, store: WeightStore, system: str) -> None:
        self.store = store
        self.system = system
        self.functions: dict[str, Function] = {}

    def add(
        self,
        name: str,
        program: Program,
        rows: int,
        inputs: tuple[Port, ...],
        states: tuple[Port, ...],
        outputs: tuple[Port, ...],
    ) -> None:
        """Lower a program at T = ``rows`` as a function."""
        given: dict[str, Any] = {p.name: MilOps.placeholder(p.shape, _TYPES[p.dtype]) for p in inputs}
        if stateful(self.system):
            given |= {p.name: MilOps.state_tensor_placeholder(p.shape, types.fp16) for p in states}
        with Function(given, opset_version=_OPSETS[self.system]) as function:
            builder = Builder(program, self.store, rows, function.inputs, stateful=stateful(self.system))
            for node in program.graph.nodes:
                if node.op == "placeholder":
                    _input(builder, node)
                elif node.op == "call_function":
                    lowering = _LOWERINGS.get(node.target)
                    if lowering is None:
                        raise Unsupported(f"{node.target} has no Core ML lowering", where=node.name)
                    builder.at(node)
                    lowering(builder, node)
            results = _results(builder, program, outputs)
            function.set_outputs([r.value for r in results])
        _sweep(function)
        self.functions[name] = function

    def write(self, path: Path, contract: str, metadata: Mapping[str, str]) -> dict[str, Path]:
        """Write the package, and return where each function is.

        No pass of the converter touches what the lowerings chose.
        Below iOS 18 a package has one function, so that there is a package for each, and each has its own weights.
        """
        if not stateful(self.system):
            written = {name: path.parent / package_name(name, False) for name in self.functions}
            for name, function in self.functions.items():
                self._save(written[name], {name: function}, contract, metadata)
            return written
        self._save(path, self.functions, contract, metadata)
        return dict.fromkeys(self.functions, path)

    def _save(
        self, path: Path, functions: Mapping[str, Function], contract: str, metadata: Mapping[str, str]
    ) -> None:
        whole = MilProgram()
        several = stateful(self.system)
        for name, function in functions.items():
            whole.add_function(name if several else "main", function)
        whole.default_function_name = next(iter(functions)) if several else "main"
        whole.skip_all_passes = True
        whole.export_as_multifunction = several
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = mil_convert(
                whole,
                convert_to="mlprogram",
                convert_from="milinternal",
                specification_version=SPECIFICATIONS[self.system],
                compute_units=ct.ComputeUnit.ALL,
                skip_model_load=True,
            )
        said = model.user_defined_metadata
        said[CONTRACT_KEY] = contract
        for key, value in metadata.items():
            said[key] = value
        model.save(str(path))
        _settle(path)


def _sweep(function: Function) -> None:
    """Take out what nothing reads: narrowed values that all readers take as they were, shapes in between."""
    for op in reversed(list(function.operations)):
        if op.op_type != "coreml_update_state" and not any(v.child_ops or v.consuming_blocks for v in op.outputs):
            function.remove_ops([op])


def _settle(path: Path) -> None:
    """Take out of a package what differs from one build to the next: the hour, drawn ids, the order of tables."""
    spec = path / "Data" / "com.apple.CoreML" / "model.mlmodel"
    model = Model_pb2.Model()
    model.ParseFromString(spec.read_bytes())
    for key in [k for k in model.description.metadata.userDefined if k.endswith("conversion_date")]:
        del model.description.metadata.userDefined[key]
    spec.write_bytes(model.SerializeToString(deterministic=True))
    manifest = json.loads((path / "Manifest.json").read_text(encoding="utf-8"))
    ids = {old: str(uuid5(NAMESPACE_URL, entry["path"])).upper() for old, entry in manifest["itemInfoEntries"].items()}
    entries = sorted((ids[old], entry) for old, entry in manifest["itemInfoEntries"].items())
    manifest["itemInfoEntries"] = dict(entries)
    manifest["rootModelIdentifier"] = ids[manifest["rootModelIdentifier"]]
    (path / "Manifest.json").write_text(json.dumps(manifest, indent=4) + "\n", encoding="utf-8")


def _input(b: Builder, node: Any) -> None:
    """Tokens and positions are read as they are; states by the op that reads them."""
    if node.name in ("tokens", "position") and node.name in b.inputs:
        b.put(node, Ref(b.inputs[node.name], b.dims_of(node)))


def _results(b: Builder, program: Program, outputs: tuple[Port, ...]) -> list[Ref]:
    """Whole states are written here, once for all blocks; then the outputs, under their names."""
    taps = [b.left[name] for name in sorted(b.left) if name.startswith("taps_")]
    whole: dict[str, Ref] = {}
    b.place("end")
    if taps:
        whole["taps"] = b.concat(taps, 0)
    if "engram_history" in b.left:
        history = b.left["engram_history"]
        whole["engram_history"] = b.reshape(history, history.dims[1:])
    if b.stateful:
        for name, value in whole.items():
            fused.write_state(b, name, value)
    last = next(n for n in program.graph.nodes if n.op == "output")
    named = dict(zip(program.outputs, last.args[0], strict=True))
    results = []
    for port in outputs:
        if port.name == "logits":
            value = b.reshape(b.ref(named[port.name]), port.shape)
        elif port.name.endswith("_next"):
            value = whole[port.name.removesuffix("_next")]
        else:
            value = b.left[port.name.removesuffix("_rows")]
        results.append(_named(b, value, port))
    return results


def _named(b: Builder, value: Ref, port: Port) -> Ref:
    """A value as an output: in the port's type, and called as it is."""
    if b.store.half and port.dtype == "float32":
        return b.ref_of(b.op("cast", x=value, dtype="fp32", name=port.name))
    return b.ref_of(b.op("identity", x=value, name=port.name))

