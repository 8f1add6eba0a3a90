"""Find a pattern in a program, prove the find by running it, and say why a place is refused.

Structure is matched from the pattern's first output backwards. Integers and sizes are not compared
while matching, because a symbolic T makes them expressions; instead every find is proved: the matched
nodes and the fused op are run on the same random inputs and must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from needle_export.graph.ops import op
from needle_export.graph.patterns import Pattern
from needle_export.graph.program import FxNode, Program

#: T of the proof where a program's T is symbolic.
PROOF_ROWS = 5

#: How many of a proof's positions are real where padding may follow.
PROOF_COUNT = 3


@dataclass
class Match:
    """A place where a pattern stands: its inputs, attributes and outputs as nodes of the program."""

    pattern: Pattern
    inputs: dict[str, FxNode]
    outputs: list[FxNode]
    attributes: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the fused op, in schema order."""
        values = {**self.inputs, **self.attributes}
        return tuple(values[n] for n in self.pattern.order)


class Refused(Exception):
    """Why a place isn't what the pattern says; ``depth`` is how many nodes matched before that showed."""

    depth = 0


@dataclass
class _Binding:
    nodes: dict[FxNode, FxNode] = field(default_factory=dict)
    open: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> _Binding:
        return _Binding(dict(self.nodes), dict(self.open))


def find(program: Program, pattern: Pattern, graph: fx.Graph, anchor: FxNode) -> Match:
    """Match a pattern whose first output is ``anchor``.

    Raises:
        Refused: with the reason.
    """
    roots = _roots(graph)
    binding = _Binding()
    try:
        _match(roots[0], anchor, pattern, binding)
    except Refused as refusal:
        refusal.depth = len(binding.nodes)
        raise
    reason = "its further results are not in the graph"
    for complete in _complete(program, roots, pattern, binding):
        match = _assemble(pattern, graph, roots, complete)
        try:
            prove(program, match)
        except Refused as refusal:
            reason = str(refusal)
            continue
        return match
    refused = Refused(reason)
    refused.depth = len(binding.nodes)
    raise refused


def _roots(graph: fx.Graph) -> list[FxNode]:
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    return list(result)


def _match(pattern_node: FxNode, node: Any, pattern: Pattern, binding: _Binding) -> None:
    if pattern_node in binding.nodes:
        if binding.nodes[pattern_node] is not node:
            raise Refused(f"{_name(node)} is not the value that {pattern_node.name} already stands for")
        return
    if pattern_node.op == "placeholder":
        if not isinstance(node, fx.Node):
            raise Refused(f"input {pattern_node.meta['input']} is a literal")
        binding.nodes[pattern_node] = node
        return
    if not isinstance(node, fx.Node) or node.op != pattern_node.op or node.target != pattern_node.target:
        raise Refused(f"{_name(node)} where the pattern has {pattern_node.target}")
    if len(node.args) != len(pattern_node.args) or set(node.kwargs) != set(pattern_node.kwargs):
        raise Refused(f"{node.name} has other arguments than the pattern")
    binding.nodes[pattern_node] = node
    for a, b in zip(pattern_node.args, node.args, strict=True):
        _match_argument(a, b, pattern, binding)
    for key, a in pattern_node.kwargs.items():
        _match_argument(a, node.kwargs[key], pattern, binding)


def _match_argument(a: Any, b: Any, pattern: Pattern, binding: _Binding) -> None:
    if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), Tensor):
        _match(a, b, pattern, binding)
    elif isinstance(a, (list, tuple)):
        if not isinstance(b, (list, tuple)) or len(a) != len(b):
            raise Refused("an argument list differs in length")
        for x, y in zip(a, b, strict=True):
            _match_argument(x, y, pattern, binding)
    elif isinstance(a, fx.Node) or (isinstance(a, int) and not isinstance(a, bool)):
        _bind_open(a, b, pattern, binding)  # sizes and indices: the proof compares them
    elif isinstance(a, float):
        _bind_open(a, b, pattern, binding)
    elif a != b:
        raise Refused(f"an argument is {b!r} where the pattern has {a!r}")


def _bind_open(a: Any, b: Any, pattern: Pattern, binding: _Binding) -> None:
    for name, sentinel in pattern.open.items():
        if not isinstance(a, fx.Node) and a == sentinel:
            if binding.open.setdefault(name, b) != b:
                raise Refused(f"{name} has two values")
            return


