"""needle-export devices"""

from __future__ import annotations

import json

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import define, json_option


@define("devices", "devices", "devices pixel-8", "devices ours/till.toml", "devices --json")
@click.argument("device", required=False, metavar="[ID|FILE]")
@json_option
def command(device: str | None, as_json: bool) -> None:
    """List the devices that builds can be made for, or show one.

    ID is one of those listed, FILE a device file of your own. Of one device every figure is shown with its unit, and
    whether it was published, measured or guessed, with the source.
    """
    from needle_export.config.device import device_names, load_device
    from needle_export.report.devices import as_dict, render, render_all, summary

    if device is not None:
        found = load_device(device)
        text = (json.dumps(as_dict(found), indent=2) + "\n" if as_json
                else render(found, color=use_color(), width=page_width()))
    else:
        every = [load_device(name) for name in device_names()]
        text = (json.dumps({"devices": [summary(d) for d in every]}, indent=2) + "\n" if as_json
                else render_all(every, color=use_color(), width=page_width()))
    emit(text)
