"""needle-export build"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from needle_export.cli.choices import all_planned, choices_of_several
from needle_export.cli.several import build_several
from needle_export.cli.shared import define, json_option, print_report, progress_of, quiet_option
from needle_export.errors import NeedleExportError


@define("build", "build needle3.safetensors --target onnx --out dist/",
        "build needle3.safetensors --target onnx --layers 8 --lora adapter.safetensors --out dist/",
        "build needle3.safetensors --target tflite --weights int8 --buckets 64,128 --out dist/",
        "build needle3.safetensors --target coreml --weights fp16 --os ios18 --out dist/",
        "build needle3.safetensors --weights int4 --calibrate prompts.jsonl --out dist/",
        "build needle3.safetensors --weights int4 --rule content=int8 --rule engrams/embedding=int2 --out dist/",
        "build needle3.safetensors --device pixel-8 --recipe android-balanced --out dist/",
        "build needle3.safetensors --device pixel-8 --device iphone-16-pro --recipe tiny-rung --out dist/",
        "build hf:Cactus-Compute/needle3 --target onnx --weights fp16 --context 2048 --out dist/ --json")
@click.argument("checkpoint")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Folder to publish into; an earlier build there is replaced in one step.")
@choices_of_several
@click.option("--no-cache", is_flag=True,
              help="Take nothing that an earlier build made, and keep nothing (see needle-export cache). Nothing to do "
                   "with --cache.")
@json_option
@quiet_option
def command(checkpoint: str, out: Path, no_cache: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Export a checkpoint, verify and publish it.

    The artifact is run in its own runtime against the reference first. If it agrees, it appears in DIR
    with its report; if it doesn't, nothing is published and an earlier build in DIR stays as it was.

    With several recipes or devices, each recipe is built for each device, into DIR/<recipe>-<device>, and what is the
    same is built once. Where one fails the others are still built; the exit code is that of the first that failed. What
    a device refuses is reported, and fails only where nothing else was asked for.
    """
    plans = all_planned(checkpoint, out, options)
    if len(plans) > 1:
        build_several(plans, no_cache=no_cache, as_json=as_json, quiet=quiet)
        return
    _, _, plan = plans[0]
    assert not isinstance(plan, NeedleExportError)  # of one it is raised
    plan.check()
    from needle_export import pipeline, reuse

    cache = None if no_cache else reuse.open_cache()
    with progress_of(silent=as_json or quiet) as progress:
        report = pipeline.build(plan.options, progress, plan.info(), cache, plan.device)
    if as_json or not quiet:
        print_report(report, as_json=as_json)
