"""Latencies of devices that aren't measured here: estimated from an artifact's own ops and a device's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from needle_export.config.device import Device
from needle_export.config.figures import Figure
from needle_export.config.host import host_device
from needle_export.config.rates import HOST
from needle_export.errors import Unsupported
from needle_export.measure.estimate import Estimate, estimate
from needle_export.measure.latency import host
from needle_export.measure.work import decode_position
from needle_export.report.elsewhere import Basis, EstimateParts, LatencyEstimate, PrefillEstimate
from needle_export.report.schema import Artifact, Report
from needle_export.targets import find_target
from needle_export.targets.base import TellsWork

#: Weakest first.
_BASES: tuple[Basis, ...] = ("guess", "published", "measured")


def with_estimates(
    report: Report, folder: Path, prompts: tuple[int, ...], devices: Sequence[Device] = ()
) -> Report:
    """A report with an estimate of every artifact for each device that has rates for its target.

    This machine is among them once it was calibrated, so that a prediction stands beside what is measured here.

    Args:
        folder: that the artifacts lie in.
        prompts: lengths to estimate for where none were measured.
        devices: to estimate for; an earlier estimate for one is replaced.

    Raises:
        BadInput: the files are damaged, or this machine's device file isn't right.
    """
    mine = host_device()
    if mine is not None and all(device.id != HOST for device in devices):
        devices = [mine, *devices]
    artifacts = []
    for artifact in report.artifacts:
        found, notes = [], list(artifact.notes)
        for device in devices:
            try:
                made = _estimate(report, artifact, folder, prompts, device)
            except Unsupported as fault:
                note = f"no estimate for {device.id}: {fault.what}"
                notes += [note] if note not in notes else []
            else:
                found += [] if made is None else [made]
        kept = [e for e in artifact.estimates if e.device not in {d.id for d in devices}]
        artifacts.append(replace(artifact, estimates=(*kept, *found), notes=tuple(notes)))
    return replace(report, artifacts=tuple(artifacts))


def _estimate(
    report: Report, artifact: Artifact, folder: Path, prompts: tuple[int, ...], device: Device
) -> LatencyEstimate | None:
    """For one device; None where it has no rates for the artifact's target, or nothing tells the artifact's work."""
    if device.id == HOST and device.chip.name != host():
        raise Unsupported(f"its file is of another machine ({device.chip.name}), so calibrate this one")
    rates, target = device.rates(artifact.target), find_target(artifact.target)
    if rates is None or not isinstance(target, TellsWork):
        return None
    context, latency = int(report.options["context"]), artifact.latency
    position = decode_position(context) if latency is None or latency.decode is None else latency.decode.position
    lengths = tuple(p.tokens for p in latency.prefill) if latency is not None else prompts
    return shown(estimate(target.work(folder, position, lengths), rates), device, artifact.target)


def shown(made: Estimate, device: Device, target: str) -> LatencyEstimate:
    """An estimate as a report has it."""
    parts = made.decode
    return LatencyEstimate(
        kind="estimated",
        device=device.id,
        name=device.name,
        basis=basis_of(device, target),
        position=made.position,
        decode_ms=made.decode_ms,
        parts=EstimateParts(
            parts.bytes * 1e3, parts.arithmetic * 1e3, parts.values * 1e3, parts.ops * 1e3, parts.calls * 1e3
        ),
        prefill=tuple(
            PrefillEstimate(p.tokens, p.parts.total * 1e3, p.tokens_per_s) for p in made.prompts
        ),
    )


def basis_of(device: Device, target: str) -> Basis:
    """Where a device's rates for a target come from: the weakest of them."""
    runtime = device.runtime_of(target)
    assert runtime is not None and runtime.rates is not None
    kinds = {figure.kind for _, figure in runtime.rates if isinstance(figure, Figure)}
    return next(basis for basis in _BASES if basis in kinds)
