"""A traced model between passes: an FX graph, the weights behind its placeholders, and their provenance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

#: An FX node, dynamically typed: FX declares a node's arguments as a union too wide to use, and every pass and
#: lowering knows the arguments of the op that it asked for.
FxNode = Any

#: The role of values that no checkpoint tensor stands behind (a vector of ones, rotary frequencies).
CONSTANT = "constant"


@dataclass(frozen=True)
class Part:
    """A share of a weight's elements and where it comes from.

    Attributes:
        source: the checkpoint tensor's name, or a constant's.
        role: one of the checkpoint's roles, or ``constant``.
        layer: block index, or -1.
        elements: how many elements of the weight.
    """

    source: str
    role: str
    layer: int
    elements: int


@dataclass(frozen=True)
class Weight:
    """A constant of the program and what it is made of.

    Attributes:
        folded: arithmetic went into it, so that it is no longer a checkpoint tensor's values.
        codes: of a weight in codebook form, ``weights.codes.Codes`` of each matrix that it stacks; its value is then
            without their rotation.
        made: that arithmetic, where a pass has noted it.
        uncoded: why it has none where its scheme is one of codes, or empty.
    """

    name: str
    value: Tensor
    parts: tuple[Part, ...]
    folded: bool = False
    codes: tuple[Any, ...] = ()
    made: Made | None = None
    uncoded: str = ""


@dataclass(frozen=True)
class Made:
    """How a folded weight follows from others: a target can store those and leave the arithmetic to its runtime.

    Attributes:
        target: the ATen op: add, mul, sub, div, sigmoid, cat or expand.
        operands: its arguments in order, weights and numbers; of cat, the pieces.
    """

    target: object
    operands: tuple[Any, ...]


@dataclass
class Program:
    """One traced step and everything a target needs to lower it.

    Attributes:
        module: the FX graph; placeholders are weights and user inputs, in any order.
        weights: by placeholder name.
        inputs: user inputs in the order of the contract (``tokens``, ``position``, ``count`` where the step feeds probe
            heads, state); of a probe head's end, the state that it reads.
        outputs: names of the results, in order (``logits``, next state); of a probe head's end, its name.
        rows: positions a call takes, or None when T is symbolic; 0 for a probe head's end.
        streams: graph nodes that hold the stream after each block, for finding a faulty layer.
    """

    module: fx.GraphModule
    weights: dict[str, Weight]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rows: int | None
    streams: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    def nodes(self, target: object) -> list[FxNode]:
        """All call nodes of one target, in graph order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target is target]

    def weight_of(self, node: object) -> Weight | None:
        """The weight behind a node, or None."""
        if isinstance(node, fx.Node) and node.op == "placeholder":
            return self.weights.get(node.name)
        return None

    def add_weight(self, weight: Weight) -> FxNode:
        """Put a new weight before everything else and return its placeholder."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(_identifier(weight.name))
        node.meta["val"] = weight.value
        self.weights[node.name] = weight
        return node

    def call(self, before: fx.Node, target: object, args: tuple[object, ...], like: fx.Node) -> FxNode:
        """Insert ``target(*args)`` before a node, with shapes computed and module paths copied from ``like``."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)  # type: ignore[arg-type]  # fx.Argument is not exported
        for key in ("nn_module_stack", "layer"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        node.meta["val"] = evaluate_fake(node)
        return node

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a result; of a program whose T is a number."""
        results = next(n for n in self.graph.nodes if n.op == "output").args[0]
        value = dict(zip(self.outputs, results, strict=True))[name].meta["val"]
        return tuple(int(d) for d in value.shape)

    def sweep(self) -> int:
        """Remove what nothing reads, unread weights included; returns how many nodes went."""
        gone = 0
        for node in reversed(list(self.graph.nodes)):
            if node.users or node.op == "output" or node.name in self.inputs:
                continue
            self.weights.pop(node.name, None)
            self.streams = {k: v for k, v in self.streams.items() if v is not node}
            self.graph.erase_node(node)
            gone += 1
        return gone

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Execute the graph in torch with the user inputs in contract order."""
        values = dict(zip(self.inputs, inputs, strict=True))
        placeholders = (n.name for n in self.graph.nodes if n.op == "placeholder")
        args = [self.weights[p].value if p in self.weights else values[p] for p in placeholders]
        with torch.inference_mode():
            result = fx.Interpreter(self.module).run(*args)
        return tuple(result)


def layer_of(node: fx.Node) -> int:
    """The block a node was traced in, or -1."""
    if "layer" in node.meta:
        return int(node.meta["layer"])
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        match = re.search(r"layers\.(\d+)", path)
        if match:
            return int(match.group(1))
    return -1


def evaluate_fake(node: fx.Node) -> object:
    """The node's result on its arguments' fake values (shapes and dtypes, no data)."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def fake(arg: object) -> object:
        return arg.meta["val"] if isinstance(arg, fx.Node) else arg

    args = fx.map_arg(node.args, fake)  # type: ignore[arg-type]  # map_arg accepts any callable at run time
    mode = next((a.fake_mode for a in _flatten(args) if isinstance(a, FakeTensor)), None) or FakeTensorMode()
    with mode:
        mode.allow_non_fake_inputs = True
        return node.target(*args, **node.kwargs)  # type: ignore[operator]  # call_function targets are callable


def _flatten(args: object) -> Iterator[object]:
    if isinstance(args, (tuple, list)):
        for a in args:
            yield from _flatten(a)
    else:
        yield args


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
