"""needle-export diff"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, save, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, new_file
from needle_export.report.render import STYLES, Style


@define("diff", "diff main/dist dist", "diff old/report.json dist/ --format markdown --out diff.md",
        "diff main/dist dist --json")
@click.argument("old", type=artifact_folder, metavar="OLD")
@click.argument("new", type=artifact_folder, metavar="NEW")
@click.option("--format", "style", type=click.Choice(STYLES), default="text", show_default=True,
              help="How to write it.")
@click.option("--out", type=new_file, metavar="FILE", help="File to write instead of stdout.")
@json_option
def command(old: Path, new: Path, style: Style, out: Path | None, as_json: bool) -> None:
    """Explain what changed from one build to another.

    OLD and NEW are folders that a build has written, or reports alone. Growth is told by role and by tensor, the
    largest change first; then files, state, operators, speed and losses. Nothing is run. --json is --format json.
    """
    from needle_export.report.comparison import read
    from needle_export.report.difference import difference
    from needle_export.report.difference_view import render_difference

    found = difference((str(old), read(old)), (str(new), read(new)))
    text = render_difference(found, "json" if as_json else style, color=out is None and use_color(),
                             width=page_width())
    if out is None:
        emit(text)
    else:
        save(out, text)
