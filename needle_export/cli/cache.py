"""needle-export cache"""

from __future__ import annotations

import json
import time

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import define, json_option


@define("cache", "cache", "cache --json", "cache --clear")
@click.option("--clear", is_flag=True, help="Remove every entry that no running build is using.")
@json_option
def command(clear: bool, as_json: bool) -> None:
    """Show the cache of earlier builds, or clear it.

    Entries are verified artifacts and rounded matrices, found again by everything that decided them. The folder is the
    user's cache folder or NEEDLE_EXPORT_CACHE ("off" for none); what was longest unused is dropped when it takes more
    than 10 GB or NEEDLE_EXPORT_CACHE_LIMIT, such as "2 GB".
    """
    from needle_export import reuse
    from needle_export.report.units import size

    cache = reuse.open_cache()
    removed = cache.clear() if cache is not None and clear else []
    entries = [] if cache is None else cache.entries()
    taken = sum(e.bytes for e in entries)
    if as_json:
        emit(json.dumps({
            "folder": None if cache is None else str(cache.folder),
            "limit_bytes": None if cache is None else cache.limit,
            "bytes": taken,
            "entries": [{"key": e.key, "about": e.about, "bytes": e.bytes, "used": _date(e.used)} for e in entries],
            "removed": [e.key for e in removed],
        }, indent=1, ensure_ascii=False) + "\n")
        return
    from needle_export.report.text import Page
    from needle_export.report.view import Section

    page = Page(color=use_color(), width=page_width())
    if cache is None:
        page.note(f"the cache is switched off by {reuse.FOLDER}")
    else:
        page.note(f"folder: {cache.folder}")
        page.note(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {size(taken)} of at most "
                  f"{size(cache.limit)}")
    if removed:
        page.note(f"removed: {size(sum(e.bytes for e in removed))}")
    if entries:
        rows = tuple((size(e.bytes), _date(e.used), e.about) for e in entries)
        page.section(Section("Entries", ("size", "last used", "what"), rows, frozenset({0})))
    emit(page.text())


def _date(seconds: float) -> str:
    """A moment in this machine's time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
