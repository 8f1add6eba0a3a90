"""needle-export inspect"""

from __future__ import annotations

import click

from needle_export.cli.shared import define, head_widths, json_option, print_inspection, progress_of


@define("inspect", "inspect needle3.safetensors", "inspect needle3.cact --bits 2",
        "inspect needle3.safetensors --head 64/64,48/64,32/64 --context 4096",
        "inspect hf:Cactus-Compute/needle3 --json", "inspect dist-coreml/model.mlpackage")
@click.argument("checkpoint", metavar="FILE")
@click.option("--bits", type=float, default=4.0, show_default=True, metavar="N",
              help="Width of a weight that sizes are computed for, beside 16.")
@click.option("--head", "heads", type=head_widths, metavar="QK/V,...",
              help="What other head widths would cost.")
@click.option("--context", type=click.IntRange(min=1), default=1024, show_default=True, metavar="N",
              help="Tokens that the size of the cache is computed for.")
@json_option
def command(checkpoint: str, bits: float, heads: tuple[tuple[int, int], ...] | None, context: int,
            as_json: bool) -> None:
    """Show what a file is and where its bytes go.

    FILE is a checkpoint, a .cact container, a LoRA adapter or a Core ML package, also one that another tool made,
    or the folder of a build with one in it. Nothing is exported. A package has no sizes at other widths, so --bits,
    --head and --context say nothing about it.
    """
    from needle_export.inspection import inspect

    with progress_of(silent=as_json) as progress:
        inspection = inspect(checkpoint, bits=bits, heads=heads or (), context=context, progress=progress)
    print_inspection(inspection, as_json=as_json)