def _complete(program: Program, roots: list[FxNode], pattern: Pattern, binding: _Binding) -> Iterator[_Binding]:
    """All ways to bind the outputs that the first output's cone doesn't hold."""
    missing = next((r for r in roots if r not in binding.nodes), None)
    if missing is None:
        yield binding
        return
    taken = set(binding.nodes.values())
    for node in program.nodes(missing.target):
        if node in taken:
            continue
        trial = binding.copy()
        try:
            _match(missing, node, pattern, trial)
        except Refused:
            continue
        yield from _complete(program, roots, pattern, trial)


def _assemble(pattern: Pattern, graph: fx.Graph, roots: list[FxNode], binding: _Binding) -> Match:
    inputs = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node not in binding.nodes:
                raise Refused(f"input {node.meta['input']} is not used")
            inputs[node.meta["input"]] = binding.nodes[node]
    shapes = {k: n.meta["val"] for k, n in inputs.items()}
    attributes = {**pattern.fixed, **binding.open, **pattern.infer(shapes)}
    return Match(pattern, inputs, [binding.nodes[r] for r in roots], attributes)


def prove(program: Program, match: Match) -> None:
    """Run the matched nodes and the fused op on random inputs.

    Raises:
        Refused: they differ, or the op can't run on them.
    """
    generator = torch.Generator().manual_seed(0)
    rows, position = _proof_point(match)
    told = {"position": torch.tensor([position]), "count": torch.tensor([PROOF_COUNT])}
    values = {
        name: told[name] if name in told else _sample(program, node, generator, rows)
        for name, node in match.inputs.items()
    }
    environment: dict[FxNode, Any] = {match.inputs[k]: v for k, v in values.items()}
    with torch.inference_mode():
        expected = [_run(program, n, environment, rows) for n in match.outputs]
        arguments = [values.get(n, match.attributes.get(n)) for n in match.pattern.order]
        try:
            fused = op(match.pattern.op)(*arguments)
        except (RuntimeError, IndexError) as fault:
            raise Refused(f"the fused op refuses its inputs: {fault}") from fault
    results = [fused] if isinstance(fused, Tensor) else list(fused)
    for want, got in zip(expected, results, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype or not torch.equal(want, got):
            raise Refused("run on random inputs, it does not compute what the op computes")


def _proof_point(match: Match) -> tuple[int, int]:
    """T and the position of a proof: such that a ring wraps, and a full cache has room."""
    if "k_cache" not in match.inputs:
        return PROOF_ROWS, 2
    size = int(match.inputs["k_cache"].meta["val"].shape[0])
    rows = min(PROOF_ROWS, size)
    return rows, size + 1 if match.attributes["ring"] else min(2, size - rows)


def concrete(value: Any, rows: int) -> int:
    """A size as a number: the symbolic T becomes ``rows``."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, rows)))


def _sample(program: Program, node: FxNode, generator: torch.Generator, rows: int) -> Tensor:
    weight = program.weight_of(node)
    if weight is not None:
        return weight.value
    fake = node.meta["val"]
    shape = [concrete(d, rows) for d in fake.shape]
    if fake.dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 64, shape, generator=generator, dtype=fake.dtype)


def _run(program: Program, node: FxNode, environment: dict[FxNode, Any], rows: int) -> Any:
    """Evaluate one node from an environment, depth first; iterative, as a Sinkhorn is 80 nodes deep."""
    stack = [node]
    while stack:
        current = stack[-1]
        if current in environment:
            stack.pop()
            continue
        value = current.meta.get("val")
        if value is not None and not isinstance(value, (Tensor, tuple, list)):
            environment[current] = concrete(value, rows)
            continue
        weight = program.weight_of(current)
        if weight is not None:
            environment[current] = weight.value
            continue
        if current.op == "placeholder":
            raise Refused(f"it also reads {current.name}")
        pending = [n for n in current.all_input_nodes if n not in environment]
        if pending:
            stack.extend(pending)
            continue
        args, kwargs = fx.map_arg((current.args, current.kwargs), environment.__getitem__)
        environment[current] = current.target(*args, **kwargs)
    return environment[node]


def _name(node: Any) -> str:
    return f"{node.name} ({node.target})" if isinstance(node, fx.Node) else repr(node)
