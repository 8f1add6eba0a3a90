"""needle-export plan"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from needle_export.cli.choices import choices, planned
from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import define, json_option, progress_of
from needle_export.errors import CheckFailed


@define("plan", "plan needle3.safetensors --device pixel-8 --recipe android-balanced",
        "plan needle3.safetensors --recipe ios-smallest --layers 8 --json",
        "plan needle3.safetensors --device iphone-16-pro --weights int4 --save-recipe ours.toml")
@click.argument("checkpoint")
@choices
@json_option
def command(checkpoint: str, as_json: bool, **options: Any) -> None:
    """Say what a build would make, without building it.

    Shows every option with who chose it: the command line wins over the recipe, the recipe over the device, the device
    over the defaults. Sizes and state are predicted, within 1 % at the published geometry; the latency is an estimate
    from the device's rates. Exits with 5 where the device refuses the artifact, saying all its reasons, and with 1
    where a predicted size or state exceeds a budget. The checkpoint is read, for its shapes
    and its hash; no graph is made of it.
    """
    plan = planned(checkpoint, Path(), options)
    from needle_export import loading
    from needle_export.plan import forecast, refused
    from needle_export.report.plan_text import as_dict, render

    with progress_of(silent=as_json) as progress:
        found = forecast(plan, loading.load(plan.options, progress)[0])
    text = (json.dumps(as_dict(found), indent=1, ensure_ascii=False) + "\n" if as_json
            else render(found, color=use_color(), width=page_width()))
    emit(text)
    refused(plan.device, found.plan.refusals)
    if found.exceeded:
        first, more = found.exceeded[0], len(found.exceeded) - 1
        raise CheckFailed(f"the build would exceed {first.budget.sentence}" + (f" (and {more} more)" if more else ""),
                          where="budget", fix="choose a smaller scheme, fewer layers, or another budget")
