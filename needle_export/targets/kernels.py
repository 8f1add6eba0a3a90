"""Small graphs whose time tells how fast a runtime is on this machine, in words that every target can lower.

Dimension letters: T rows, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Width of matrices, and of everything else in a ``blocks`` graph: that of the published model's streams.
WIDTH = 768

#: Heads, keys and lanes of a ``blocks`` graph, and halves of iterations that balance its lanes.
_HEADS, _KEYS, _LANES, _HALVES = 12, 256, 4, 38


@dataclass(frozen=True)
class Kernel:
    """A graph to time.

    Attributes:
        kind: ``products``: matrices [D, D], each times the last one's result [T, D]. ``blocks``: the ops of a block of
            such a model in its proportions, three matrices among them. ``small``: one op of a few elements.
        dtype: of the matrices, one of ``measure.work.DTYPES``.
        count: of matrices or blocks.
        rows: T.
    """

    kind: str
    dtype: str = "fp32"
    count: int = 1
    rows: int = 1


@dataclass(frozen=True)
class Out:
    """A value of a graph: what the target calls it, and its sizes."""

    name: Any
    shape: tuple[int, ...]


class Chain(ABC):
    """A graph under construction; a target's own has a method for each thing that a block does.

    Values stay of the order of 1 however long the graph, as numbers near 0 would be slow on some processors.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.rng = np.random.default_rng(1)

    def build(self, x: Out) -> Out:
        """Append the whole kernel to its input [T, D]."""
        if self.kernel.kind == "small":
            return self.scaled(x)
        for _ in range(self.kernel.count):
            x = self.block(x) if self.kernel.kind == "blocks" else self.matrix(x)
        return x

    def block(self, x: Out) -> Out:
        """What a block does, with constants in the place of keys and values: [T, D]."""
        rows, half = x.shape[0], 32
        normed = self.norm(x)
        query = self.matrix(normed)
        heads = self.norm(self.reshaped(query, rows, _HEADS, WIDTH // _HEADS))
        seen = self.right(self.softmax(self.biased(self.right(heads, _KEYS))), WIDTH // _HEADS)
        written = self.matrix(self.gated(self.reshaped(seen, rows, WIDTH), query))
        x = self.added(x, self.norm(written))
        normed = self.norm(x)
        chosen = self.dense(self.softmax(self.dense(normed, 8)), half * half)
        mixed = self.left(self.right(self.reshaped(normed, rows, WIDTH // half, half), half), half)
        mixed = self.scaled(self.permuted(self.scaled(self.reshaped(mixed, rows, half * half))))
        mixed = self.reshaped(self.gelu(self.added(mixed, chosen)), rows, half, half)
        mixed = self.permuted(self.reshaped(self.left(self.right(mixed, half), half), rows, half * half))
        mixed = self.left(self.right(self.reshaped(mixed, rows, half, half), half), WIDTH // half)
        x = self.added(x, self.scaled(self.reshaped(mixed, rows, WIDTH)))
        square = rows, _LANES, _LANES
        gates, lanes = self.pieces(self.dense(self.norm(x), 2 * _LANES * _LANES), _LANES * _LANES)
        balanced = self.balanced(self.softmax(self.reshaped(lanes, *square)), _HALVES)
        joined = self.multiplied(balanced, self.reshaped(x, rows, _LANES, WIDTH // _LANES))
        joined = self.multiplied(self.scaled(self.reshaped(self.sigmoid(gates), *square)), joined)
        return self.matrix(self.norm(self.reshaped(joined, rows, WIDTH)))

    def random(self, *shape: int) -> NDArray[np.float32]:
        """Numbers with which a product over the first axis but the last, or the only one, keeps its size."""
        inner = shape[-2] if len(shape) > 1 else 1
        return self.rng.standard_normal(shape, np.float32) / np.float32(inner**0.5)

    @abstractmethod
    def matrix(self, x: Out) -> Out:
        """x [T, D] times a matrix of the kernel's type."""

    @abstractmethod
    def dense(self, x: Out, width: int) -> Out:
        """x [T, I] times a float32 matrix [I, width], and a bias."""

    @abstractmethod
    def right(self, x: Out, width: int) -> Out:
        """x [.., M, K] times a constant [K, width]."""

    @abstractmethod
    def left(self, x: Out, height: int) -> Out:
        """A constant [height, M] times x [T, M, K]."""

    @abstractmethod
    def multiplied(self, x: Out, y: Out) -> Out:
        """x [T, M, K] times y [T, K, N]."""

    @abstractmethod
    def norm(self, x: Out) -> Out:
        """x over its root mean square, times a vector."""

    @abstractmethod
    def softmax(self, x: Out) -> Out:
        """Over the last axis."""

    @abstractmethod
    def balanced(self, x: Out, halves: int) -> Out:
        """x [T, N, N] over its sums, of the last axis and the one before in turn."""

    @abstractmethod
    def scaled(self, x: Out) -> Out:
        """x times a vector."""

    @abstractmethod
    def biased(self, x: Out) -> Out:
        """x and a vector."""

    @abstractmethod
    def added(self, x: Out, y: Out) -> Out:
        """x and y."""

    @abstractmethod
    def sigmoid(self, x: Out) -> Out:
        """Element by element."""

    @abstractmethod
    def gated(self, x: Out, y: Out) -> Out:
        """x times the sigmoid of y."""

    @abstractmethod
    def gelu(self, x: Out) -> Out:
        """x times the sigmoid of x, as one op where there is one."""

    @abstractmethod
    def permuted(self, x: Out) -> Out:
        """The last axis in another order."""

    @abstractmethod
    def reshaped(self, x: Out, *shape: int) -> Out:
        """The same elements."""

    @abstractmethod
    def pieces(self, x: Out, first: int) -> tuple[Out, Out]:
        """The last axis cut in two."""
