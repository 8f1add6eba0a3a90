"""A gate's verdicts as text, Markdown, JSON, or annotations that GitHub shows beside the lines of a file."""

from __future__ import annotations

from collections.abc import Callable

from needle_export.config.metrics import Unit
from needle_export.report.codec import to_json
from needle_export.report.gate import Gate, Status, Verdict
from needle_export.report.render import GateStyle
from needle_export.report.units import milliseconds, percent, rate, signed_size, size, small
from needle_export.report.view import Section

STATUS_WORDS: dict[Status, str] = {
    "within": "within",
    "exceeded": "EXCEEDED",
    "unknown": "NOT KNOWN",
    "unmatched": "NOTHING MATCHES",
    "skipped": "skipped",
}
"""Statuses as people read them; what fails is in capitals."""

_MARKS: dict[Status, str] = {"within": "✅", "exceeded": "❌", "unknown": "❌", "unmatched": "❌", "skipped": "➖"}


def render_gate(gate: Gate, style: GateStyle, *, color: bool = False, width: int = 100) -> str:
    """The verdicts, ending in a newline; ``color`` and ``width`` matter to "text" only."""
    if style == "json":
        return to_json(gate)
    if style == "markdown":
        return _markdown(gate)
    if style == "github":
        return _annotations(gate)
    return _text(gate, color=color, width=width)


def summary(gate: Gate) -> str:
    """All in a line: ``3 within, 1 exceeded``."""
    counts = {status: sum(v.status == status for v in gate.verdicts) for status in STATUS_WORDS}
    told = [f"{count} {STATUS_WORDS[status].lower()}" for status, count in counts.items() if count]
    return ", ".join(told)


def sentence(verdict: Verdict) -> str:
    """A verdict in words, without its place: what is asked, what is, and by how much that is too much."""
    parts = [f"{artifact(verdict)}: " if verdict.report else "", verdict.budget]
    if verdict.value is not None:
        parts.append(f"; it is {shown(verdict.value, verdict.unit)}")
        if verdict.basis != "counted":
            parts.append(f" ({verdict.basis} {verdict.where})")
    if verdict.bound is not None and verdict.baseline is not None:
        parts.append(f", against {shown(verdict.baseline, verdict.unit)} of the baseline")
    if verdict.status == "exceeded":
        parts.append(f": {_room(verdict)}")
    if verdict.why:
        parts.append(f"; {verdict.why}")
    return "".join(parts)


def artifact(verdict: Verdict) -> str:
    """The artifact that a verdict is on, as notes call it."""
    return f"{verdict.report} {verdict.target} {verdict.weights}".strip()


def shown(value: float, unit: Unit) -> str:
    """A figure as people read it."""
    forms: dict[Unit, Callable[[float], str]] = {
        "bytes": lambda x: size(round(x)),
        "ms": milliseconds,
        "tokens/s": rate,
        "share": lambda x: f"{100 * x:.3g} %",
        "nats": lambda x: f"{small(x)} nats",
        "logit": small,
    }
    return forms[unit](value)


def _room(verdict: Verdict) -> str:
    """How much is left of a budget, or how much is too much; empty where there is no comparison."""
    if verdict.value is None or verdict.bound is None:
        return ""
    left = verdict.bound - verdict.value if verdict.upper else verdict.value - verdict.bound
    over = "left" if left >= 0 else "over" if verdict.upper else "short"
    if verdict.unit == "bytes":
        told = signed_size(round(abs(left))).lstrip("+")
    elif verdict.unit == "share":
        told = f"{100 * abs(left):.2g} points"
    else:
        told = shown(abs(left), verdict.unit)
    # In per mille, as a few bytes over a budget of megabytes are over all the same.
    share = percent(round(1000 * abs(left) / verdict.bound), 1000) if verdict.bound and verdict.unit != "share" else ""
    return f"{told} {over}{f' ({share})' if share else ''}"


def table(gate: Gate) -> Section:
    """A row for each verdict."""
    rows = []
    for v in gate.verdicts:
        word = "≤" if v.upper else "≥"
        bound = "" if v.bound is None else f"{word} {shown(v.bound, v.unit)}"
        value = "-" if v.value is None else f"{shown(v.value, v.unit)}{'' if v.basis != 'estimated' else ' est.'}"
        rows.append((STATUS_WORDS[v.status], _figure(v), artifact(v), value, bound, _room(v)))
    return Section(summary(gate), ("status", "figure", "artifact", "is", "allowed", "difference"), tuple(rows),
                   frozenset({3, 4, 5}))


