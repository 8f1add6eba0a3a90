"""needle-export sample"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.shared import define, json_option, new_file, print_inspection, progress_of
from needle_export.config.options import MAX_SEED


@define("sample", "sample small.safetensors --geometry small",
        "sample deep.safetensors --geometry published --layers 8 --seed 7")
@click.argument("out", type=new_file)
@click.option("--geometry", type=click.Choice(["published", "small"]), default="small", show_default=True,
              help="The published model's numbers, or a toy with every mechanism of it.")
@click.option("--layers", type=click.IntRange(1, 1024), metavar="N",
              help="Depth; the geometry's own when left out.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, metavar="S",
              help="Of the random weights.")
@json_option
def command(out: Path, geometry: str, layers: int | None, seed: int, as_json: bool) -> None:
    """Write a random checkpoint in the real format.

    It is for trying things out: prints what inspect would say about it. OUT is the file to
    write. It is labelled as random, and so is every report made from it.
    """
    from needle_export.checkpoint.geometry import PUBLISHED, SMALL
    from needle_export.checkpoint.sample import write_sample
    from needle_export.inspection import inspect

    base = PUBLISHED if geometry == "published" else SMALL
    with progress_of(silent=as_json) as progress:
        with progress.stage("write random weights"):
            write_sample(out, base.with_layers(layers or base.num_layers), seed)
        inspection = inspect(str(out), progress=progress)
    print_inspection(inspection, as_json=as_json)
