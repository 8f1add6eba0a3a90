"""Better numbers for the reference's matrices before anything rounds them.

Whatever method is used, a matrix in integer blocks ends up on the levels of its form, and rounding to nearest leaves it
as it is. So an improved model is a checkpoint like any other: what rounds it, compares with it or reads it back needs
to know nothing of how its numbers were found.

Dimension letters: O outputs (rows of a matrix), I inputs (its columns), S sites, E tables of a site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from needle_export.model.dynamic import matrices_of
from needle_export.model.moments import Moment, Moments
from needle_export.weights.calibrated import calibrated
from needle_export.weights.forms import Form
from needle_export.weights.search import searched

#: ``rtn``: round to nearest. ``mse``: scales with the least squared error of weights. ``calibrated``: levels and scales
#: with little error of outputs, for inputs that were seen.
Method = Literal["rtn", "mse", "calibrated"]
METHODS: tuple[Method, ...] = ("rtn", "mse", "calibrated")

Sources = Mapping[str, tuple[str, str, int]]

#: What an error of the tied embedding costs where rows are looked up, in any direction alike, beside the mean of what
#: it costs in logits. Chosen on the trained model of ``tests/benchmarks/calibration.py``, where none at all was worse
#: at 2 and at 4 bits, and half as much or three times as much little different.
_LOOKED_UP = 1.0

_EMBEDDING, _TABLES = "embedding/embedding", "engrams/embedding"
_PROJECTIONS = ("engrams/key_proj/kernel", "engrams/value_proj/kernel")


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows of a matrix [O, I], a view of a parameter; and the second moments of their inputs, if known."""

    rows: Tensor
    form: Form
    moments: Moment | None


def improve(
    parameters: Iterable[tuple[str, Tensor]],
    sources: Sources,
    forms: Mapping[tuple[str, int], Form],
    method: Method,
    moments: Moments | None = None,
) -> None:
    """Round parameters in place, each matrix as its form has it.

    Palettes are placed by least squared error under every method. A matrix whose inputs weren't seen falls back to
    ``mse``; of the tied embedding, rows that no logit is made of do. The embedding is rounded once for both ends: by
    the inputs of the head, and by its rows being looked up, where an error counts in every direction alike. Rows of
    engram tables are no product's weight, but the inputs of the projections of key and value, so an error of theirs
    costs what these make of it: with P both projections of a table's columns, P P^T stands where a weight has the
    moments of its inputs.

    Args:
        parameters: (path, tensor) of a step.
        sources: for each path: checkpoint tensor, role, layer.
        forms: by (checkpoint tensor, layer).
        method: see ``Method``.
        moments: of the same parameters, for ``calibrated``.

    Raises:
        ValueError: ``calibrated`` without moments, or as the form's own rounding.
    """
    if method == "calibrated" and moments is None:
        raise ValueError("calibrated rounding needs the moments of inputs")
    named = dict(parameters)
    pieces: list[_Piece] = []
    for path, value in named.items():
        source = sources.get(path)
        form = forms.get((source[0], source[2])) if source is not None else None
        if source is None or form is None:
            continue
        if method == "calibrated" and moments is not None:
            pieces += _calibrated_pieces(named, sources, path, form, moments)
        else:
            pieces += [_Piece(m, form, None) for m in matrices_of(source[0], value)]
    # What shares moments is rounded at once: rows don't touch each other, and the moments are decomposed once.
    together: dict[tuple[Form, int], list[_Piece]] = {}
    for piece in pieces:
        key = id(piece) if piece.moments is None else id(piece.moments)
        together.setdefault((piece.form, key), []).append(piece)
    for group in together.values():
        _round(group, method)


def _round(group: list[_Piece], method: Method) -> None:
    form, moments = group[0].form, group[0].moments
    matrix = torch.cat([p.rows for p in group]).float()
    if form.kind != "int" or method == "rtn":
        rounded = form.rounded(matrix)
    elif moments is None:
        rounded = searched(matrix, form.bits, form.size)
    else:
        rounded = calibrated(matrix, moments.matrix, moments.count, form.bits, form.size)
    for piece, rows in zip(group, torch.split(rounded, [len(p.rows) for p in group]), strict=True):
        piece.rows.copy_(rows)


def _calibrated_pieces(
    named: Mapping[str, Tensor], sources: Sources, path: str, form: Form, moments: Moments
) -> list[_Piece]:
    """The matrices of a parameter with what their errors cost."""
    source, value = sources[path][0], named[path]
    matrices = matrices_of(source, value)
    if source == _TABLES:
        costs = _costs(value, *(named[p] for name in _PROJECTIONS for p, s in sources.items() if s[0] == name))
        return [_Piece(rows, form, h) for rows, h in zip(value.chunk(len(costs)), costs, strict=True)]
    found = moments.of(value)
    if found is None:
        return [_Piece(m, form, None) for m in matrices]
    pieces = []
    for matrix, moment in zip(matrices, found, strict=True):
        seen = moments.rows(value)
        if source == _EMBEDDING:
            moment = _both_ends(moment)
        pieces.append(_Piece(matrix[:seen], form, moment))
        if seen < len(matrix):
            pieces.append(_Piece(matrix[seen:], form, None))
    return pieces


def _both_ends(moment: Moment) -> Moment:
    """Moments of the head's inputs, with the cost of errors in rows that are looked up."""
    everywhere = torch.full((len(moment.matrix),), _LOOKED_UP) * moment.matrix.diagonal().mean()
    return Moment(moment.matrix + torch.diag(everywhere), moment.count)


def _costs(tables: Tensor, keys: Tensor, values: Tensor) -> list[Moment]:
    """Of each table of each site, P P^T; of tables [S*E*slots, I] and projections [S, E*I, C]."""
    width = tables.shape[1]
    both = torch.cat([keys, values], dim=2)
    return [Moment(p @ p.t(), None) for site in both for p in torch.split(site, width)]
