"""needle-export schemes"""

from __future__ import annotations

import json

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import define, json_option
from needle_export.config.options import TARGETS


@define("schemes", "schemes", "schemes --target onnx", "schemes --json")
@click.option("--target", type=click.Choice(TARGETS), help="Only this target's.")
@json_option
def command(target: str | None, as_json: bool) -> None:
    """List the values of --weights and of --cache.

    For each target: how matrices and tables lie in its files, whether the inputs of products are rounded at run time,
    how keys and values are kept between steps, or why the target can't hold a scheme or a format.
    """
    from needle_export.report.schemes import as_dict, render

    targets = TARGETS if target is None else (target,)
    if as_json:
        emit(json.dumps(as_dict(targets), indent=2) + "\n")
    else:
        emit(render(targets, color=use_color(), width=page_width()))
