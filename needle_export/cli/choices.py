"""The options that decide what is built, for every command that takes them, and who chose which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from needle_export.cli.shared import bounds, integers, names, new_file, rule
from needle_export.config.options import (
    BUCKETS,
    CACHE_FORMS,
    MAX_SEED,
    MIN_LAYERS,
    OPSETS,
    ROUNDINGS,
    SYSTEMS,
    TARGETS,
    TOLERANCES,
    WEIGHTS,
)
from needle_export.errors import NeedleExportError, UsageError

if TYPE_CHECKING:
    from needle_export.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])

_DEVICE = (
    "Device to build for: one of those that needle-export devices lists, or a file. What it can't run is refused "
    "before anything is read."
)
_RECIPE = "Recipe to build by: one of those that come along, or a file. Options given here win over it."
_SEVERAL = " May be repeated: then each recipe is built for each device."

_OPTIONS = (
    click.option("--save-recipe", type=new_file, metavar="FILE",
                 help="Write what was resolved as a recipe that resolves to the same again."),
    click.option("--target", type=click.Choice(TARGETS), default="onnx", show_default=True,
                 help="What to export to."),
    click.option("--layers", type=click.IntRange(min=MIN_LAYERS), metavar="N",
                 help="Depth of the ladder's rung to build; all layers when left out."),
    click.option("--lora", metavar="FILE", help="Adapter to merge first."),
    click.option("--tokenizer", metavar="FILE",
                 help="The model's tokenizer, to lie beside the artifact; if left out, the container's own, or the "
                      "tokenizer.model beside the checkpoint."),
    click.option("--context", type=click.IntRange(min=1), default=1024, show_default=True, metavar="N",
                 help="Tokens that the caches hold."),
    click.option("--weights", type=click.Choice(WEIGHTS), default="fp32", show_default=True,
                 help="Number format of stored weights. Arithmetic is fp32 in ONNX and TFLite, but products with "
                      "int8, int4 and int2 are of integers; in Core ML it is fp16 for all but fp32."),
    click.option("--rule", "rules", multiple=True, type=rule, metavar="PATTERN=SCHEME",
                 help="Another number format for some weights, by role (routing, content, memory, mixing, lanes, "
                      "vocabulary, heads, norms) or by tensor name with *; may be repeated, the last that matches "
                      "wins."),
    click.option("--rounding", type=click.Choice(ROUNDINGS),
                 help="How int2, int4 and int8 in blocks find levels and scales: nearest, as usual; search, for the "
                      "least error of weights; calibrated, for the least error of outputs on the prompts of "
                      "--calibrate."),
    click.option("--calibrate", metavar="FILE",
                 help='Prompts to calibrate with, one JSON object a line: {"text": "..."} or {"tokens": [...]}.'),
    click.option("--cache", type=click.Choice(CACHE_FORMS),
                 help="Number format of keys and values between steps; the target's own if left out: fp32 in ONNX and "
                      "TFLite, fp16 in Core ML."),
    click.option("--opset", type=click.Choice(OPSETS),
                 help=f"ONNX operator set, {OPSETS[-1]} if left out; older ones run on older runtimes, at a cost that "
                      "the report states."),
    click.option("--os", type=click.Choice(SYSTEMS),
                 help="Least system that is to run a Core ML package, ios18 if left out; ios17 has no states."),
    click.option("--buckets", type=integers, metavar="T,T,...",
                 help=f"Prefill lengths of a TFLite file or a Core ML package; {','.join(map(str, BUCKETS))} as far as "
                      "they fit if left out."),
    click.option("--heads", type=names, default="", metavar="NAME,...",
                 help="Probe heads that a TFLite file is to have, such as confidence."),
    click.option("--keep-confidence", is_flag=True,
                 help="Keep the confidence head after --lora, though fine-tuning didn't train it."),
    click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, metavar="S",
                 help="Of the prompts that the verification draws."),
    click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
                 help="Threads for the latency measurement."),
    click.option("--bench/--no-bench", default=True, show_default=True, help="Whether to measure latency."),
    click.option("--tolerances", type=bounds, default="", metavar="NAME=X,...",
                 help=f"Tighter bounds for the verification, of {' and '.join(TOLERANCES)}; looser ones are refused."),
)


def choices(function: F) -> F:
    """All options that decide what is built, passed on by their names; :func:`planned` makes a plan of them."""
    return _with_options(function, "", False)


def choices_of_several(function: F) -> F:
    """The same for a command that takes several devices and recipes; :func:`all_planned` makes plans of them."""
    return _with_options(function, _SEVERAL, True)


def _with_options(function: F, more: str, multiple: bool) -> F:
    named = (click.option(name, metavar="ID|FILE", multiple=multiple, help=text + more)
             for name, text in (("--device", _DEVICE), ("--recipe", _RECIPE)))
    for option in reversed((*named, *_OPTIONS)):
        function = option(function)
    return function


def planned(checkpoint: str, out: Path, options: dict[str, Any]) -> Plan:
    """The plan of a command line, written as a recipe if that was asked for.

    Args:
        options: as :func:`choices` passes them on.

    Raises:
        NeedleExportError: they can't be, a recipe or a device among them isn't right, or the file can't be written.
    """
    one = {name: () if options[name] is None else (options[name],) for name in ("device", "recipe")}
    ((_, _, plan),) = all_planned(checkpoint, out, {**options, **one})
    assert not isinstance(plan, NeedleExportError)  # of one it is raised
    return plan


def all_planned(
    checkpoint: str, out: Path, options: dict[str, Any]
) -> list[tuple[str, Path, Plan | NeedleExportError]]:
    """A plan for each recipe on each device, with its name and its folder; or why there can't be one.

    Args:
        options: as :func:`choices_of_several` passes them on.

    Raises:
        NeedleExportError: a recipe or a device isn't right, or as of :func:`needle_export.plan.resolve_all`.
    """
    from needle_export.cli.output import save
    from needle_export.plan import Plan, resolve_all

    devices = [_device(name) for name in options.pop("device")] or [None]
    recipes = [_recipe(name) for name in options.pop("recipe")] or [None]
    path = options["save_recipe"]
    if path is not None and len(devices) * len(recipes) > 1:
        raise UsageError("several plans are no recipe", where="--save-recipe", fix="save one at a time")
    ctx = click.get_current_context()
    given = {name: value for name, value in options.items()
             if name != "save_recipe" and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    found = resolve_all(recipes, devices, given, checkpoint=checkpoint, out=out)
    for _, _, plan in found:
        if path is not None and isinstance(plan, Plan):
            save(path, plan.saved(path, checkpoint))
    return found


def _recipe(name: str | None) -> Any:
    if name is None:
        return None
    from needle_export.config.recipe import load_recipe

    return load_recipe(name)


def _device(name: str | None) -> Any:
    if name is None:
        return None
    from needle_export.config.device import load_device

    return load_device(name)
