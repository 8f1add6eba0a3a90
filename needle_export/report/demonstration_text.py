"""The demonstration as one table: a line for each target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from needle_export.report.text import Page
from needle_export.report.units import milliseconds, size
from needle_export.report.view import Section

if TYPE_CHECKING:
    from needle_export.demonstration import Row

#: Room for the answer.
_SHORT = {"verified-on-runtime": "verified", "verified-by-evaluator": "evaluated"}


def render_demonstration(query: str, rows: Sequence[Row], *, color: bool, width: int) -> str:
    """What each target answered, how large it is, and how fast it was."""
    cells = []
    for row in rows:
        found = None if row.session is None else row.session.answers[0]
        cells.append((
            row.target,
            row.weights,
            "-" if row.bytes is None else size(row.bytes),
            row.answer or "-",
            "-" if found is None or found.tokens_per_s is None else f"{found.tokens_per_s:,.0f}",
            "-" if found is None else milliseconds(found.first_token_ms),
            _SHORT.get(row.status, row.status) if row.error is None else "not here" if row.absent else "failed",
        ))
    page = Page(color=color, width=width)
    columns = ("target", "scheme", "size", "answer", "tokens/s", "first token", "status")
    page.section(Section(query, columns, tuple(cells), frozenset({2, 4, 5})))
    page.note("verified: run in its runtime and compared with the reference; evaluated: so in an evaluator of ours, "
              "whose speed says nothing about a device")
    page.note("the model that comes along is a demonstration, not Needle 3; times are of one request, on this machine")
    return page.text()
