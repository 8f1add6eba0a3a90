"""needle-export demo"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from needle_export.cli.failures import describe
from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import define, json_option, names, progress_of
from needle_export.config.options import TARGETS, WEIGHTS
from needle_export.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from needle_export.demonstration import Row


@define("demo", "demo", 'demo --targets onnx,tflite --query "set the heating to 21 degrees"',
        "demo --weights fp16 --out demo-builds/ --json")
@click.option("--targets", type=names, default=",".join(TARGETS), show_default=True, metavar="NAMES",
              help="Targets to build for, separated by commas.")
@click.option("--query", metavar="TEXT", help='The request; "turn on the kitchen lights" if left out.')
@click.option("--weights", type=click.Choice(WEIGHTS), default="int4", show_default=True,
              help="How the weights lie in the files.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder to keep the builds in, one for each target; they aren't kept if left out.")
@json_option
def command(targets: tuple[str, ...], query: str | None, weights: str, out: Path | None, as_json: bool) -> None:
    """Build the small model that comes along, and ask it.

    The model is a demonstration, not Needle 3: it calls six tools of a home assistant. It is exported and verified for
    each target, and then asked one request in the target's own runtime (a Core ML build in the evaluator). A target
    whose runtime isn't installed says so and fails only if no other could be asked.
    """
    for target in targets:
        if target not in TARGETS:
            raise UsageError(f"there is no target {target!r}", where="--targets",
                             fix=f"choose from {', '.join(TARGETS)}")
    if not targets or len(set(targets)) < len(targets):
        raise UsageError("each target is named once", where="--targets")
    from needle_export import demonstration, reuse
    from needle_export.report.demonstration_text import render_demonstration

    query = demonstration.QUERY if query is None else query
    with _folder(out) as folder, progress_of(silent=as_json) as progress:
        rows = list(demonstration.run(targets, query, weights, folder, progress, reuse.open_cache()))
    if as_json:
        emit(_json(query, rows))
    else:
        emit(render_demonstration(query, rows, color=use_color(), width=page_width()))
    failures = [(row.target, describe(row.error)) for row in rows if row.error is not None]
    for target, failure in failures:
        click.echo(f"error: {target}: {failure.sentence}", err=True)
    codes = [describe(row.error).exit_code for row in rows if row.error is not None and not row.absent]
    if codes or len(failures) == len(rows):
        raise click.exceptions.Exit(codes[0] if codes else Unsupported.exit_code)


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The folder for the builds, or one that goes when the command ends."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="needle-export-demo-") as folder:
        yield Path(folder)


def _json(query: str, rows: Sequence[Row]) -> str:
    from needle_export.report.codec import encode

    listed: list[dict[str, Any]] = [
        {
            "target": row.target,
            "weights": row.weights,
            "status": row.status or None,
            "total_bytes": row.bytes,
            "session": None if row.session is None else encode(row.session),
            "error": None if row.error is None else json.loads(describe(row.error).as_json())["error"],
        }
        for row in rows
    ]
    return json.dumps({"query": query, "targets": listed}, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
