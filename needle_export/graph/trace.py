"""From the reference model to a traced program (torch.export, no decomposition)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from needle_export.graph.program import CONSTANT, Part, Program, Weight, layer_of

#: What a traced T is called, and the length it is traced at; the length leaves no trace in the graph.
_TRACE_ROWS = 7


class _Flat(nn.Module):
    """A step with positional state, as export wants it."""

    def __init__(self, step: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = step
        self.names = names

    def forward(self, tokens: Tensor, position: Tensor, state: list[Tensor]) -> list[Tensor]:
        logits, following, streams = self.model(tokens, position, dict(zip(self.names, state, strict=True)))
        return [logits, *(following[n] for n in self.names), *streams]


def trace(
    step: nn.Module,
    state: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, str, int]],
    rows: int | None,
    max_rows: int,
) -> Program:
    """Trace one cached step.

    Args:
        step: module called as ``step(tokens [T], position [1], state) -> logits, next state, streams``.
        state: example state tensors, by name, in contract order.
        sources: for each parameter of ``step``, its checkpoint tensor, role and layer.
        rows: T, or None for a symbolic T in 2..max_rows.
        max_rows: the longest chunk a symbolic T may stand for.
    """
    names = tuple(state)
    length = rows if rows is not None else min(_TRACE_ROWS, max_rows)
    tokens = torch.zeros(length, dtype=torch.int64)
    position = torch.zeros(1, dtype=torch.int64)
    dynamic = None
    if rows is None:
        # A range of one value is no range to torch; nothing is ever fed at the upper one.
        dim = torch.export.Dim("T", min=2, max=max(3, max_rows))
        dynamic = ({0: dim}, None, [None] * len(names))
    module = _Flat(step, names).eval()
    with torch.no_grad(), warnings.catch_warnings():
        # torch's own tree utilities deprecate themselves while exporting; nothing here can act on it.
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(
            module,
            (tokens, position, [v.clone() for v in state.values()]),
            dynamic_shapes=dynamic,
            strict=False,
            # Stride arithmetic on a symbolic T yields tautologies that the guard solver can't prove.
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    return _program(exported, names, sources, rows)


def _program(
    exported: torch.export.ExportedProgram,
    names: tuple[str, ...],
    sources: Mapping[str, tuple[str, str, int]],
    rows: int | None,
) -> Program:
    signature = exported.graph_signature
    behind = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = {**dict(exported.named_parameters()), **dict(exported.named_buffers()), **exported.constants}
    graph = fx.Graph()
    remap: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(exported.graph, remap)
    weights: dict[str, Weight] = {}
    users: list[fx.Node] = []
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        copy = remap[node]
        if node.name in behind or node.name in signature.inputs_to_lifted_tensor_constants:
            path = behind.get(node.name) or signature.inputs_to_lifted_tensor_constants[node.name]
            value = tensors[path].detach()
            source, role, layer = sources.get(path.removeprefix("model."), (path, CONSTANT, -1))
            parts = (Part(source, role, layer, value.numel()),)
            weights[copy.name] = Weight(path.removeprefix("model."), value, parts)
        else:
            users.append(copy)
    inputs = ("tokens", "position", *names)
    renamed: dict[str, fx.Node] = {}
    for name, node in zip(inputs, users, strict=True):
        node.name = node.target = name  # placeholders answer to the contract's names from here on
        renamed[name] = node
    results = [remap[a] for a in next(n for n in exported.graph.nodes if n.op == "output").args[0]]
    count = 1 + len(names)
    graph.output(tuple(results[:count]))
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("aten._assert_"):
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["layer"] = layer_of(node)
    program = Program(
        fx.GraphModule(nn.Module(), graph),
        weights,
        inputs,
        ("logits", *(f"{n}_next" for n in names)),
        rows,
        dict(enumerate(results[count:])),
    )
    program.sweep()
    program.graph.lint()
    return program
