"""needle-export bench"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.shared import artifact_folder, define, integers, json_option, print_report, progress_of
from needle_export.config.options import COMPUTE_UNITS
from needle_export.errors import UsageError


@define("bench", "bench dist/ --threads 1", "bench dist/ --threads 2 --steps 256 --prompt 64,512 --json",
        "bench dist-coreml/ --compute-units cpu-ne", "bench dist/ --device host.toml --device raspberry-pi-5",
        "bench dist-tflite/ --adb any --benchmark-model /data/local/tmp/benchmark_model")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Threads of the runtime; Core ML chooses its own.")
@click.option("--steps", type=click.IntRange(min=1), default=64, show_default=True, metavar="N",
              help="Decode steps to time.")
@click.option("--prompt", type=integers, metavar="N,...",
              help="Prompt lengths to time, in tokens; 64 and 256 when left out, where the context has room.")
@click.option("--compute-units", type=click.Choice(COMPUTE_UNITS),
              help="Of a Core ML build, on macOS: where Core ML may run ops; all when left out. Core ML may still "
              "choose fewer, and the report's notes say what it plans.")
@click.option("--device", "devices", multiple=True, metavar="ID|FILE",
              help="Estimate latency for this device beside what is measured here; may be repeated. This machine's own "
              "file is used anyway, once calibrate has written it.")
@click.option("--adb", metavar="SERIAL|any",
              help="Run benchmark_model on this attached Android device instead; any takes the only one. Its time goes "
              "into the report in DIR.")
@click.option("--benchmark-model", "benchmark", metavar="PATH",
              help="Where benchmark_model lies on the device; /data/local/tmp/benchmark_model when left out.")
@json_option
def command(folder: Path, threads: int, steps: int, prompt: tuple[int, ...] | None, compute_units: str | None,
            devices: tuple[str, ...], adb: str | None, benchmark: str | None, as_json: bool) -> None:
    """Measure the speed and load memory of a published build here.

    DIR is a folder that a build has written. A Core ML build is measured in Core ML, which needs macOS;
    its memory isn't measured.
    """
    from needle_export import pipeline
    from needle_export.config.device import load_device

    if benchmark is not None and adb is None:
        raise UsageError("it says where a program lies on a device", where="--benchmark-model", fix="give --adb too")
    if adb is not None:
        _on_device(folder, adb, benchmark, threads, steps, devices, as_json)
        return
    with progress_of(silent=as_json) as progress:
        report = pipeline.bench(folder, threads=threads, steps=steps, prompt=prompt, progress=progress,
                                compute_units=compute_units, devices=[load_device(name) for name in devices])
    print_report(report, as_json=as_json)


def _on_device(folder: Path, serial: str, benchmark: str | None, threads: int, steps: int, devices: tuple[str, ...],
               as_json: bool) -> None:
    from needle_export.importing import bench_adb
    from needle_export.measure.adb import BENCHMARK

    if len(devices) > 1:
        raise UsageError("one device is attached, and has one name", where="--device", fix="give one")
    with progress_of(silent=as_json) as progress:
        report = bench_adb(folder, serial=None if serial == "any" else serial, benchmark=benchmark or BENCHMARK,
                           threads=threads, steps=steps, device=devices[0] if devices else None, progress=progress)
    print_report(report, as_json=as_json)
