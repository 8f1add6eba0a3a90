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

    def forward(self, tokens: Tensor, position: Tensor, count: list[Tensor], state: list[Tensor]) -> list[Tensor]:
        held = dict(zip(self.names, state, strict=True))
        logits, following, streams = self.model(tokens, position, held, *count)
        return [logits, *(following[n] for n in self.names), *streams]


class _FlatHead(nn.Module):
    """The end of a probe head with positional state."""

    def __init__(self, answer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = answer
        self.names = names

    def forward(self, state: list[Tensor]) -> list[Tensor]:
        return [self.model(dict(zip(self.names, state, strict=True)))]


def trace(
    step: nn.Module,
    state: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, str, int]],
    rows: int | None,
    max_rows: int,
    counted: bool = False,
) -> Program:
    """Trace one cached step.

    Args:
        step: module called as ``step(tokens [T], position [1], state) -> logits, next state, streams``.
        state: example state tensors, by name, in contract order.
        sources: for each parameter of ``step``, its checkpoint tensor, role and layer.
        rows: T, or None for a symbolic T in 2..max_rows.
        max_rows: the longest chunk a symbolic T may stand for.
        counted: whether the step also takes ``count`` [1], how many of the T tokens are real; it does where it feeds
            probe heads.
    """
    names = tuple(state)
    length = rows if rows is not None else min(_TRACE_ROWS, max_rows)
    tokens = torch.zeros(length, dtype=torch.int64)
    position = torch.zeros(1, dtype=torch.int64)
    count = [torch.ones(1, dtype=torch.int64)] if counted else []
    dynamic = None
    if rows is None:
        # A range of one value is no range to torch; nothing is ever fed at the upper one.
        dim = torch.export.Dim("T", min=2, max=max(3, max_rows))
        dynamic = ({0: dim}, None, [None] * len(count), [None] * len(names))
    example = (tokens, position, count, [v.clone() for v in state.values()])
    exported = _export(_Flat(step, names), example, dynamic)
    inputs = ("tokens", "position", *(["count"] if counted else []), *names)
    return _program(exported, inputs, ("logits", *(f"{n}_next" for n in names)), sources, rows)


def trace_head(
    answer: nn.Module, state: Mapping[str, Tensor], sources: Mapping[str, tuple[str, str, int]], name: str
) -> Program:
    """Trace the end of a probe head.

    Args:
        answer: module called as ``answer(state) -> [O]``.
        state: example tensors of the state that it reads, by name.
        sources: as for :func:`trace`.
        name: of the output.
    """
    names = tuple(state)
    exported = _export(_FlatHead(answer, names), ([v.clone() for v in state.values()],), None)
    return _program(exported, names, (name,), sources, 0)


def _export(module: nn.Module, example: tuple[object, ...], dynamic: object) -> torch.export.ExportedProgram:
    with torch.no_grad(), warnings.catch_warnings():
        # torch's own tree utilities deprecate themselves while exporting; nothing here can act on it.
        warnings.simplefilter("ignore", FutureWarning)
        return torch.export.export(
            module.eval(),
            example,
            dynamic_shapes=dynamic,  # type: ignore[arg-type]  # nested as the example is
            strict=False,
            # Stride arithmetic on a symbolic T yields tautologies that the guard solver can't prove.
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def _program(
    exported: torch.export.ExportedProgram,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
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
    renamed: dict[str, fx.Node] = {}
    for name, node in zip(inputs, users, strict=True):
        node.name = node.target = name  # placeholders answer to the contract's names from here on
        renamed[name] = node
    results = [remap[a] for a in next(n for n in exported.graph.nodes if n.op == "output").args[0]]
    count = len(outputs)
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
        outputs,
        rows,
        dict(enumerate(results[count:])),
    )
    program.sweep()
    program.graph.lint()
    return program
