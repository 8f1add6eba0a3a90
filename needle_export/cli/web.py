"""needle-export web"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, progress_of


@define("web", "web dist/ --tools tools.json --out site/",
        "web dist/ --tools tools.json --title 'Home' --runtime node_modules/onnxruntime-web/dist --out site/")
@click.argument("dist", type=artifact_folder, metavar="DIR")
@click.option("--out", type=Path, required=True, metavar="SITE",
              help="Folder to write; a site that was written there before is replaced.")
@click.option("--tools", type=Path, metavar="FILE",
              help="JSON: the tools' schemas, flat or OpenAI-style. Builds of the model that comes along have its own "
                   "if left out; any other needs it.")
@click.option("--tokenizer", type=Path, metavar="FILE",
              help="The model's tokenizer; the one that lies beside the build if left out.")
@click.option("--system", default="", metavar="TEXT", help="Instructions in front of every request.")
@click.option("--title", default="", metavar="TEXT", help="Of the page; after the model when left out.")
@click.option("--runtime", type=Path, metavar="DIR",
              help="Folder with onnxruntime-web's files; fetched with npm when left out.")
@json_option
def command(dist: Path, out: Path, tools: Path | None, tokenizer: Path | None, system: str, title: str,
            runtime: Path | None, as_json: bool) -> None:
    """Write a static site that runs a build in a browser.

    DIR is a build with --target onnx. SITE is served by any web server, from any folder of it, and
    loads nothing from anywhere else: a page to type requests into, the model, a grammar of the tools' calls, and
    onnxruntime-web, which is kept in the cache folder once it was fetched.
    """
    from needle_export.report.codec import to_json
    from needle_export.report.site_text import render_site
    from needle_export.website import make_site

    with progress_of(silent=as_json) as progress:
        site = make_site(dist, out, tools=tools, title=title, system=system, tokenizer=tokenizer, runtime=runtime,
                         progress=progress)
    emit(to_json(site) if as_json else render_site(site, color=use_color(), width=page_width()))
