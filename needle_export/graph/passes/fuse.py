"""Replace each place where a fused op's reference stands by the op."""

from __future__ import annotations

import operator

from needle_export.graph.match import Match, Refused, find
from needle_export.graph.ops import op
from needle_export.graph.passes.base import Fired, Left
from needle_export.graph.patterns import Pattern
from needle_export.graph.program import FxNode, Program, layer_of


def fuse(program: Program, pattern: Pattern) -> Fired:
    """Fuse every match of one pattern.

    Every node like the pattern's last is a candidate, and most are something else; of those refused, the
    one that went furthest in each layer is listed.
    """
    fired = Fired()
    nearest: dict[int, tuple[int, Left]] = {}
    graph = pattern.trace(program.rows)
    root = next(n for n in graph.nodes if n.op == "output").args[0][0]
    for anchor in program.nodes(root.target):
        if not anchor.users:
            continue
        try:
            match = find(program, pattern, graph, anchor)
        except Refused as refusal:
            layer = layer_of(anchor)
            if refusal.depth > nearest.get(layer, (0, None))[0]:
                nearest[layer] = (refusal.depth, Left(pattern.op, layer, anchor.name, str(refusal)))
            continue
        _replace(program, match)
        fired.add(pattern.op, layer=layer_of(match.outputs[0]))
    fired.left = [left for _, left in nearest.values()]
    program.sweep()
    return fired


def _replace(program: Program, match: Match) -> None:
    # The fused node must come after its inputs and before every reader of its outputs. Inputs are known
    # before the last of them; a reader may stand between two outputs, so take the place behind the inputs.
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    last_input = max(match.inputs.values(), key=order.__getitem__)
    # Weights stand at the top; behind a placeholder the first call is the earliest place.
    place = last_input.next
    while place.op == "placeholder":
        place = place.next
    fused = program.call(place, op(match.pattern.op), match.arguments(), like=match.outputs[0])
    fused.meta["layer"] = layer_of(match.outputs[0])
    if len(match.outputs) == 1:
        replacements = [fused]
    else:
        replacements = [
            program.call(place, operator.getitem, (fused, i), like=match.outputs[0]) for i in range(len(match.outputs))
        ]
    for old, new in zip(match.outputs, replacements, strict=True):
        old.replace_all_uses_with(new)
        _move_streams(program, old, new)


def _move_streams(program: Program, old: FxNode, new: FxNode) -> None:
    for index, node in program.streams.items():
        if node is old:
            program.streams[index] = new
