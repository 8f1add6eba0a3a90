"""A fused decode step run in torch, token by token, with the weights that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from needle_export.graph.program import CONSTANT, FxNode, Program, Weight


class Stepper:
    """One sequence through a decode program.

    Args:
        program: of one row, without probe heads.
        state: before the first token, by name.
    """

    def __init__(self, program: Program, state: Mapping[str, Tensor]) -> None:
        self.program = program
        self.state = {name: value.clone() for name, value in state.items()}
        self.position = 0
        self._run = _Interpreter(program)

    def step(self, token: int) -> tuple[Tensor, dict[int, Tensor]]:
        """One token: logits [V], and the stream behind each block [1, n, C]."""
        given: dict[str, Tensor] = {
            "tokens": torch.tensor([token]),
            "position": torch.tensor([self.position]),
            **self.state,
        }
        with torch.inference_mode():
            results, streams = self._run.call(given)
        named = dict(zip(self.program.outputs, results, strict=True))
        logits = named.pop("logits")
        self.state = {name.removesuffix("_next"): value for name, value in named.items()}
        self.position += 1
        return logits[0], streams

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Tokens [T] one after another; logits [T, V]."""
        return torch.stack([self.step(int(t))[0] for t in tokens]).numpy()


class _Interpreter(fx.Interpreter):
    """Runs a program and keeps its streams."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.program = program
        self.wanted = {node: index for index, node in program.streams.items()}
        self.streams: dict[int, Tensor] = {}

    def run_node(self, n: FxNode) -> Any:
        """A node's value, kept where it is a stream."""
        value = super().run_node(n)
        if n in self.wanted:
            self.streams[self.wanted[n]] = value
        return value

    def call(self, given: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        """Results and streams."""
        self.streams = {}
        weights = self.program.weights
        names = [n.name for n in self.program.graph.nodes if n.op == "placeholder"]
        results = self.run(*(weights[n].value if n in weights else given[n] for n in names))
        return tuple(results), self.streams


def round_floats(program: Program, kept: set[tuple[str, int]]) -> None:
    """Round a program's weights to half precision, but those of ``kept`` checkpoint tensors (name, layer).

    What no checkpoint tensor stands behind stays too: a runtime computes with that as it likes.
    """
    for name, weight in program.weights.items():
        value = weight.value
        if not value.is_floating_point() or all(p.role == CONSTANT for p in weight.parts):
            continue
        if value.dim() >= 2 and any((p.source, p.layer) in kept for p in weight.parts):
            continue
        program.weights[name] = Weight(weight.name, value.half().float(), weight.parts, weight.folded)