def notes(gate: Gate) -> list[str]:
    """Reasons, and where measured values are of; then budgets that could be tighter."""
    told = [f"{STATUS_WORDS[v.status]}: {_place(v)}: {sentence(v)}" for v in gate.verdicts
            if v.status in ("unknown", "unmatched", "skipped")]
    places: dict[tuple[str, str], list[str]] = {}
    for v in gate.verdicts:
        if v.basis != "counted" and v.bound is not None:
            places.setdefault((v.basis, v.where), []).append(v.metric)
    told += [f"{', '.join(dict.fromkeys(metrics))}: {basis} {where}" for (basis, where), metrics in places.items()]
    told += [f"baseline: {_figure(v)} of {artifact(v)} was {shown(v.baseline, v.unit)}"
             for v in gate.verdicts if v.baseline is not None and v.bound is not None]
    return told + suggestions(gate)


def suggestions(gate: Gate) -> list[str]:
    """A line for every budget that could be tighter for all artifacts that it is about."""
    tight: dict[tuple[str, int | None, str], list[Verdict]] = {}
    for v in gate.verdicts:
        tight.setdefault((v.file, v.line, v.budget), []).append(v)
    out = []
    for group in tight.values():
        largest = max(group, key=lambda v: v.value or 0)
        # One artifact that needs the room is reason enough to keep it.
        if all(v.suggestion for v in group):
            used = shown(largest.value or 0, largest.unit)
            out.append(f"could be tighter: {_place(largest)}: {largest.budget}; {used} is used; {largest.suggestion} "
                       "would keep it so")
    return out


def _figure(verdict: Verdict) -> str:
    return f"{verdict.metric} {verdict.role}" if verdict.role else verdict.metric


def _place(verdict: Verdict) -> str:
    return verdict.file if verdict.line is None else f"{verdict.file}, line {verdict.line}"


def _text(gate: Gate, *, color: bool, width: int) -> str:
    from needle_export.report.text import Page

    page = Page(color=color, width=width)
    for warning in gate.warnings:
        page.warning(warning)
    page.section(table(gate))
    for note in notes(gate):
        page.note(note)
    return page.text()


def _markdown(gate: Gate) -> str:
    """For a comment: the verdict first, then the table, then notes."""
    from needle_export.report.markdown import escape
    from needle_export.report.markdown import table as as_markdown

    title = "Budgets: within" if gate.exit_code == 0 else "Budgets: **not met**"
    shown_table = table(gate)
    marked = tuple((f"{_MARKS[v.status]} {row[0]}", *row[1:])
                   for v, row in zip(gate.verdicts, shown_table.rows, strict=True))
    lines = [f"## {title}", ""]
    lines += [line for warning in gate.warnings for line in (f"> **{escape(warning)}**", "")]
    lines += as_markdown(Section(shown_table.title, shown_table.columns, marked, shown_table.numbers))
    told = notes(gate)
    lines += ["", *(f"- {escape(note)}" for note in told)] if told else []
    return "\n".join(lines) + "\n"


def _annotations(gate: Gate) -> str:
    """Workflow commands, one a line; a line that says how it went comes last, for whoever reads the log."""
    lines = [f"::warning title=Random weights::{_data(warning)}" for warning in gate.warnings]
    for v in gate.verdicts:
        if v.status in ("exceeded", "unknown", "unmatched"):
            title = f"Budget {STATUS_WORDS[v.status].lower()}: {v.metric}"
            lines.append(f"::error {_properties(v, title)}::{_data(sentence(v))}")
    for note in suggestions(gate):
        lines.append(f"::notice title=Budget could be tighter::{_data(note)}")
    return "\n".join([*lines, f"budgets: {summary(gate)}"]) + "\n"


def _properties(verdict: Verdict, title: str) -> str:
    line = "" if verdict.line is None else f",line={verdict.line}"
    # A device's or a recipe's own budget is in no file of whoever reads this.
    file = f"file={_property(verdict.file)}{line}," if verdict.in_file else ""
    return f"{file}title={_property(title)}"


def _data(text: str) -> str:
    """A message of a workflow command, in which a line end would begin another."""
    clean = "".join(c if c.isprintable() or c in "\r\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
