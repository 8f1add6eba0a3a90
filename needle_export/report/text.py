"""Reports and inspections for a terminal, and the tables that they share."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from needle_export.report import view
from needle_export.report.schema import Report
from needle_export.report.units import bar

_STYLES = {"plain": "", "good": "green", "bad": "bold red"}
_BAR_CELLS = 24
_MIN_WIDTH = 40


def render_text(report: Report, *, color: bool = False, width: int = 100) -> str:
    """The report for a terminal ``width`` columns wide, ending in a newline; ANSI codes with ``color``."""
    page = Page(color=color, width=width)
    page.title(view.title(report))
    for warning in view.warnings(report):
        page.warning(warning)
    for artifact in report.artifacts:
        page.heading(f"{artifact.target} {artifact.weights}")
        page.facts(view.facts(report, artifact))
        if artifact.notes:
            page.heading("Notes")
            for note in artifact.notes:
                page.note(note)
        for section in view.sections(report, artifact):
            page.section(section)
    return page.text()


class Page:
    """A page of text: titles, facts, tables, in the order in which they are added.

    Control characters in any text are shown as a replacement, so that a file's name can't steer the
    reader's terminal.
    """

    def __init__(self, *, color: bool, width: int) -> None:
        self._file = io.StringIO()
        self._color = color
        # Without a height, the environment's TERM would decide about the width.
        self._console = Console(
            file=self._file, width=max(width, _MIN_WIDTH), height=50, force_terminal=color,
            no_color=not color, color_system="standard" if color else None, markup=False, emoji=False,
            highlight=False, legacy_windows=False)

    def title(self, text: str) -> None:
        """The first line."""
        self._console.print(Text(clean(text), style="bold"))

    def warning(self, text: str) -> None:
        """A line that mustn't be missed."""
        self._console.print(Text(f"! {clean(text)}", style="bold red"))

    def heading(self, text: str) -> None:
        """A line above what belongs together."""
        self._console.print()
        self._console.print(Text(clean(text), style="bold"))

    def note(self, text: str) -> None:
        """A paragraph with a dash."""
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text("  -"), Text(clean(text)))
        self._console.print(grid)

    def facts(self, facts: Sequence[view.Fact]) -> None:
        """Labels and values in two columns."""
        grid = Table.grid(padding=(0, 2))
        for fact in facts:
            value = Text(clean(fact.value), style=_STYLES[fact.mood])
            grid.add_row(Text(f"  {fact.label}", style="dim"), value)
        self._console.print(grid)

    def section(self, section: view.Section) -> None:
        """A titled table; nothing without rows."""
        if not section.rows:
            return
        self.heading(section.title)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column("")  # an indent
        for index, name in enumerate(section.columns):
            table.add_column(name, justify="right" if index in section.numbers else "left", overflow="fold")
        if section.bars is not None:
            table.add_column("", no_wrap=True)
        for index, row in enumerate(section.rows):
            cells = [Text(""), *(Text(clean(cell)) for cell in row)]
            if section.bars is not None:
                cells.append(Text(bar(round(section.bars[index] * 10**6), 10**6, _BAR_CELLS), style="cyan"))
            table.add_row(*cells)
        self._console.print(table)

    def text(self) -> str:
        """All of it, ending in a newline; without trailing blanks when there are no colours."""
        text = self._file.getvalue()
        if self._color:
            return text
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def clean(text: str) -> str:
    """The text with every control character replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
