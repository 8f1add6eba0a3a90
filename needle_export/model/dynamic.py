"""The reference model with weights and arithmetic as a runtime has them under a quantised scheme.

A runtime that multiplies integer weights quantises the input of each product as it arrives. What that costs is the
scheme's; what an artifact adds to it is the artifact's. To tell the two apart, an artifact is held against the
reference computing the same way: weights rounded, and every product with a quantised matrix done in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from needle_export.weights import int8
from needle_export.weights.forms import Form
from needle_export.weights.linear import dynamic_blocks, dynamic_row_blocks
from needle_export.weights.scheme import Activations, Scheme

#: Sources whose rows are read one by one. The others are kernels [.., I, O]: what is stored as a row is a column.
_TABLES = ("embedding/embedding", "engrams/embedding")


class Quantized(Protocol):
    """A matrix [O, I] in integers."""

    def dequantized(self) -> Tensor:
        """What it stands for, float32 [O, I]."""

    def product(self, x: Tensor, rows: int) -> Tensor:
        """x float32 [..., I] with its first rows, as the runtime computes it: [..., rows]."""


@dataclass(frozen=True)
class Rows:
    """One scale a row.

    Attributes:
        values: int8 [O, I].
        scales: float32 [O].
        activations: which kernel's rounding of inputs.
    """

    values: Tensor
    scales: Tensor
    activations: int8.Activations

    @classmethod
    def of(cls, activations: int8.Activations, matrix: Tensor) -> Rows:
        """Of a matrix float32 [O, I]."""
        return cls(*int8.quantize_rows(matrix), activations)

    def dequantized(self) -> Tensor:
        """See :class:`Quantized`."""
        return int8.dequantize_rows(self.values, self.scales)

    def product(self, x: Tensor, rows: int) -> Tensor:
        """See :class:`Quantized`."""
        return int8.dynamic_linear(x, self.values[:rows], self.scales[:rows], None, self.activations)


@dataclass(frozen=True)
class Blocks:
    """A scale for each run of columns of a row.

    Attributes:
        form: of integers.
        values: int8 [O, I].
        scales: float16 [O, I / K].
        activations: whether inputs are rounded by the same runs or by row: ``blocks`` or ``asymmetric``.
    """

    form: Form
    values: Tensor
    scales: Tensor
    activations: Activations

    @classmethod
    def of(cls, form: Form, activations: Activations, matrix: Tensor) -> Blocks:
        """Of a matrix float32 [O, I].

        Raises:
            ValueError: no runtime rounds the inputs of such a weight so.
        """
        if activations == "symmetric":
            raise ValueError(f"inputs of {form.name} are rounded by runs, or asymmetrically by row")
        return cls(form, *form.quantize(matrix), activations)

    def dequantized(self) -> Tensor:
        """See :class:`Quantized`."""
        return self.form.dequantize(self.values, self.scales)

    def product(self, x: Tensor, rows: int) -> Tensor:
        """See :class:`Quantized`."""
        product = dynamic_blocks if self.activations == "blocks" else dynamic_row_blocks
        return product(x, self.values[:rows], self.scales[:rows])


class DynamicProducts(TorchFunctionMode):
    """While active, products with quantised parameters are computed as the runtime does.

    Args:
        matrices: by address of the parameter: one for each matrix that it stacks.
        jitter: if given, every input of such a product first moves by a unit in the last place of its row's greatest
            value, up or down at random: what another order of summing does, at the least.
    """

    def __init__(self, matrices: Mapping[int, list[Quantized]], jitter: torch.Generator | None = None) -> None:
        super().__init__()
        self.matrices = matrices
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
        results = [m.product(x if len(matrices) == 1 else x[i], rows) for i, m in enumerate(matrices)]
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
    wanted: Mapping[tuple[str, int], Callable[[Tensor], Quantized]],
) -> dict[int, list[Quantized]]:
    """Round parameters in place to what their integers stand for.

    Args:
        parameters: (path, tensor) of a step.
        sources: for each path: checkpoint tensor, role, layer.
        wanted: how to quantise, by (checkpoint tensor, layer).

    Returns:
        By address: the matrices, for :class:`DynamicProducts`.
    """
    matrices: dict[int, list[Quantized]] = {}
    for path, value in parameters:
        source = sources.get(path)
        make = wanted.get((source[0], source[2])) if source is not None else None
        if source is None or make is None:
            continue
        views = matrices_of(source[0], value)
        quantized = [make(m.contiguous()) for m in views]
        for view, integers in zip(views, quantized, strict=True):
            view.copy_(integers.dequantized())
        matrices[value.data_ptr()] = quantized
    return matrices


def quantizers(scheme: Scheme) -> dict[tuple[str, int], Callable[[Tensor], Quantized]]:
    """How to quantise the matrices whose inputs the runtime rounds, by (checkpoint tensor, layer)."""
    made: dict[tuple[str, int], Callable[[Tensor], Quantized]] = {}
    if scheme.activations in ("asymmetric", "symmetric"):
        made |= {pair: partial(Rows.of, scheme.activations) for pair in scheme.int8}
    if scheme.activations is not None:
        plain = plain_forms(scheme)
        forms = ((s, n, Form.parse(name)) for s, n, name in scheme.forms if (s, n) not in plain)
        made |= {(s, n): partial(Blocks.of, form, scheme.activations) for s, n, form in forms if form is not None}
    return made


def plain_forms(scheme: Scheme) -> dict[tuple[str, int], str]:
    """Forms of the matrices that are floats by the time they are multiplied: all but integers that a runtime reads."""
    forms = {name: Form.parse(name) for _, _, name in scheme.forms}
    rounds = scheme.activations is not None
    return {(s, n): name for s, n, name in scheme.forms
            if not (rounds and (form := forms[name]) is not None and form.kind == "int" and not form.widened)}
