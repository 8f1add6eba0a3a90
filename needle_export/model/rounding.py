"""The reference's parameters as a number format has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from needle_export.model.dynamic import matrices_of
from needle_export.weights.forms import Form


def round_parameters(
    parameters: Iterable[tuple[str, Tensor]],
    sources: Mapping[str, tuple[str, str, int]],
    wanted: Mapping[tuple[str, int], str],
) -> None:
    """Round parameters in place to what their stored form stands for.

    Args:
        parameters: (path, tensor) of a step.
        sources: for each path: checkpoint tensor, role, layer.
        wanted: form by (checkpoint tensor, layer).
    """
    for path, value in parameters:
        source = sources.get(path)
        form = Form.parse(wanted.get((source[0], source[2]), "")) if source is not None else None
        if source is None or form is None:
            continue
        for matrix in matrices_of(source[0], value):
            matrix.copy_(form.rounded(matrix))
