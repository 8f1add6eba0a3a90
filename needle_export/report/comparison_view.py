"""A comparison as text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from needle_export.config.metrics import ANSWERS, METRICS, Metric
from needle_export.report.codec import to_json
from needle_export.report.comparison import Comparison
from needle_export.report.render import Style
from needle_export.report.units import plural, small
from needle_export.report.view import Section

#: Figures that JSON and the notes have, and the table has no room for, unless it is sorted by one.
_LEFT_OUT = ("compressed", "runtime_rss", "load_rss_all", "cache_kl", "artifact_kl", *ANSWERS)

RIGHT = ANSWERS[0]
"""The one of these that has a column where any artifact was evaluated."""

_BYTES = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def render(comparison: Comparison, style: Style, *, color: bool = False, width: int = 100) -> str:
    """The comparison, ending in a newline; ``color`` and ``width`` matter to "text" only."""
    if style == "json":
        return to_json(comparison)
    if style == "markdown":
        return _markdown(comparison)
    return _text(comparison, color=color, width=width)


def table(comparison: Comparison) -> Section:
    """The table: a row for each artifact, a unit for each column."""
    rows = comparison.rows
    figures = [_column(metric, [row.metrics[metric.name].value for row in rows]) for metric in _shown(comparison)]
    columns = ("", "folder", "artifact", *(head for head, _ in figures))
    cells = tuple(
        ("*" if row.unbeaten else "", row.folder, f"{row.target} {row.weights}", *(column[at] for _, column in figures))
        for at, row in enumerate(rows)
    )
    return Section(plural(len(rows), "artifact"), columns, cells, frozenset(range(3, len(columns))))


def _shown(comparison: Comparison) -> list[Metric]:
    """Figures that have a column; what rounded caches cost, and answers, have one where any artifact has them."""
    told = [row.metrics["cache_kl"] for row in comparison.rows]
    rounded = any(cost.value is not None and not cost.why for cost in told)
    wanted = {comparison.sort, "cache_kl" if rounded else ""}
    if any(row.metrics[RIGHT].value is not None for row in comparison.rows):
        wanted.add(RIGHT)
    return [metric for metric in METRICS if metric.name not in _LEFT_OUT or metric.name in wanted]


def _column(metric: Metric, values: Sequence[float | None]) -> tuple[str, list[str]]:
    """A figure of all rows in one unit: the head with it, and the cells."""
    known = [value for value in values if value is not None]
    # By the smallest, so that none loses its digits.
    unit, factor, form = _scale(metric, min((value for value in known if value), default=0.0))
    # In two lines, so that a terminal of 100 columns has room for all.
    head = "\n".join(f"{metric.title} {unit if known else ''}".split(maxsplit=1))
    return head, ["-" if value is None else form(value / factor) for value in values]


def _scale(metric: Metric, least: float) -> tuple[str, float, Callable[[float], str]]:
    """Unit of a column, what its values are divided by, and how they are written."""
    match metric.unit:
        case "bytes":
            unit, factor = next((pair for pair in _BYTES if least >= pair[1]), ("B", 1))
            return unit, factor, _whole if factor == 1 else _one_digit if least >= 10 * factor else _two_digits
        case "ms":
            return "ms", 1, _two_digits
        case "tokens/s":
            return "tok/s", 1, _whole
        case "share":
            return "%", 0.01, _one_digit
        case _:
            return "", 1, small


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _one_digit(value: float) -> str:
    return f"{value:,.1f}"


def _two_digits(value: float) -> str:
    return f"{value:,.2f}"


def _text(comparison: Comparison, *, color: bool, width: int) -> str:
    from needle_export.report.text import Page

    page = Page(color=color, width=width)
    for warning in comparison.warnings:
        page.warning(warning)
    page.section(table(comparison))
    for note in comparison.notes:
        page.note(note)
    return page.text()


def _markdown(comparison: Comparison) -> str:
    from needle_export.report.markdown import escape
    from needle_export.report.markdown import table as as_markdown

    lines = [line for warning in comparison.warnings for line in (f"> **{escape(warning)}**", "")]
    lines += [*as_markdown(table(comparison)), "", *(f"- {escape(note)}" for note in comparison.notes)]
    return "\n".join(lines) + "\n"
