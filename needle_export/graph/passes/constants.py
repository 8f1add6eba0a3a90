"""Evaluate what depends on weights alone, and keep one copy of equal constants."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from needle_export.graph.passes.base import Fired
from needle_export.graph.program import CONSTANT, FxNode, Made, Part, Program, Weight

aten = torch.ops.aten

#: Larger results stay in the graph: folding would store a second copy of a large tensor.
MAX_ELEMENTS = 1 << 20

_ARITHMETIC = {aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.sigmoid.default}
_LAYOUT = {aten.cat.default}


def fold_constants(program: Program) -> Fired:
    """Replace arithmetic and concatenation on weights by their results, once; chains fold in order."""
    fired = Fired()
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target not in _ARITHMETIC | _LAYOUT:
            continue
        inputs = [program.weight_of(n) for n in node.all_input_nodes]
        known = [w for w in inputs if w is not None]
        if len(known) != len(inputs) or not known or sum(w.value.numel() for w in known) > MAX_ELEMENTS:
            continue
        args = fx.map_arg(node.args, lambda n: program.weights[n.name].value)
        value = node.target(*args, **node.kwargs)
        layout = node.target in _LAYOUT
        parts = tuple(p for w in known for p in w.parts) if layout else derived_parts(value, known)
        folded = not layout or any(w.folded for w in known)
        operands = tuple(program.weights[a.name] if isinstance(a, fx.Node) else a for a in node.args)
        made = None if layout else Made(node.target, operands)
        name = f"{known[0].name}.{node.name}"
        if layout and not folded and len({w.name.rpartition(".")[0] for w in known}) == 1:
            # Their values lie beside each other as they are, and the name says whose.
            name = "+".join([known[0].name, *(w.name.rpartition(".")[2] for w in known[1:])])
        replacement = program.add_weight(Weight(name, value, parts, folded, made=made))
        node.replace_all_uses_with(replacement)
        fired.add("fold_constants")
    program.sweep()
    return fired


def derived_parts(value: Tensor, inputs: Sequence[Weight]) -> tuple[Part, ...]:
    """Provenance of a value computed from weights: the largest one's, never a bare constant's if avoidable."""
    owner = max(inputs, key=lambda w: (w.parts[0].role != CONSTANT, w.value.numel()))
    if owner.value.numel() == value.numel():
        return owner.parts
    first = owner.parts[0]
    return (Part(first.source, first.role, first.layer, value.numel()),)


def share_constants(program: Program) -> Fired:
    """Let equal small constants (vectors of ones, permutations) be one."""
    fired = Fired()
    seen: dict[tuple[str, tuple[int, ...], bytes], FxNode] = {}
    for node in list(program.graph.nodes):
        weight = program.weight_of(node)
        if weight is None or any(p.role not in (CONSTANT, "mixing") for p in weight.parts):
            continue
        if weight.value.numel() > MAX_ELEMENTS:
            continue
        digest = hashlib.sha256(weight.value.contiguous().numpy().tobytes()).digest()
        key = (str(weight.value.dtype), tuple(weight.value.shape), digest)
        if key in seen:
            node.replace_all_uses_with(seen[key])
            fired.add("share_constants")
        else:
            seen[key] = node
    program.sweep()
    return fired


def drop_identities(program: Program) -> Fired:
    """Remove ops that return their input (aliases)."""
    fired = Fired()
    for node in program.nodes(aten.alias.default):
        node.replace_all_uses_with(node.args[0])
        fired.add("drop_identities")
    program.sweep()
    return fired
