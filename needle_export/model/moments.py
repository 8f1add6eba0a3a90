"""What the inputs of the reference's products look like: their second moments over calibration sequences.

Dimension letters: I inputs of a product, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from needle_export.model.network import Needle


@dataclass(eq=False)
class Moment:
    """Inputs of one product, or of several that take the same ones.

    Attributes:
        matrix: the sum of x x^T, float32 [I, I].
        count: how many x there were; None for a matrix that is no sum over samples.
    """

    matrix: Tensor
    count: int | None
    # The last inputs, to know them again when the next product takes the same; and how many there were.
    last: Tensor | None = None
    calls: int = 0

    def add(self, x: Tensor) -> None:
        """Add inputs [..., I], unless they are the very ones that were added last."""
        if x is self.last:
            return
        flat = x.reshape(-1, x.shape[-1]).float()
        self.matrix.addmm_(flat.t(), flat)
        self.count = (self.count or 0) + len(flat)
        self.last, self.calls = x, self.calls + 1


class Moments(TorchFunctionMode):
    """While active, adds up the inputs of products with the given parameters.

    Products that always take the same inputs, as a block's projections of queries, keys, values and gate do, share one
    moment: that saves time, memory, and later their decomposition.

    Args:
        parameters: on the right of ``matmul``, or weights of ``linear``; known by their address, so that a part of the
            rows from the first on counts as the parameter.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._found: dict[int, list[Moment] | None] = {p.data_ptr(): None for p in parameters}
        self._rows: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch matmul and linear; everything is computed as it would be."""
        if func in (torch.matmul, nn.functional.linear) and isinstance(args[1], Tensor):
            x, weight = args[:2]
            with torch._C.DisableTorchFunction():
                if weight.data_ptr() in self._found:
                    self._add(weight.data_ptr(), x, weight)
                    rows = weight.shape[0] if func is nn.functional.linear else weight.shape[-1]
                    self._rows[weight.data_ptr()] = max(self._rows.get(weight.data_ptr(), 0), int(rows))
        return func(*args, **(kwargs or {}))

    def _add(self, address: int, x: Tensor, weight: Tensor) -> None:
        moments = self._found[address]
        if weight.dim() == 3:
            # A product for each of the stacked matrices, with inputs of its own.
            if moments is None:
                moments = self._found[address] = self._shared(x) or [_empty(x) for _ in weight]
            if moments[0].last is x:
                return
            for moment, inputs in zip(moments, x, strict=True):
                moment.add(inputs)
                moment.last = x
            return
        if moments is None:
            moments = self._found[address] = self._shared(x) or [_empty(x)]
        moments[0].add(x)

    def _shared(self, x: Tensor) -> list[Moment] | None:
        """The moments of another parameter whose first inputs these are."""
        return next((m for m in self._found.values() if m is not None and m[0].last is x and m[0].calls == 1), None)

    def of(self, parameter: Tensor) -> list[Moment] | None:
        """The moments of a parameter, one for each matrix that it stacks; None if it took part in no product."""
        return self._found.get(parameter.data_ptr())

    def moved(self, net: nn.Module, other: nn.Module) -> Moments:
        """The same moments for the parameters of a copy of the network that they were gathered from."""
        pairs = list(zip(net.parameters(), other.parameters(), strict=True))
        moved = Moments(theirs for _, theirs in pairs)
        moved._found = {b.data_ptr(): self._found.get(a.data_ptr()) for a, b in pairs}
        moved._rows = {b.data_ptr(): self.rows(a) for a, b in pairs}
        return moved

    def rows(self, parameter: Tensor) -> int:
        """How many outputs of a parameter products had, from the first on."""
        return self._rows.get(parameter.data_ptr(), 0)


def _empty(x: Tensor) -> Moment:
    return Moment(torch.zeros(x.shape[-1], x.shape[-1]), 0)


def gather(net: Needle, parameters: Iterable[Tensor], sequences: Iterable[Tensor]) -> Moments:
    """Moments of the inputs that parameters of a network meet in sequences of tokens, [T] int64 each."""
    moments = Moments(parameters)
    with torch.inference_mode(), moments:
        for tokens in sequences:
            net(tokens.unsqueeze(0))
    return moments
