"""needle-export build"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from needle_export.cli.choices import choices, planned
from needle_export.cli.shared import define, json_option, print_report, progress_of, quiet_option


@define("build", "build needle3.safetensors --target onnx --out dist/",
        "build needle3.safetensors --target onnx --layers 8 --lora adapter.safetensors --out dist/",
        "build needle3.safetensors --target tflite --weights int8 --buckets 64,128 --out dist/",
        "build needle3.safetensors --target coreml --weights fp16 --os ios18 --out dist/",
        "build needle3.safetensors --weights int4 --calibrate prompts.jsonl --out dist/",
        "build needle3.safetensors --weights int4 --rule content=int8 --rule engrams/embedding=int2 --out dist/",
        "build needle3.safetensors --device pixel-8 --recipe android-balanced --out dist/",
        "build hf:Cactus-Compute/needle3 --target onnx --weights fp16 --context 2048 --out dist/ --json")
@click.argument("checkpoint")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Folder to publish into; an earlier build there is replaced in one step.")
@choices
@json_option
@quiet_option
def command(checkpoint: str, out: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Export a checkpoint, verify and publish it.

    The artifact is run in its own runtime against the reference first. If it agrees, it appears in DIR
    with its report; if it doesn't, nothing is published and an earlier build in DIR stays as it was.
    """
    plan = planned(checkpoint, out, options)
    plan.check()
    from needle_export import pipeline

    with progress_of(silent=as_json or quiet) as progress:
        report = pipeline.build(plan.options, progress, plan.info())
    if as_json or not quiet:
        print_report(report, as_json=as_json)
