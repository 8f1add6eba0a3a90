"""A fused step run in torch, with the weights that it holds: token by token, or in chunks where T is symbolic."""

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
        program: of one row, or of a symbolic number of rows (2 and more); without probe heads.
        state: before the first token, by name.
        max_chunk: the longest chunk of a symbolic program.
    """

    def __init__(self, program: Program, state: Mapping[str, Tensor], max_chunk: int = 1) -> None:
        self.program = program
        self.max_chunk = max_chunk if program.rows is None else 1
        self.state = {name: value.clone() for name, value in state.items()}
        self.position = 0
        self._run = _Interpreter(program)

    def step(self, token: int) -> tuple[Tensor, dict[int, Tensor]]:
        """One token: logits [V], and the stream behind each block [1, n, C]."""
        logits, streams = self.chunk(np.array([token]))
        return logits[0], streams

    def chunk(self, tokens: NDArray[np.int64]) -> tuple[Tensor, dict[int, Tensor]]:
        """Tokens [T] of one call: logits [T, V], and the stream behind each block [T, n, C]."""
        given: dict[str, Tensor] = {
            "tokens": torch.from_numpy(np.asarray(tokens, np.int64)),
            "position": torch.tensor([self.position]),
            **self.state,
        }
        with torch.inference_mode():
            results, streams = self._run.call(given)
        named = dict(zip(self.program.outputs, results, strict=True))
        logits = named.pop("logits")
        self.state = {name.removesuffix("_next"): value for name, value in named.items()}
        self.position += len(tokens)
        return logits, streams

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Tokens [T] in as few calls as the program takes; logits [T, V]."""
        return torch.cat([self.chunk(piece)[0] for piece in self.pieces(tokens)]).numpy()

    def pieces(self, tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Chunks that the program takes: none of a single token where T is symbolic."""
        found, start = [], 0
        while start < len(tokens):
            size = min(self.max_chunk, len(tokens) - start)
            if self.program.rows is None and len(tokens) - start - size == 1:
                size -= 1
            found.append(tokens[start : start + size])
            start += size
        return found


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
