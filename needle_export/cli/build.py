"""needle-export build"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from needle_export.cli.shared import define, integers, json_option, names, print_report, progress_of, quiet_option, rule
from needle_export.config.options import (
    BUCKETS,
    CACHE_FORMS,
    MAX_SEED,
    MIN_LAYERS,
    OPSETS,
    ROUNDINGS,
    SYSTEMS,
    TARGETS,
    WEIGHTS,
    BuildOptions,
)


@define("build", "build needle3.safetensors --target onnx --out dist/",
        "build needle3.safetensors --target onnx --layers 8 --lora adapter.safetensors --out dist/",
        "build needle3.safetensors --target tflite --weights int8 --buckets 64,128 --out dist/",
        "build needle3.safetensors --target coreml --weights fp16 --os ios18 --out dist/",
        "build needle3.safetensors --weights int4 --calibrate prompts.jsonl --out dist/",
        "build needle3.safetensors --weights int4 --rule content=int8 --rule engrams/embedding=int2 --out dist/",
        "build hf:Cactus-Compute/needle3 --target onnx --weights fp16 --context 2048 --out dist/ --json")
@click.argument("checkpoint")
@click.option("--target", type=click.Choice(TARGETS), default="onnx", show_default=True,
              help="What to export to.")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR",
              help="Folder to publish into; an earlier build there is replaced in one step.")
@click.option("--layers", type=click.IntRange(min=MIN_LAYERS), metavar="N",
              help="Depth of the ladder's rung to build; all layers when left out.")
@click.option("--lora", metavar="FILE", help="Adapter to merge first.")
@click.option("--context", type=click.IntRange(min=1), default=1024, show_default=True, metavar="N",
              help="Tokens that the caches hold.")
@click.option("--weights", type=click.Choice(WEIGHTS), default="fp32", show_default=True,
              help="Number format of stored weights. Arithmetic is fp32 in ONNX and TFLite, but products with "
                   "int8, int4 and int2 are of integers; in Core ML it is fp16 for all but fp32.")
@click.option("--rule", "rules", multiple=True, type=rule, metavar="PATTERN=SCHEME",
              help="Another number format for some weights, by role (routing, content, memory, mixing, lanes, "
                   "vocabulary, heads, norms) or by tensor name with *; may be repeated, the last that matches wins.")
@click.option("--rounding", type=click.Choice(ROUNDINGS),
              help="How int2, int4 and int8 in blocks find levels and scales: nearest, as usual; search, for the least "
                   "error of weights; calibrated, for the least error of outputs on the prompts of --calibrate.")
@click.option("--calibrate", metavar="FILE",
              help='Prompts to calibrate with, one JSON object a line: {"text": "..."} or {"tokens": [...]}.')
@click.option("--cache", type=click.Choice(CACHE_FORMS),
              help="Number format of keys and values between steps; the target's own if left out: fp32 in ONNX and "
                   "TFLite, fp16 in Core ML.")
@click.option("--opset", type=click.Choice(OPSETS),
              help=f"ONNX operator set, {OPSETS[-1]} if left out; older ones run on older runtimes, at a cost that the "
                   "report states.")
@click.option("--os", type=click.Choice(SYSTEMS),
              help="Least system that is to run a Core ML package, ios18 if left out; ios17 has no states.")
@click.option("--buckets", type=integers, metavar="T,T,...",
              help=f"Prefill lengths of a TFLite file or a Core ML package; {','.join(map(str, BUCKETS))} as far as "
                   "they fit if left out.")
@click.option("--heads", type=names, default="", metavar="NAME,...",
              help="Probe heads that a TFLite file is to have, such as confidence.")
@click.option("--keep-confidence", is_flag=True,
              help="Keep the confidence head after --lora, though fine-tuning didn't train it.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, metavar="S",
              help="Of the prompts that the verification draws.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Threads for the latency measurement.")
@click.option("--bench/--no-bench", default=True, show_default=True, help="Whether to measure latency.")
@json_option
@quiet_option
def command(as_json: bool, quiet: bool, **options: Any) -> None:
    """Export a checkpoint, verify and publish it.

    The artifact is run in its own runtime against the reference first. If it agrees, it appears in DIR
    with its report; if it doesn't, nothing is published and an earlier build in DIR stays as it was.
    """
    checked = BuildOptions(**options)
    from needle_export import pipeline

    with progress_of(silent=as_json or quiet) as progress:
        report = pipeline.build(checked, progress)
    if as_json or not quiet:
        print_report(report, as_json=as_json)
