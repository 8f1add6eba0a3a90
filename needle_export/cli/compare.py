"""needle-export compare"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, save, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, new_file
from needle_export.report.comparison import SORTS, compare, read
from needle_export.report.comparison_view import render
from needle_export.report.render import STYLES, Style

_SORTS = tuple(name.replace("_", "-") for name in SORTS)


@define("compare", "compare dist/fp16 dist/int8 dist/int4", "compare dist/* --sort decode",
        "compare dist/int8 dist-tflite/ --format markdown --out comparison.md", "compare dist/* --json")
@click.argument("folders", type=artifact_folder, metavar="DIR...", nargs=-1, required=True)
@click.option("--sort", type=click.Choice(_SORTS), default=_SORTS[0], show_default=True, metavar="COLUMN",
              help=f"Column to sort by, the best first: {', '.join(_SORTS)}.")
@click.option("--format", "style", type=click.Choice(STYLES), default="text",
              show_default=True, help="How to write it.")
@click.option("--out", type=new_file, metavar="FILE",
              help="File to write instead of stdout.")
@json_option
def command(folders: tuple[Path, ...], sort: str, style: Style, out: Path | None, as_json: bool) -> None:
    """Set published builds side by side.

    Each DIR is a folder that a build has written, or a report alone, such as what bench --json prints. Nothing is run.
    An artifact that no other beats on both size and loss is marked. What a scheme does to the model (KL, tokens
    equal) and what the artifact adds to that are separate columns. --json is --format json.
    """
    found = compare([(str(folder), read(folder)) for folder in folders], sort.replace("-", "_"))
    text = render(found, "json" if as_json else style, color=out is None and use_color(), width=page_width())
    if out is None:
        emit(text)
    else:
        save(out, text)
