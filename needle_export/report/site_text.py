"""A site that was written, in words: what a visitor loads, the largest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from needle_export.report.text import Page
from needle_export.report.units import size
from needle_export.report.view import Section

if TYPE_CHECKING:
    from needle_export.website import Site


def render_site(site: Site, *, color: bool, width: int) -> str:
    """The page for people; its bytes as they lie, and as gzip makes them."""
    page = Page(color=color, width=width)
    page.title(f"{site.out}: {site.title}")
    page.note(f"runs in {site.runtime}; serve it with: python3 -m http.server -d {site.out}")
    page.note(f"tools: {site.tools}")
    if site.widened:
        page.note(f"{site.widened} matrices are integers in the files and become floats when a page loads them")
    for note in site.notes:
        page.note(note)
    rows = [(size(f.bytes), size(f.gzip_bytes), f.path) for f in sorted(site.files, key=lambda f: -f.bytes)]
    total = (size(site.bytes), size(site.gzip_bytes), "total")
    page.section(Section("What a visitor loads", ("bytes", "gzip", "file"), (*rows, total), frozenset({0, 1})))
    return page.text()
