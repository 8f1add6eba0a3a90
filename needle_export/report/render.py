"""One report in any of the forms that it has."""

from __future__ import annotations

from typing import Literal, get_args

from needle_export.report.schema import Report, dump_report

Style = Literal["text", "markdown", "json"]

STYLES: tuple[Style, ...] = get_args(Style)
"""Names of the forms."""

GateStyle = Literal["text", "markdown", "json", "github"]

GATE_STYLES: tuple[GateStyle, ...] = get_args(GateStyle)
"""Names of the forms of verdicts on budgets."""


def render(report: Report, style: Style, *, color: bool = False, width: int = 100) -> str:
    """The report as text, ending in a newline; ``color`` and ``width`` matter to "text" only."""
    # The text view's library takes longer to import than the others to run.
    if style == "json":
        return dump_report(report).decode()
    if style == "markdown":
        from needle_export.report.markdown import render_markdown

        return render_markdown(report)
    from needle_export.report.text import render_text

    return render_text(report, color=color, width=width)
