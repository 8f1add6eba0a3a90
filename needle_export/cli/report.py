"""needle-export report"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, save, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, new_file
from needle_export.errors import UsageError
from needle_export.report.render import STYLES, render
from needle_export.report.schema import load_report


@define("report", "report dist/", "report dist/ --format markdown --out report.md",
        "report dist/ --format json", "report dist/int8 dist/int4 --format html --out report.html")
@click.argument("folders", type=artifact_folder, metavar="DIR...", nargs=-1, required=True)
@click.option("--format", "style", type=click.Choice((*STYLES, "html")), default="text",
              show_default=True, help="How to write it.")
@click.option("--out", type=new_file, metavar="FILE",
              help="File to write instead of stdout.")
@json_option
def command(folders: tuple[Path, ...], style: str, out: Path | None, as_json: bool) -> None:
    """Show the report of a published build.

    DIR is a folder that a build has written, or the report.json in it. --json is --format json.
    With --format html several of them make one page, which needs nothing beside it and no network.
    """
    style = "json" if as_json else style
    if style != "html" and len(folders) > 1:
        raise UsageError(f"{len(folders)} reports make one page only as HTML", where="DIR",
                         fix="add --format html, or use compare")
    # A list is complete before the first is shown, so that a damaged one leaves nothing half written.
    reports = [(str(folder), load_report(folder)) for folder in folders]
    if style == "html":
        from needle_export.report.page import render_page

        text = render_page(reports)
    else:
        form = next(name for name in STYLES if name == style)
        text = render(reports[0][1], form, color=out is None and use_color(), width=page_width())
    if out is None:
        emit(text)
    else:
        save(out, text)
