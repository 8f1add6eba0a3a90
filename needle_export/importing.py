"""Times measured on other devices, put into the report of a published build beside its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from needle_export.bundle.rewrite import rewrite_report
from needle_export.config.progress import Progress
from needle_export.errors import BadInput, UsageError
from needle_export.measure.adb import Adb
from needle_export.measure.readings import Reading, read
from needle_export.report.elsewhere import ImportedLatency
from needle_export.report.schema import Artifact, Report, load_report

#: Which target's artifacts a program runs; a CSV may be of any.
_TARGETS = {"benchmark_model": "tflite", "onnxruntime_perf_test": "onnx"}


def import_latency(
    dist: Path, file: Path, *, format: str | None, device: str | None, prompt: int | None
) -> Report:
    """Put what a file says into a published report; what an earlier import of the same file said is replaced.

    Args:
        format: of the file; None recognises it.
        device: what it was measured on; None takes what the file says.
        prompt: tokens of the prompt that was timed; None for a decode step, or what the file says.

    Returns:
        The report as it is now in the folder.

    Raises:
        BadInput: the file isn't such a program's output, or the folder holds no report.
        UsageError: nothing says which device it was, or a choice contradicts the file.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadInput(f"the file can't be read ({error.strerror})", where=str(file)) from None
    found, readings = read(data, str(file), format)
    return record(dist, readings, found, file.name, data, device=device, prompt=prompt)


def record(
    dist: Path,
    readings: Sequence[Reading],
    format: str,
    name: str,
    data: bytes,
    *,
    device: str | None,
    prompt: int | None,
) -> Report:
    """Put readings into a published report, whole or not at all; arguments as of :func:`import_latency`."""
    report = load_report(dist)
    target = _TARGETS.get(format)
    artifacts = [a for a in report.artifacts if target in (None, a.target)]
    if len(artifacts) != 1:
        what = f"no {target} artifact" if not artifacts else "several artifacts"
        raise UsageError(f"the folder holds {what}, which {format} would have run", where=str(dist))
    sha256 = hashlib.sha256(data).hexdigest()
    imported = [_entry(one, format, name, sha256, device, prompt) for one in readings]
    (artifact,) = artifacts
    kept = [i for i in artifact.imported if i.sha256 != sha256]
    changed = replace(artifact, imported=(*kept, *imported))
    report = replace(report, artifacts=tuple(changed if a is artifact else a for a in report.artifacts))
    rewrite_report(dist, report)
    return report


def _entry(
    one: Reading, format: str, name: str, sha256: str, device: str | None, prompt: int | None
) -> ImportedLatency:
    on = device or one.device
    if not on:
        raise UsageError("the file doesn't say what it was measured on", where="--device", fix="name the device")
    if one.phase is not None and prompt is not None:
        raise UsageError("the file says itself what was timed", where="--prompt", fix="leave it out")
    phase = one.phase or ("decode" if prompt is None else "prefill")
    return ImportedLatency(
        kind="imported", device=on, format=format,  # type: ignore[arg-type]  # one of FORMATS
        file=name, sha256=sha256, date=one.date, phase=phase,  # type: ignore[arg-type]  # checked when it was read
        tokens=one.tokens or prompt or 1, ms=one.ms,
        statistic=one.statistic,  # type: ignore[arg-type]  # checked when it was read
        runs=one.runs, ms_min=one.ms_min, ms_max=one.ms_max, ms_std=one.ms_std, first_ms=one.first_ms,
        load_ms=one.load_ms, threads=one.threads,
    )  # fmt: skip


def bench_adb(
    dist: Path, *, serial: str | None, benchmark: str, threads: int, steps: int, device: str | None, progress: Progress
) -> Report:
    """Run benchmark_model on an attached device and put its time of a decode step into the published report.

    Args:
        serial: of the device; None takes the only one that is attached.
        benchmark: path of benchmark_model on the device.
        device: what the report calls it; None takes the model that it names itself.

    Raises:
        UsageError: the folder holds no TFLite artifact.
        Unsupported: there is no adb, no such device, or no benchmark_model on it.
        BadInput: what benchmark_model printed isn't what is known.
    """
    report = load_report(dist)
    model = _tflite_file(report, dist)
    with progress.stage("find the device"):
        adb = Adb.find(serial)
        name, day = device or adb.model(), adb.day()
    printed = adb.benchmark(model, benchmark, threads=threads, runs=steps, progress=progress)
    format, readings = read(printed, f"benchmark_model on {name}", "benchmark_model")
    readings = [replace(one, date=day) for one in readings]
    return record(dist, readings, format, f"adb {adb.serial}", printed, device=name, prompt=None)


def _tflite_file(report: Report, dist: Path) -> Path:
    found: list[Artifact] = [a for a in report.artifacts if a.target == "tflite"]
    if not found:
        raise UsageError("benchmark_model runs TFLite files, and the folder holds none", where=str(dist),
                         fix="build with --target tflite")
    return dist / next(f.name for f in found[0].files if f.name.endswith(".tflite"))
