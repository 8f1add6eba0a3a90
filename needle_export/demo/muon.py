"""Muon, an optimiser for matrices: momentum, and then the nearest matrix whose singular values are all the same.

Source of the method: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. torch has
it for single matrices in bfloat16; a checkpoint holds one stack a kind, whose matrices are treated together here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: Coefficients of the odd polynomial that pushes singular values towards 1, from the source.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Updates stacks of matrices [..., I, O].

    Args:
        rate: of the update, whose root mean square is about that of an orthogonal matrix.
        momentum: of the gradient's running sum, looked ahead as Nesterov does.
        decay: of the weights, times the rate.
    """

    def __init__(self, parameters: Iterable[Tensor], rate: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, no loss
        """One update from the gradients."""
        for part in self.param_groups:
            for weight in part["params"]:
                if weight.grad is None:
                    continue
                held = self.state[weight].setdefault("sum", torch.zeros_like(weight))
                held.lerp_(weight.grad, 1 - part["momentum"])
                ahead = weight.grad.lerp(held, part["momentum"])
                rows, columns = weight.shape[-2:]
                weight.mul_(1 - part["lr"] * part["decay"])
                weight.sub_(orthogonal(ahead), alpha=part["lr"] * max(1.0, columns / rows) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices [..., I, O] with their singular vectors and singular values near 1, by Newton and Schulz's iteration."""
    x = matrices.transpose(-1, -2) if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-12)
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(-1, -2)
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    out: Tensor = x.transpose(-1, -2) if matrices.shape[-2] > matrices.shape[-1] else x
    return out
