"""Reports as GitHub-flavoured Markdown: the same facts as the text view, for pull requests and wikis."""

from __future__ import annotations

import re

from needle_export.report import view
from needle_export.report.schema import Report

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render_markdown(report: Report) -> str:
    """The report as Markdown, ending in a newline; nothing in it is taken for markup of its own."""
    lines = [f"# {escape(view.title(report))}", ""]
    for warning in view.warnings(report):
        lines += [f"> **{escape(warning)}**", ""]
    for artifact in report.artifacts:
        lines += [f"## {escape(f'{artifact.target} {artifact.weights}')}", "", "| | |", "|---|---|"]
        lines += [f"| **{escape(fact.label)}** | {escape(fact.value)} |"
                  for fact in view.facts(report, artifact)]
        lines.append("")
        if artifact.notes:
            lines += ["### Notes", "", *(f"- {escape(note)}" for note in artifact.notes), ""]
        for section in view.sections(report, artifact):
            lines += [*table(section), ""]
    lines.append(f"Made by {escape(report.tool.name)} {escape(report.tool.version)}, report schema "
                 f"{report.schema}.")
    return "\n".join(lines) + "\n"


def table(section: view.Section) -> list[str]:
    """A titled table, line by line."""
    rule = ["---:" if index in section.numbers else "---" for index in range(len(section.columns))]
    return [f"### {escape(section.title)}", "", _row([escape(name) for name in section.columns]),
            _row(rule), *(_row([escape(cell) for cell in row]) for row in section.rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join("".join(c if c.isprintable() else " " for c in text).split()))
