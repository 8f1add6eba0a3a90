"""needle-export web"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, progress_of
from needle_export.errors import BadInput


@define("web", "web dist/ --tools tools.json --out site/",
        "web dist/ --tools tools.json --title 'Home' --runtime node_modules/onnxruntime-web/dist --out site/")
@click.argument("dist", type=artifact_folder, metavar="DIR")
@click.option("--out", type=Path, required=True, metavar="SITE",
              help="Folder to write; a site that was written there before is replaced.")
@click.option("--tools", type=Path, required=True, metavar="FILE",
              help="JSON: the tools' schemas, flat or OpenAI-style.")
@click.option("--system", default="", metavar="TEXT", help="Instructions in front of every request.")
@click.option("--title", default="", metavar="TEXT", help="Of the page; after the model when left out.")
@click.option("--runtime", type=Path, metavar="DIR",
              help="Folder with onnxruntime-web's files; fetched with npm when left out.")
@json_option
def command(dist: Path, out: Path, tools: Path, system: str, title: str, runtime: Path | None, as_json: bool) -> None:
    """Write a static site that runs a build in a browser.

    DIR is a build with --target onnx and its tokenizer. SITE is served by any web server, from any folder of it, and
    loads nothing from anywhere else: a page to type requests into, the model, a grammar of the tools' calls, and
    onnxruntime-web, which is kept in the cache folder once it was fetched.
    """
    from needle_export.website import make_site

    with progress_of(silent=as_json) as progress:
        site = make_site(dist, out, tools=_read(tools), title=title, system=system, runtime=runtime, progress=progress)
    if as_json:
        totals = {key: sum(getattr(file, key) for file in site.files) for key in ("bytes", "gzip_bytes")}
        emit(json.dumps({**asdict(site), **totals}, indent=1, ensure_ascii=False) + "\n")
        return
    from needle_export.report.text import Page
    from needle_export.report.units import size
    from needle_export.report.view import Section

    page = Page(color=use_color(), width=page_width())
    page.title(f"{out}: {site.title}")
    page.note(f"runs in {site.runtime}; serve it with: python3 -m http.server -d {out}")
    if site.widened:
        page.note(f"{site.widened} matrices are integers in the files and become floats when a page loads them")
    for note in site.notes:
        page.note(note)
    rows = [(size(f.bytes), size(f.gzip_bytes), f.path) for f in sorted(site.files, key=lambda f: -f.bytes)]
    total = (size(sum(f.bytes for f in site.files)), size(sum(f.gzip_bytes for f in site.files)), "total")
    page.section(Section("What a visitor loads", ("bytes", "gzip", "file"), (*rows, total), frozenset({0, 1})))
    emit(page.text())


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"the file can't be read ({error.strerror})", where=str(path), fix="check the path") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"this isn't JSON ({str(error)[:100]})", where=str(path), fix="write it as JSON") from None
