"""needle-export calibrate"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import define, json_option, names, new_file, progress_of
from needle_export.errors import UsageError


@define("calibrate", "calibrate", "calibrate --target onnx --out host.toml", "calibrate --json")
@click.option("--out", type=new_file, metavar="FILE",
              help="File to write; this machine's own when left out, which build and bench read.")
@click.option("--target", "targets", type=names, default="onnx,tflite", show_default=True, metavar="NAME,...",
              help="Targets whose runtimes to measure.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
              help="Processes for each target; the median of every graph counts.")
@json_option
def command(out: Path | None, targets: tuple[str, ...], repeats: int, as_json: bool) -> None:
    """Measure this machine's rates, for estimates.

    Small graphs are timed in the runtimes themselves, with one thread, each in a process of its own: some minutes.
    What comes of it is a device file, and reports made here tell a prediction beside every measurement from then on.
    Without --out it goes where build and bench look for it; the variable NEEDLE_EXPORT_HOST names another place. Let
    nothing else run meanwhile.
    """
    import json

    from needle_export.calibration import calibrate
    from needle_export.config.host import VARIABLE, host_path
    from needle_export.report.devices import as_dict, render

    place = out or host_path()
    if place is None:
        raise UsageError(f"{VARIABLE} is empty, so there is no place for this machine's file", where="--out",
                         fix="name a file")
    with progress_of(silent=as_json) as progress:
        device = calibrate(targets, place, progress, repeats=repeats)
    if as_json:
        emit(json.dumps({"file": str(place), "device": as_dict(device)}, indent=2) + "\n")
    else:
        emit(render(device, color=use_color(), width=page_width()) + f"\nwritten to {place}\n")
