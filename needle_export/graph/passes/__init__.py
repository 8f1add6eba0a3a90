"""The ordered passes, each with the reason for its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from needle_export.graph.passes import algebra, constants, projections, rotation
from needle_export.graph.passes.base import Fired, Left, Pass
from needle_export.graph.passes.fuse import fuse
from needle_export.graph.patterns import head_patterns, patterns
from needle_export.graph.program import Part, Weight

__all__ = ["Fired", "Left", "Pass", "head_pipeline", "pipeline"]


def pipeline(
    taps: tuple[int, ...],
    orders: tuple[int, ...],
    lanes: int,
    fold_lane_gates: bool,
    probed: bool = False,
    scheme_of: Callable[[Sequence[Part]], str] = lambda parts: "",
    codes_of: Callable[[Weight], Sequence[Any] | str | None] | None = None,
    fold_diagonals: bool = True,
) -> list[Pass]:
    """The passes for a model with these convolution lengths and n-gram orders.

    Args:
        fold_lane_gates: whether the lanes' matrices may take a factor; not where they are stored in half
            precision, as they would no longer be the checkpoint's values.
        probed: whether the step feeds a probe head.
        scheme_of: a weight's number format by its parts: matrices of several aren't merged.
        codes_of: a weight's codes where it is to be in codebook form, or why it has none; None if none is.
        fold_diagonals: whether the small matrices that condition the MLP may take its diagonals; not where they are
            stored as integers of the checkpoint's values.
    """
    traced, fused = frozenset({"traced"}), frozenset({"fused"})
    tidy = frozenset({"constants folded"})
    merged = frozenset({"projections merged"})
    passes = [
        # Patterns are the plain references, so they must be sought before anything else moves.
        Pass(f"fuse {p.op}", traced, fused, partial(fuse, pattern=p))
        for p in patterns(taps, orders, lanes, probed)
    ]
    passes += [
        # Everything below asks "is this a weight?", which an alias or unfolded arithmetic hides.
        Pass("drop identities", fused, fused, constants.drop_identities),
        Pass("fold constants", fused, tidy, constants.fold_constants),
        # Before the folds: a folded factor would make weights that share an input differ in kind.
        Pass("merge projections", tidy, merged, partial(projections.merge_projections, scheme_of=scheme_of)),
        # Regroups the split that merging left.
        Pass("join heads", merged, merged, projections.join_heads),
        Pass("fold gates", tidy, tidy, algebra.fold_gates),
        Pass("fold bias", tidy, tidy, partial(algebra.fold_bias, diagonals=fold_diagonals)),
        Pass("trim kronecker", tidy, tidy, algebra.trim_kronecker),
        # Needs the diagonal next to the norm, where trimming puts it.
        *([Pass("absorb diagonal", tidy, tidy, algebra.absorb_diagonal)] if fold_diagonals else []),
        Pass("cancel residual", tidy, tidy, algebra.cancel_residual),
        Pass("drop unread mixing", tidy, tidy, algebra.drop_unread_mixing),
        Pass("hoist norms", tidy, tidy, algebra.hoist_norms),
        # After the residual is cancelled, which looks for plain sums.
        Pass("fuse add norm", tidy, tidy, algebra.fuse_add_norm),
        Pass("tile slices", merged, merged, projections.tile_slices),
    ]
    if fold_lane_gates:
        passes.append(Pass("merge lane gates", tidy, merged, projections.merge_lane_gates))
    if codes_of is not None:
        # Last but for sharing: what moves or joins weights would lose their codes.
        passes += [
            Pass("rotate codebooks", merged, merged, partial(rotation.rotate_codebooks, codes_of=codes_of)),
            Pass("cancel rotations", merged, merged, rotation.cancel_rotations),
        ]
    passes.append(Pass("share constants", tidy, tidy, constants.share_constants))
    return passes


def head_pipeline() -> list[Pass]:
    """The passes for a program that answers from a probe head's pools: all of it is one op."""
    traced, fused = frozenset({"traced"}), frozenset({"fused"})
    return [Pass(f"fuse {p.op}", traced, fused, partial(fuse, pattern=p)) for p in head_patterns()]
