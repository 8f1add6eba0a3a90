"""The tables of weight schemes and of formats of caches: for a terminal, as Markdown and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from needle_export.config.schemes import ALL, CACHES, Held


def as_dict(targets: Sequence[str]) -> dict[str, Any]:
    """Every scheme, and every format of caches, with what it is in each of the targets."""
    return {
        "schemes": [
            {"name": s.name, "bits": s.bits, "what": s.what, "targets": {t: asdict(s.targets[t]) for t in targets}}
            for s in ALL
        ],
        "caches": [
            {"name": c.name, "what": c.what, "targets": {t: asdict(c.targets[t]) for t in targets}} for c in CACHES
        ],
    }


def cell(held: Held) -> str:
    """What one target makes of a scheme."""
    if not held.form:
        return f"no: {held.why_not}"
    return f"{held.form}; inputs {held.inputs}" if held.inputs else held.form


def rows(targets: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for each scheme."""
    return [(s.name, str(s.bits), s.what, *(cell(s.targets[t]) for t in targets)) for s in ALL]


def cache_rows(targets: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for each format of caches."""
    return [(c.name, c.what, *(cell(c.targets[t]) for t in targets)) for c in CACHES]


def render(targets: Sequence[str], *, color: bool = False, width: int = 100) -> str:
    """For a terminal, ending in a newline."""
    from needle_export.report.text import Page
    from needle_export.report.view import Section

    page = Page(color=color, width=width)
    columns = ("--weights", "bits", "what", *targets)
    page.section(Section("Weight schemes", columns, tuple(rows(targets)), frozenset({1})))
    page.note("scales come on top of the bits: a quarter of a bit in ONNX's blocks, half a bit in Core ML's")
    page.note("what doesn't divide into blocks, or is small, stays a float, and each build's report names it")
    page.section(Section("Caches", ("--cache", "what", *targets), tuple(cache_rows(targets)), frozenset()))
    return page.text()


def markdown(targets: Sequence[str]) -> str:
    """The same as a Markdown table, ending in a newline."""
    return _table(("`--weights`", "bits", "what", *(f"`{t}`" for t in targets)), rows(targets))


def cache_markdown(targets: Sequence[str]) -> str:
    """The formats of caches as a Markdown table, ending in a newline."""
    return _table(("`--cache`", "what", *(f"`{t}`" for t in targets)), cache_rows(targets))


def _table(columns: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *((f"`{row[0]}`", *row[1:]) for row in body)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
