"""needle-export report"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, save, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, new_file
from needle_export.report.render import STYLES, Style, render
from needle_export.report.schema import load_report


@define("report", "report dist/", "report dist/ --format markdown --out report.md",
        "report dist/ --format json")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.option("--format", "style", type=click.Choice(STYLES), default="text",
              show_default=True, help="How to write it.")
@click.option("--out", type=new_file, metavar="FILE",
              help="File to write instead of stdout.")
@json_option
def command(folder: Path, style: Style, out: Path | None, as_json: bool) -> None:
    """Show the report of a published build.

    DIR is a folder that a build has written, or the report.json in it. --json is --format json.
    """
    style = "json" if as_json else style
    text = render(load_report(folder), style, color=out is None and use_color(), width=page_width())
    if out is None:
        emit(text)
    else:
        save(out, text)
