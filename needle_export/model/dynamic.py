"""The reference model with weights and arithmetic as a runtime has them under a quantised scheme.

A runtime that multiplies int8 weights quantises the input of each product as it arrives. What that costs is the
scheme's; what an artifact adds to it is the artifact's. To tell the two apart, an artifact is held against the
reference computing the same way: weights rounded, and every product with a quantised matrix done in integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from needle_export.weights.int8 import Activations, dequantize_rows, dynamic_linear, quantize_rows

#: Sources whose rows are read one by one. The others are kernels [.., I, O]: what is stored as a row is a column.
_TABLES = ("embedding/embedding", "engrams/embedding")

Quantized = tuple[Tensor, Tensor]


class DynamicProducts(TorchFunctionMode):
    """While active, products with quantised parameters are computed as the runtime does.

    Args:
        matrices: by address of the parameter: one (values [O, I], scales [O]) for each matrix that it stacks.
        activations: which kernel's rounding.
        jitter: if given, every input of such a product first moves by a unit in the last place of its row's greatest
            value, up or down at random: what another order of summing does, at the least.
    """

    def __init__(
        self,
        matrices: Mapping[int, list[Quantized]],
        activations: Activations,
        jitter: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.matrices = matrices
        self.activations = activations
        self.jitter = jitter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace matmul with a quantised parameter on the right, and linear with one as weight."""
        if func in (torch.matmul, nn.functional.linear) and isinstance(args[1], Tensor):
            found = self.matrices.get(args[1].data_ptr())
            if found is not None:
                x, weight = args[:2]
                rows = weight.shape[0] if func is nn.functional.linear else weight.shape[-1]
                with torch._C.DisableTorchFunction():
                    return self._product(x, found, int(rows))
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, matrices: list[Quantized], rows: int) -> Tensor:
        if self.jitter is not None:
            unit = x.abs().amax(-1, keepdim=True) * 2.0**-23
            x = x + unit * (2 * torch.randint(0, 2, x.shape, generator=self.jitter) - 1)
        results = [
            dynamic_linear(x if len(matrices) == 1 else x[i], values[:rows], scales[:rows], None, self.activations)
            for i, (values, scales) in enumerate(matrices)
        ]
        return results[0] if len(results) == 1 else torch.stack(results)


def matrices_of(source: str, value: Tensor) -> list[Tensor]:
    """The matrices [O, I] that a parameter of a checkpoint tensor holds, with what is stored as a row for a row; views.

    Args:
        value: [I, O], or [S, I, O] for the matrices of S sites; of a table, [O, I].
    """
    stacked = value if value.dim() == 3 else value.unsqueeze(0)
    return [m if source in _TABLES else m.t() for m in stacked]


def quantize_parameters(
    parameters: Iterable[tuple[str, Tensor]],
    sources: Mapping[str, tuple[str, str, int]],
    wanted: set[tuple[str, int]],
) -> dict[int, list[Quantized]]:
    """Round parameters in place to what their int8 form stands for.

    Args:
        parameters: (path, tensor) of a step.
        sources: for each path: checkpoint tensor, role, layer.
        wanted: (checkpoint tensor, layer) to quantise.

    Returns:
        By address: the int8 matrices, for :class:`DynamicProducts`.
    """
    matrices: dict[int, list[Quantized]] = {}
    for path, value in parameters:
        source = sources.get(path)
        if source is None or (source[0], source[2]) not in wanted:
            continue
        quantized = [quantize_rows(m.contiguous()) for m in matrices_of(source[0], value)]
        rounded = [dequantize_rows(*q) if source[0] in _TABLES else dequantize_rows(*q).t() for q in quantized]
        value.copy_(torch.stack(rounded).reshape(value.shape))
        matrices[value.data_ptr()] = quantized
    return matrices
