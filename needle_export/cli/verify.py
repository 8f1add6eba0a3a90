"""needle-export verify"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.shared import artifact_folder, define, json_option, print_report, progress_of


@define("verify", "verify dist/", "verify dist/ --checkpoint needle3.safetensors --json")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.option("--checkpoint", metavar="CHECKPOINT",
              help="Compare with the reference made anew from this file, not with the recorded one.")
@json_option
def command(folder: Path, checkpoint: str | None, as_json: bool) -> None:
    """Check a published build again, later or on another machine.

    DIR is a folder that a build has written. Its files must be those that the report lists, and the
    artifact must still answer in this machine's runtime as it did when it was built. A Core ML build is
    compared in our evaluator, and on macOS in Core ML too; elsewhere the report says that it wasn't.
    """
    from needle_export import pipeline

    with progress_of(silent=as_json) as progress:
        report = pipeline.verify(folder, checkpoint=checkpoint, progress=progress)
    print_report(report, as_json=as_json)
