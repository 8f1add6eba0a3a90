"""needle-export bench"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.shared import artifact_folder, define, integers, json_option, print_report, progress_of
from needle_export.config.options import COMPUTE_UNITS


@define("bench", "bench dist/ --threads 1", "bench dist/ --threads 2 --steps 256 --prompt 64,512 --json",
        "bench dist-coreml/ --compute-units cpu-ne")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Threads of the runtime; Core ML chooses its own.")
@click.option("--steps", type=click.IntRange(min=1), default=64, show_default=True, metavar="N",
              help="Decode steps to time.")
@click.option("--prompt", type=integers, metavar="N,...",
              help="Prompt lengths to time, in tokens; 64 and 256 when left out, where the context has room.")
@click.option("--compute-units", type=click.Choice(COMPUTE_UNITS),
              help="Of a Core ML build, on macOS: where Core ML may run ops; all when left out. Core ML may still "
              "choose fewer, and the report's notes say what it plans.")
@json_option
def command(folder: Path, threads: int, steps: int, prompt: tuple[int, ...] | None, compute_units: str | None,
            as_json: bool) -> None:
    """Measure the speed and load memory of a published build here.

    DIR is a folder that a build has written. A Core ML build is measured in Core ML, which needs macOS;
    its memory isn't measured.
    """
    from needle_export import pipeline

    with progress_of(silent=as_json) as progress:
        report = pipeline.bench(folder, threads=threads, steps=steps, prompt=prompt, progress=progress,
                                compute_units=compute_units)
    print_report(report, as_json=as_json)
