"""needle-export import-latency"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.shared import artifact_folder, define, json_option, print_report
from needle_export.measure.readings import FORMATS


@define("import-latency", "import-latency dist-tflite/ pixel.txt --device pixel-8",
        "import-latency dist/ prompt64.txt --format onnxruntime_perf_test --device raspberry-pi-5 --prompt 64",
        "import-latency dist/ lab.csv --json")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.argument("file", type=Path, metavar="FILE")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Of FILE; recognised when left out.")
@click.option("--device", metavar="ID", help="What it was measured on; a CSV may say so itself.")
@click.option("--prompt", type=click.IntRange(min=1), metavar="N",
              help="FILE is of a prompt of N tokens; of a decode step when left out. A CSV says so itself.")
@json_option
def command(folder: Path, file: Path, kind: str | None, device: str | None, prompt: int | None,
            as_json: bool) -> None:
    """Put a device's own times into a published report.

    FILE is what TFLite's benchmark_model or onnxruntime_perf_test printed there, or a CSV. The time stands in the
    report as imported, with the file's name and hash, beside what was measured here and what is estimated.
    """
    from needle_export.importing import import_latency

    report = import_latency(folder, file, format=kind, device=device, prompt=prompt)
    print_report(report, as_json=as_json)
