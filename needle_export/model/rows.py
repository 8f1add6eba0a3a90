"""The numbers that the reference computes with, matrix by matrix and row by row: what an artifact's must be.

They come from the checkpoint by way of the reference alone: no target, and nothing that a target wrote, has a part in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needle_export.model.dynamic import Blocks, Quantized, Rows, matrices_of
from needle_export.model.rounding import Formed, halves_read, read_factor
from needle_export.model.step import Step, factor_of, parameter_sources
from needle_export.weights.codes import Codes


@dataclass(frozen=True)
class Matrix:
    """A matrix of the reference as a number format has it.

    Attributes:
        tensor: of the checkpoint, with the site's number where each site has one.
        role, layer: of it; -1: of no block.
        rows: O.
        used: how many of the first rows and columns matter; the others meet padding.
        dtype: ``int8``, ``float16`` or ``float32``, or the name of a form of ``weights.forms``, or ``codesx`` with the
            group of one in codebook form.
        load: values [O, I] in that format, and the factors of the rows' results: [O], or [O, I / K] for K columns each,
            or levels [O, L] of a palette, or None where they have none. In codebook form the values are levels before
            the rotation, and norms the factors.
    """

    tensor: str
    role: str
    layer: int
    rows: int
    used: tuple[int, int]
    dtype: str
    load: Callable[[], tuple[NDArray[Any], NDArray[np.float32] | None]]


def matrices(
    step: Step,
    halves: Collection[tuple[str, int]],
    quantized: Mapping[int, list[Quantized]],
    formed: Mapping[int, list[Formed]] | None = None,
    half: bool = False,
    imported: Callable[[str, str, int], Sequence[Codes] | None] = lambda source, role, layer: None,
    as_read: Collection[tuple[str, int]] = (),
) -> dict[tuple[str, int], Matrix]:
    """Every matrix of a step, by the parameter's path (without the step's ``net.``) and site (-1: not one of several).

    Args:
        step: with its parameters rounded already.
        halves: (checkpoint tensor, layer) of those in half precision.
        quantized: as ``quantize_parameters`` returned them.
        formed: as ``round_parameters`` returned them.
        half: whether all others are stored in half precision, factors too, and no probe heads.
        imported: the checkpoint's own codes of a tensor by name, role and layer, of each of its sites.
        as_read: (checkpoint tensor, layer) of those that are halves as ops read them, vectors among them, as one row; a
            norm's scale of a head is a row for each head.

    Raises:
        ValueError: codes are to be the checkpoint's own, and it has none.
    """
    parameters, sources = dict(step.named_parameters()), parameter_sources(step)
    found, vectors = {}, set(as_read)
    for path, value in parameters.items():
        if path in sources and value.dim() == 1 and sources[path][::2] in vectors:
            found[path.removeprefix("net."), -1] = _vector(step, path, value, sources[path])
        if path not in sources or value.dim() not in (2, 3) or (half and path.startswith("net.heads.")):
            continue
        source, role, layer = sources[path]
        integers = quantized.get(value.data_ptr())
        forms: list[Any] | None = (formed or {}).get(value.data_ptr())
        if forms == []:
            forms = list(imported(source, role, layer) or ())
            if not forms:
                raise ValueError(f"{source} has no codes in this checkpoint")
        factor = parameters.get(factor_of(path) or "")
        rounded = factor.half().float() if half and factor is not None else factor
        for site, matrix in enumerate(matrices_of(source, value)):
            several = value.dim() == 3
            tensor = source.replace("engrams/", f"engrams_{site}/") if several else source
            halved = half or (source, layer) in halves or (source, layer) in vectors
            load = partial(_floats, matrix, halved, rounded)
            dtype = "float16" if halved else "float32"
            one = None if integers is None else integers[site]
            if isinstance(one, Rows):
                dtype, load = "int8", partial(_integers, one.values, one.scales, rounded)
            elif isinstance(one, Blocks):
                # How few digits a scale has is not told by where it lies.
                dtype = replace(one.form, brain=False).name
                load = partial(_integers, one.values, one.scales, rounded)
            elif forms is not None and isinstance(forms[site], Codes):
                dtype, load = f"codesx{forms[site].group}", partial(_coded, forms[site], rounded)
            elif forms is not None:
                dtype, load = forms[site].form.name, partial(_formed, forms[site], rounded)
            key = (path.removeprefix("net."), site if several else -1)
            found[key] = Matrix(tensor, role, layer, len(matrix), _used(path, matrix, step), dtype, load)
    return found


def _vector(step: Step, path: str, value: Tensor, source: tuple[str, str, int]) -> Matrix:
    """A vector in halves as rows [R, N]."""
    geometry, owner = step.net.geometry, path.rpartition(".")[0].rpartition(".")[2]
    rows = {"q_norm": geometry.num_heads, "k_norm": geometry.num_kv_heads}.get(owner, 1)
    # What the MLP's first and last diagonals multiply beyond the model's width is padding.
    width = geometry.d_model if path.endswith((".mlp.d1", ".mlp.d4")) else len(value)
    tensor, role, layer = source
    load = partial(_rows_read, value, read_factor(step, path), rows)
    return Matrix(tensor, role, layer, rows, (rows, width), "float16", load)


def _rows_read(value: Tensor, factor: Tensor | float | None, rows: int) -> tuple[NDArray[Any], None]:
    return halves_read(value, factor).expand(rows, -1).contiguous().numpy(), None


def _used(path: str, matrix: Tensor, step: Step) -> tuple[int, int]:
    """Rows and columns of a matrix [O, I] that matter.

    The MLP pads its input with whole rows of zeros for its first Kronecker product, and cuts as many off the last. The
    mixing of lanes behind the last block is none, as the mean over lanes that follows doesn't depend on it.
    """
    rows, columns = matrix.shape
    geometry = step.net.geometry
    if path.endswith(f"layers.{geometry.num_layers - 1}.lanes.phi_res"):
        return 0, columns
    whole = -(-geometry.d_model // geometry.hada_blocks[1])
    if path.endswith(".mlp.w1a"):
        return rows, min(columns, whole)
    return (min(rows, whole), columns) if path.endswith(".mlp.w3a") else (rows, columns)


def _integers(
    values: Tensor, scales: Tensor, factor: Tensor | None
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    # Scales in half precision are widened: a factor is multiplied in float32.
    return values.numpy(), (scales.float() if factor is None else scales.float() * factor).numpy()


def _formed(stored: Formed, factor: Tensor | None) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    # Of a palette, a row of levels for each row.
    extra = stored.extra if stored.form.kind == "int" else stored.extra.repeat_interleave(stored.form.size, 0)
    return _integers(stored.values, extra, factor)


def _coded(codes: Codes, factor: Tensor | None) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    levels, norms = codes.levels[codes.indices], torch.from_numpy(codes.norms.astype(np.float32))
    return levels, (norms if factor is None else norms * factor).numpy()


def _floats(
    matrix: Tensor, halved: bool, factor: Tensor | None
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    # In halves the parameter is rounded already, so that this changes no value.
    values = (matrix.half() if halved else matrix).contiguous().numpy()
    return values, None if factor is None else torch.full((len(matrix),), float(factor)).numpy()
