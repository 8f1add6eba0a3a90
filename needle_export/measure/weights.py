"""Are the numbers in the artifact's files the ones that the reference computes with, bit for bit?

Logits can't tell it where inputs of products are rounded at run time: there a small error of a weight moves them no
further than the last bit does. So the matrices themselves are read back and compared, each with the rows that it says
it holds. An op must also read a matrix of its own block, and every matrix of the scheme must be read by some op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.targets.matrices import ReadMatrix, RowsOf

Rows = tuple[NDArray[Any], NDArray[np.float32] | None]
"""Values [O, I], and what multiplies them, if anything does: [O], [O, I / K], or levels [O, L]; see ``ReadMatrix``."""


class Wanted(Protocol):
    """A matrix of the reference; see ``model.rows.Matrix``."""

    @property
    def tensor(self) -> str:
        """Of the checkpoint."""

    @property
    def role(self) -> str:
        """Of it."""

    @property
    def layer(self) -> int:
        """Of it, or -1."""

    @property
    def rows(self) -> int:
        """O."""

    @property
    def used(self) -> tuple[int, int]:
        """How many of its first rows and columns matter."""

    @property
    def dtype(self) -> str:
        """Of its values, or its form."""

    @property
    def load(self) -> Callable[[], Rows]:
        """Its numbers."""


#: Compared at once.
_ROWS = 1024

Key = tuple[str, int]
Reference = Mapping[Key, Wanted]


@dataclass
class Compared:
    """What was compared, and what was found wrong.

    Attributes:
        faults: one sentence a matrix that is not the reference's; the first decides what a user reads.
        folded: stored matrices that constants went into.
        covered: by matrix of the reference, which of its rows were equal [O].
        bytes: of the rows that were equal, in the files.
    """

    faults: list[str] = field(default_factory=list)
    folded: int = 0
    covered: dict[Key, NDArray[np.bool_]] = field(default_factory=dict)
    bytes: int = 0

    def table(self) -> dict[str, int]:
        """The numbers for the report; of a comparison without a fault, all of them equal."""
        return {"matrices": len(self.covered), "bytes": self.bytes, "folded": self.folded}

    def fault(self) -> str | None:
        """What is wrong, or None."""
        if not self.faults:
            return None
        more = len(self.faults) - 1
        return self.faults[0] + (f" (and {more} more)" if more else "")


def compare(stored: Iterable[ReadMatrix], reference: Reference) -> Compared:
    """Hold an artifact's matrices against the reference's.

    Args:
        stored: every matrix of the artifact that can be read, once for each set of scales.
        reference: by the parameter's path and site.
    """
    found = Compared()
    folded: set[str] = set()
    for matrix in stored:
        if matrix.fault:
            found.faults.append(f"{_named(matrix.claim)}: {matrix.fault} ({_first(matrix)})")
        elif matrix.folded:
            found.folded += 1
            folded |= set(matrix.claim.parameters)
        else:
            _compare(matrix, reference, found)
    for key, wanted in () if found.faults else reference.items():
        # Float32 that nothing names is no scheme's, and the logits hold it to 1e-4.
        if wanted.dtype == "float32" or any(name == key[0] or name.startswith(f"{key[0]}.") for name in folded):
            continue
        rows = found.covered.get(key)
        if not wanted.used[0] or (rows is None and _is_there(key, reference, found)):
            continue
        if rows is None:
            found.faults.append(f"{_of(wanted)} is read by no op of the artifact")
        elif not rows[: wanted.used[0]].all():
            found.faults.append(f"{_of(wanted)}: row {int(np.argmin(rows))} is read by no op of the artifact")
    return found


def _is_there(key: Key, reference: Reference, found: Compared) -> bool:
    """Whether a matrix that no op names equals one that was compared: then they are one constant in the files."""
    values, scales = reference[key].load()
    for other in [*found.covered]:
        wanted = reference[other]
        if (wanted.rows, wanted.dtype) != (len(values), reference[key].dtype) or not found.covered[other].all():
            continue
        theirs, their_scales = wanted.load()
        # Of both what matters: what meets padding may not be stored.
        mine, theirs = values[:, : reference[key].used[1]], theirs[:, : wanted.used[1]]
        if theirs.shape != mine.shape or _differ(theirs, mine).any():
            continue
        if scales is None or (their_scales is not None and _equal(scales, their_scales)):
            found.covered[key] = found.covered[other]
            return True
    return False


def _compare(matrix: ReadMatrix, reference: Reference, found: Compared) -> None:
    """One stored matrix, source by source."""
    sources = []
    for parameter in matrix.claim.parameters:
        key = (parameter, matrix.claim.site)
        if key not in reference:
            found.faults.append(f"{_named(matrix.claim)}: no matrix of the checkpoint is called so ({_first(matrix)})")
            return
        sources.append(key)
    ends = np.cumsum([reference[key].rows for key in sources])
    stop = int(ends[-1]) if matrix.claim.stop is None else matrix.claim.stop
    if not 0 <= matrix.claim.start < stop <= ends[-1] or len(matrix.values) != stop - matrix.claim.start:
        found.faults.append(
            f"{_named(matrix.claim)}: {len(matrix.values)} rows are stored, not rows {matrix.claim.start} to {stop}"
        )
        return
    for key, end in zip(sources, ends, strict=True):
        wanted = reference[key]
        begin = int(end) - wanted.rows
        first, last = max(matrix.claim.start, begin), min(stop, int(end))
        if first < last:
            fault = _compare_source(matrix, reference, key, slice(first - begin, last - begin), first, found)
            if fault:
                found.faults.append(fault)


def _compare_source(
    matrix: ReadMatrix, reference: Reference, key: Key, rows: slice, first: int, found: Compared
) -> str | None:
    """The rows of one source: what is wrong, or None.

    Args:
        rows: of the source.
        first: the first of them, counted over all sources of the claim.
    """
    wanted = reference[key]
    fault = None
    for block in dict.fromkeys(place.block for place in matrix.places):
        if wanted.layer < 0 or block in (-1, wanted.layer):
            fault = fault or _compare_rows(matrix, reference, key, rows, first, found)
            continue
        # Equal matrices of two blocks become one constant, under the name of the first.
        twin = next((k for k, w in reference.items() if (w.tensor, w.layer) == (wanted.tensor, block)), None)
        if twin is None or _compare_rows(matrix, reference, twin, rows, first, found):
            stranger = next(place for place in matrix.places if place.block == block)
            return f"{stranger.name} reads {_of(wanted)}"
    return fault


def _compare_rows(
    matrix: ReadMatrix, reference: Reference, key: Key, rows: slice, first: int, found: Compared
) -> str | None:
    """As :func:`_compare_source`, whichever op reads them."""
    wanted = reference[key]
    at = slice(first - matrix.claim.start, first - matrix.claim.start + rows.stop - rows.start)
    values, scales = (None if part is None else part[rows] for part in wanted.load())
    assert values is not None
    columns = matrix.claim.columns
    if columns is not None and columns < wanted.used[1]:
        return f"{_of(wanted)}: only {columns} of its columns are stored, and {wanted.used[1]} matter"
    values = values[:, :columns]
    have = matrix.values[at]
    if matrix.dtype != wanted.dtype or have.shape != values.shape:
        return f"{_of(wanted)} is stored as {_kind(matrix.dtype, have)}, not {_kind(wanted.dtype, values)}"
    if scales is not None and matrix.scales is None:
        return f"{_of(wanted)}: no scales of its rows are applied behind {_first(matrix)}"
    factors = None if matrix.scales is None else matrix.scales[at]
    if scales is None:
        if matrix.own and factors is not None and (factors != 1).any():
            return f"{_of(wanted)}: {_first(matrix)} multiplies it by {float(factors[factors != 1][0]):.9g}"
        # A factor behind a product that isn't one of this matrix belongs to something else, as a norm.
        factors = None
    wrong = _differ(have, values)
    if factors is not None and scales is not None:
        if factors.shape != scales.shape:
            return f"{_of(wanted)}: {_per_row(factors)} scales of a row are stored, not {_per_row(scales)}"
        unequal = _differ(factors, scales)
        if matrix.behind is not None and unequal.any():
            # Unless it is: then the reference's scales hold it.
            factors = factors * matrix.behind[at].reshape(-1, *[1] * (factors.ndim - 1))
            unequal = _differ(factors, scales)
        wrong |= unequal
    if wrong.any():
        return _describe(matrix.dtype, (have, factors), (values, scales), wrong, reference, key, rows.start)
    seen = found.covered.setdefault(key, np.zeros(wanted.rows, np.bool_))
    one_factor = scales is not None and (scales.ndim == 1 or matrix.behind is not None)
    found.bytes += int((~seen[rows]).sum()) * matrix.row_bytes(one_factor)
    seen[rows] = True
    return None


def _describe(
    dtype: str,
    stored: Rows,
    wanted: Rows,
    wrong: NDArray[np.bool_],
    reference: Reference,
    key: Key,
    offset: int,
) -> str:
    """How rows differ, by the first of them."""
    (have, have_scales), (values, scales) = stored, wanted
    row = int(np.argmax(wrong))
    what = f"{_of(reference[key])}: {int(wrong.sum())} of {len(wrong)} rows differ, row {row + offset} first, "
    places = np.flatnonzero(_bits(have[row]) != _bits(values[row]))
    if not len(places):
        assert have_scales is not None and scales is not None
        mine, right = have_scales[row].reshape(-1), scales[row].reshape(-1)
        at = int(np.argmax(_bits(mine) != _bits(right)))
        which = f"scale of columns {at * len(values[row]) // len(right)} and on" if len(right) > 1 else "scale"
        which = f"level {at}" if dtype.startswith("palette") else which
        which = which.replace("scale", "norm") if dtype.startswith("codes") else which
        return f"{what}whose {which} is {mine[at]:.9g} and not {right[at]:.9g}"
    other = _whose(have[row], dtype, reference, key)
    if other:
        return f"{what}which holds {other}"
    at = int(places[0])
    return (
        f"{what}where {len(places)} of {have.shape[1]} values differ"
        f" (at {at}: {have[row, at]:.6g} and not {values[row, at]:.6g})"
    )


def _whose(row: NDArray[Any], dtype: str, reference: Reference, key: Key) -> str:
    """Which row of the reference this is, searched in its own matrix first; or nothing."""
    bits = _bits(row)
    for candidate in (key, *(k for k in reference if k != key)):
        if reference[candidate].dtype == dtype:
            values, _ = reference[candidate].load()
            if values.shape[1] == len(row):
                equal = (_bits(values) == bits).all(axis=1)
                if equal.any():
                    number = int(np.argmax(equal))
                    return f"row {number}" if candidate == key else f"row {number} of {_of(reference[candidate])}"
    return ""


def _of(wanted: Wanted) -> str:
    block = f" of block {wanted.layer}" if wanted.layer >= 0 else ""
    return f"{wanted.tensor}{block} ({wanted.role})"


def _named(claim: RowsOf) -> str:
    return f"the matrix {claim}"


def _first(matrix: ReadMatrix) -> str:
    return matrix.places[0].name


def _per_row(scales: NDArray[np.float32]) -> int:
    return int(scales[:1].size)


def _kind(dtype: str, values: NDArray[Any]) -> str:
    return f"{dtype} {list(values.shape)}"


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and not _differ(one, other).any()


def _differ(have: NDArray[Any], want: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows differ in any bit, [O]; a few rows at a time, since a comparison of all takes memory of its own."""
    wrong = np.zeros(len(have), np.bool_)
    for start in range(0, len(have), _ROWS):
        rows = slice(start, start + _ROWS)
        wrong[rows] = (_bits(have[rows]) != _bits(want[rows])).reshape(len(wrong[rows]), -1).any(axis=1)
    return wrong


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    """As integers: two zeros of different sign differ, and no number is unequal to itself."""
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")
