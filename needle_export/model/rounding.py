"""The reference's parameters as a number format has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from needle_export.model.dynamic import matrices_of
from needle_export.weights.codes import Codes
from needle_export.weights.forms import Form


@dataclass(frozen=True)
class Formed:
    """A matrix [O, I] in a form.

    Attributes:
        values: or indices, [O, I].
        extra: scales or levels, as the form has them.
    """

    form: Form
    values: Tensor
    extra: Tensor


def round_parameters(
    parameters: Iterable[tuple[str, Tensor]],
    sources: Mapping[str, tuple[str, str, int]],
    wanted: Mapping[tuple[str, int], str],
) -> dict[int, list[Formed | Codes]]:
    """Round parameters in place to what their stored form stands for.

    Args:
        parameters: (path, tensor) of a step.
        sources: for each path: checkpoint tensor, role, layer.
        wanted: form by (checkpoint tensor, layer).

    Returns:
        By address of the parameter: the matrices that it holds, as they are stored; none of those whose codes are the
        checkpoint's own, which their numbers are already.
    """
    found: dict[int, list[Formed | Codes]] = {}
    for path, value in parameters:
        source = sources.get(path)
        form = Form.parse(wanted.get((source[0], source[2]), "")) if source is not None else None
        if source is None or form is None:
            continue
        held = found.setdefault(value.data_ptr(), [])
        for matrix in matrices_of(source[0], value):
            if form.kind == "codebook":
                continue
            if form.kind == "cq":
                codes = form.encode(matrix.float().contiguous())
                held.append(codes)
                matrix.copy_(torch.from_numpy(codes.matrix()))
                continue
            stored = Formed(form, *form.quantize(matrix.float().contiguous()))
            held.append(stored)
            matrix.copy_(form.dequantize(stored.values, stored.extra))
    return found
