"""Evaluations in words: what was counted, of which queries, and how sure the shares are."""

from __future__ import annotations

from needle_export.report.evaluation import Evaluation, Proportion
from needle_export.report.schema import Artifact
from needle_export.report.units import whole

FIGURES = ("data", "exact calls", "right tools", "nothing: precision", "nothing: recall", "as the float reference",
           "same tokens as it", "its own exact calls", "answers that aren't calls", "answers cut at a limit", "ran in")
"""Of :func:`cells`."""


def points(share: float) -> str:
    """A share in percent with one decimal."""
    return f"{100 * share:.1f}"


def counted(p: Proportion | None) -> str:
    """A share with its counts."""
    return "-" if p is None else f"{points(p.share)} % ({whole(p.count)} of {whole(p.of)})"


def interval(p: Proportion) -> str:
    """The ends of its interval."""
    return f"{points(p.low)} to {points(p.high)} %"


def line(e: Evaluation) -> str:
    """An evaluation in a sentence."""
    parts = [f"exact calls {counted(e.exact_calls)}, 95 % interval {interval(e.exact_calls)}",
             f"calls nothing with precision {counted(e.nothing_precision)} and recall {counted(e.nothing_recall)}"]
    parts += [f"{name} {counted(p)}" for name, p in (("invalid", e.invalid), ("cut", e.cut)) if p.count]
    if e.reference is None:
        parts.append(f"beside the float reference {e.reference_why}")
    else:
        parts.append(f"as the float reference {counted(e.reference.same_calls)}, which has "
                     f"{counted(e.reference.exact_calls)} exact")
    return f"{'; '.join(parts)}; {e.of}, in {e.runtime}"


def cells(e: Evaluation) -> tuple[str, ...]:
    """An evaluation as cells, one for each of FIGURES."""
    r = e.reference
    beside = ("-",) * 3 if r is None else (counted(r.same_calls), counted(r.same_tokens), counted(r.exact_calls))
    return (e.of, f"{counted(e.exact_calls)}, {interval(e.exact_calls)}", counted(e.tool_names),
            counted(e.nothing_precision), counted(e.nothing_recall), *beside, counted(e.invalid), counted(e.cut),
            e.runtime)


def rows(artifact: Artifact) -> tuple[tuple[str, ...], ...]:
    """Every evaluation of an artifact, one a column: there are more figures than evaluations."""
    return tuple(zip(FIGURES, *map(cells, artifact.evaluations), strict=True)) if artifact.evaluations else ()
