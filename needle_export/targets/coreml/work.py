"""What the functions of a finished package have to do, op by op, as its program says.

Weights count as they are stored, and are multiplied in the type that the program declares: whether Core ML widens them
when it loads the package or as it reads them isn't known here. A cache is read whole: shapes are fixed. Letters: T new
positions, S rows of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from needle_export.errors import BadInput
from needle_export.measure.work import OpWork, Phase, Prompt, Work, gathered
from needle_export.targets.coreml import contract
from needle_export.targets.coreml.evaluate import load_package
from needle_export.targets.coreml.evaluate.describe import is_constant
from needle_export.targets.coreml.evaluate.spec import FunctionInfo, Op
from needle_export.targets.coreml.evaluate.types import TensorType
from needle_export.targets.coreml.host import Host
from needle_export.targets.coreml.session import read_contract
from needle_export.targets.ports import entry_name

#: Ops that give a value another name or other sizes, and move nothing.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "identity", "read_state", "write_state"})


def read_work(folder: Path, position: int, prompts: tuple[int, ...]) -> Work:
    """The work of an artifact; see :class:`targets.base.TellsWork`."""
    path = folder / contract.FILE_NAME
    if not path.is_dir():
        raise BadInput("this part of the artifact is missing", where=str(path), fix="build it again")
    package = load_package(path)
    host = Host(read_contract(package.metadata, path))
    caches = frozenset(s["port"] for s in host.contract["state"] if s["kind"] in ("keys", "values"))
    phases = {}
    for tokens in (1, *host.buckets):
        name = entry_name(tokens)
        if host.stateful:
            function = package.function(name)
        else:
            function = load_package(folder / contract.package_name(name, False)).function("main")
        phases[tokens] = _phase(name, function, tokens, caches)
    return Work(
        "coreml",
        position,
        phases[1],
        tuple(Prompt(n, tuple(phases[size] for _, size in host.plan(n))) for n in sorted(prompts)),
    )


def _phase(name: str, function: FunctionInfo, tokens: int, caches: frozenset[str]) -> Phase:
    types = {**function.inputs, **function.states}
    # Values of a head lie on the axis before the last.
    rows = max((types[cache].shape[-2] for cache in caches), default=0)
    return Phase(name, tokens, rows, gathered(_ops(function, set(caches))))


def _ops(function: FunctionInfo, state: set[str]) -> Iterator[OpWork]:
    types = {**function.inputs, **function.states}
    stored: dict[str, int] = {}
    for op in function.ops:
        types.update(op.outputs)
        made = [name for name, _ in op.outputs]
        names = [one for argument in op.inputs.values() for one in argument if isinstance(one, str)]
        if is_constant(op):
            stored[made[0]] = _stored(op, stored)
            continue
        if made and all(name in stored for name in names):
            stored.update((name, types[name].bytes) for name in made)
            continue
        writes = op.type == "slice_update" and op.inputs["x"][0] in state
        if op.type in _VIEWS or writes:
            state.update(made if any(name in state for name in names) else ())
        weights = held = moved = 0
        if writes:
            moved = 2 * types[_name(op, "update")].bytes
        elif op.type not in _VIEWS:
            table = _table(op, stored)
            weights = sum(stored.get(name, 0) for name in names if name != table)
            if table is not None:
                whole = types[table].shape
                weights += math.prod(types[_name(op, "indices")].shape) * stored[table] // whole[0]
            held = sum(types[name].bytes for name in names if name in state)
            moved = sum(types[n].bytes for n in (*names, *made) if n not in state and n not in stored)
        yield OpWork(op.type, 1, weights, held, moved, _macs(op, types), _dtype(op, types))


def _name(op: Op, parameter: str) -> str:
    name = op.inputs[parameter][0]
    assert isinstance(name, str), f"{parameter} of {op.name} is constant"
    return name


def _stored(op: Op, stored: dict[str, int]) -> int:
    """Bytes that a constant takes in the file, the numbers that its levels are scaled by among them."""
    total = 0
    for argument in op.inputs.values():
        for one in argument:
            if isinstance(one, str):
                total += stored[one]
            elif one.type.dtype != "string":
                total += one.type.bytes
    return total


def _table(op: Op, stored: dict[str, int]) -> str | None:
    """The constant that an op reads some rows of, or None."""
    table = op.inputs["x"][0] if op.type == "gather" else None
    return table if isinstance(table, str) and table in stored else None


def _macs(op: Op, types: dict[str, TensorType]) -> int:
    """Multiply-adds of a product, a convolution or an attention; 0 of what goes element by element."""
    if not op.outputs:
        return 0
    made = op.outputs[0][1]

    def shape(parameter: str) -> tuple[int, ...]:
        return types[_name(op, parameter)].shape

    if op.type == "linear":
        return made.elements * shape("weight")[-1]
    if op.type == "matmul":
        # [.., M, K] or, transposed, [.., K, M].
        return made.elements * math.prod(shape("x")[-2:]) // made.shape[-2]
    if op.type == "conv":
        return made.elements * math.prod(shape("weight")[1:])
    if op.type == "scaled_dot_product_attention":
        return (math.prod(shape("query")) + made.elements) * shape("key")[-2]
    return 0


def _dtype(op: Op, types: dict[str, TensorType]) -> str:
    """In what an op computes: the type of its result, or of what it compares or writes."""
    kinds = {kind.dtype for _, kind in op.outputs}
    kinds = kinds or {types[one].dtype for a in op.inputs.values() for one in a if isinstance(one, str)}
    return "fp16" if "float16" in kinds and "float32" not in kinds else "fp32"
