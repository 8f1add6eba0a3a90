"""A difference of two reports as text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Sequence

from needle_export.report.codec import to_json
from needle_export.report.difference import ArtifactDifference, Change, Difference, FigureChange
from needle_export.report.gate_view import shown
from needle_export.report.render import Style
from needle_export.report.units import plural, signed_size, size, whole
from needle_export.report.view import Fact, Section, ranges

_MAX_ROWS = 20


def render_difference(found: Difference, style: Style, *, color: bool = False, width: int = 100) -> str:
    """The difference, ending in a newline; ``color`` and ``width`` matter to "text" only."""
    if style == "json":
        return to_json(found)
    if style == "markdown":
        return _markdown(found)
    return _text(found, color=color, width=width)


def title(artifact: ArtifactDifference) -> str:
    """Both names, as short as they tell what is meant."""
    return f"{artifact.old} → {artifact.new}"


def facts(artifact: ArtifactDifference) -> list[Fact]:
    """Totals, and what was decided otherwise."""
    out = [Fact("size", _grown(artifact.total)), Fact("in a zip", _grown(artifact.compressed))]
    out += [Fact(s.name, f"{s.old or 'none'} → {s.new or 'none'}") for s in artifact.settings]
    return out


def sections(artifact: ArtifactDifference) -> list[Section]:
    """Tables of what differs, those that explain growth first; empty ones are left out."""
    total = artifact.total.delta
    tensors = [(t.name, t.role, ", ".join(ranges(t.layers)), _count(t.old), _count(t.new), signed_size(t.delta))
               for t in artifact.tensors]
    every = [
        Section("Bytes by role", ("role", "old", "new", "change", "of it"),
                tuple((c.name, _count(c.old), _count(c.new), signed_size(c.delta), _share(c.delta, total))
                      for c in artifact.roles), frozenset({1, 2, 3, 4})),
        Section("Bytes by tensor", ("tensor", "role", "blocks", "old", "new", "change"), _cut(tensors, "tensor"),
                frozenset({3, 4, 5})),
        _counts("Files", "file", artifact.files, in_bytes=True),
        _counts("State between steps", "part", artifact.state, in_bytes=True),
        _counts("Graph nodes", "graph", artifact.nodes, in_bytes=False),
        _counts("Nodes of decode by operator", "operator", artifact.ops, in_bytes=False),
        _figures(artifact.figures),
    ]
    return [section for section in every if section.rows]


def _counts(heading: str, noun: str, changes: Sequence[Change], *, in_bytes: bool) -> Section:
    rows = [(c.name, _count(c.old), _count(c.new), signed_size(c.delta) if in_bytes else f"{c.delta:+,}")
            for c in changes]
    return Section(heading, (noun, "old", "new", "change"), _cut(rows, noun), frozenset({1, 2, 3}))


def _figures(figures: Sequence[FigureChange]) -> Section:
    rows = []
    for f in figures:
        old, new = ("-" if x is None else shown(x, f.unit) for x in (f.old, f.new))
        change = f.why if f.delta is None else "none" if f.delta == 0 else _signed(f)
        if f.old is not None or f.new is not None:
            rows.append((f.metric, old, new, change))
    return Section("Speed, memory and losses", ("figure", "old", "new", "change"), tuple(rows), frozenset({1, 2}))


def _signed(figure: FigureChange) -> str:
    assert figure.delta is not None
    sign = "+" if figure.delta > 0 else "-"
    told = f"{100 * abs(figure.delta):.2g} points" if figure.unit == "share" else shown(abs(figure.delta), figure.unit)
    share = f" ({100 * figure.delta / figure.old:+.1f} %)" if figure.old and figure.unit != "share" else ""
    return f"{sign}{told}{share}"


def _grown(change: Change) -> str:
    old, new = change.old or 0, change.new or 0
    if not change.delta:
        return f"{size(new)}, no change"
    share = f", {100 * change.delta / old:+.1f} %" if old else ""
    return f"{size(old)} → {size(new)} ({signed_size(change.delta)}{share})"


def _count(value: int | None) -> str:
    return "-" if value is None else whole(value)


def _share(part: int, total: int) -> str:
    """Of the growth; a part that went the other way is below 0."""
    return f"{100 * part / total:.0f} %" if total else ""


def _cut(rows: Sequence[tuple[str, ...]], noun: str) -> tuple[tuple[str, ...], ...]:
    """The first rows, and how many there are more."""
    if len(rows) <= _MAX_ROWS:
        return tuple(rows)
    rest = plural(len(rows) - _MAX_ROWS, f"more {noun}")
    return (*rows[:_MAX_ROWS], (f"{rest}: see --json", *[""] * (len(rows[0]) - 1)))


def _notes(found: Difference) -> list[str]:
    notes = [f"only in the new report: {name}" for name in found.added]
    return notes + [f"only in the old report: {name}" for name in found.removed]


def _text(found: Difference, *, color: bool, width: int) -> str:
    from needle_export.report.text import Page

    page = Page(color=color, width=width)
    for warning in found.warnings:
        page.warning(warning)
    for artifact in found.artifacts:
        page.heading(title(artifact))
        page.facts(facts(artifact))
        for section in sections(artifact):
            page.section(section)
    for note in _notes(found):
        page.note(note)
    return page.text()


def _markdown(found: Difference) -> str:
    from needle_export.report.markdown import escape
    from needle_export.report.markdown import table as as_markdown

    lines = [line for warning in found.warnings for line in (f"> **{escape(warning)}**", "")]
    for artifact in found.artifacts:
        lines += [f"## {escape(title(artifact))}", "", "| | |", "|---|---|"]
        lines += [f"| **{escape(fact.label)}** | {escape(fact.value)} |" for fact in facts(artifact)]
        lines.append("")
        for section in sections(artifact):
            lines += [*as_markdown(section), ""]
    lines += [f"- {escape(note)}" for note in _notes(found)]
    return "\n".join(lines).rstrip("\n") + "\n"
