"""What a run of ``evaluate`` found, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from needle_export.report.codec import encode, to_json
from needle_export.report.evaluation import Proportion
from needle_export.report.evaluation_view import counted, points
from needle_export.report.units import whole
from needle_export.report.view import RANDOM_ANSWERS, Section

if TYPE_CHECKING:
    from needle_export.evaluation import Evaluated


def render_evaluated(found: Sequence[Evaluated], *, as_json: bool, color: bool = False, width: int = 100) -> str:
    """What a run of ``evaluate`` found, as text or JSON, ending in a newline."""
    if as_json:
        told = [{"folder": f.folder, "target": f.target, "weights": f.weights, "random": f.random,
                 "data": f.data, "tools": f.tools, "evaluation": encode(f.evaluation)} for f in found]
        return to_json({"evaluated": told})
    from needle_export.report.text import Page

    page = Page(color=color, width=width)
    if any(f.random for f in found):
        page.warning(RANDOM_ANSWERS)
    page.section(table(found))
    first = found[0].evaluation
    page.note(f"of {first.data.file} {first.data.sha256[:8]}: {first.of.split(', ', 1)[1]}")
    page.note(f"queries: {found[0].data}")
    if found[0].tools is not None:
        page.note(f"tools of lines that have none: {found[0].tools}")
    page.note("exact calls: the right calls in order, with equal arguments, and the ends of the 95 % interval (Wilson)")
    for runtime in dict.fromkeys(f.evaluation.runtime for f in found):
        page.note(f"ran in {runtime}: {', '.join(_name(f) for f in found if f.evaluation.runtime == runtime)}")
    if first.reference is None:
        page.note(f"float32 reference: {first.reference_why}")
    else:
        page.note(f"the float32 reference itself: exact calls {counted(first.reference.exact_calls)}")
    return page.text()


def table(found: Sequence[Evaluated]) -> Section:
    """A row for each artifact."""
    rows = []
    for f in found:
        e = f.evaluation
        same = ("-", "-") if e.reference is None else (_short(e.reference.same_calls), _short(e.reference.same_tokens))
        ends = f"{points(e.exact_calls.low)} to {points(e.exact_calls.high)} %"
        rows.append((_name(f), _short(e.exact_calls), ends, _short(e.nothing_precision),
                     _short(e.nothing_recall), *same, whole(e.invalid.count), whole(e.cut.count)))
    heads = ("artifact", "exact\ncalls", "95 %\ninterval", "nothing:\nprecision", "\nrecall", "as\nreference",
             "same\ntokens", "invalid", "cut")
    return Section("Answers", heads, tuple(rows), frozenset(range(1, len(heads))))


def _short(p: Proportion | None) -> str:
    return "-" if p is None else f"{points(p.share)} % {whole(p.count)}/{whole(p.of)}"


def _name(f: Evaluated) -> str:
    return f"{f.folder} {f.target} {f.weights}"
