"""The reference's parameters as a number format has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from needle_export.model.block import Norm
from needle_export.model.dynamic import matrices_of
from needle_export.model.step import Step, parameter_sources
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


def read_factor(step: Step, path: str) -> Tensor | float | None:
    """What multiplies ``1 + scale`` of a norm before anything reads it: behind attention the block's gate, of queries
    attention's factor. None of a parameter that is no norm's scale."""
    owner, _, leaf = path.rpartition(".")
    if leaf != "scale" or not isinstance(step.get_submodule(owner), Norm):
        return None
    home, _, kind = owner.rpartition(".")
    if kind == "post_norm":
        return torch.sigmoid(step.get_parameter(f"{home}.gate"))
    return float(step.net.geometry.qk_head_dim**-0.5) if kind == "q_norm" else 1.0


def halves_read(value: Tensor, factor: Tensor | float | None) -> Tensor:
    """The halves that an op reads of a parameter, by its :func:`read_factor`."""
    return (value if factor is None else (1 + value) * factor).half()


def round_as_read(step: Step, wanted: Collection[tuple[str, int]]) -> None:
    """Round parameters in place so that what ops read of them are halves.

    Of a norm, what is read is the half to the last bit of float32: the model computes it from the scale once more.

    Args:
        wanted: (checkpoint tensor, layer).
    """
    parameters, pairs = dict(step.named_parameters()), set(wanted)
    for path, (source, _, layer) in parameter_sources(step).items():
        value = parameters.get(path)
        if value is None or (source, layer) not in pairs:
            continue
        factor = read_factor(step, path)
        read = halves_read(value, factor)
        if factor is None:
            value.copy_(read.float())
        elif bool(torch.as_tensor(factor) != 0):  # else the scale decides nothing
            value.copy_(read.double() / factor - 1)
