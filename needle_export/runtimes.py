"""An artifact in the runtimes beside the one that it was verified in: what becomes of it there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export import __version__
from needle_export.config.progress import Progress
from needle_export.errors import VerificationFailed
from needle_export.measure import half, parity
from needle_export.report.schema import Artifact, RuntimeCheck
from needle_export.targets.base import OtherRuntime, RuntimeRefused, Target

Columns = NDArray[np.int64] | None


def check_all(
    target: Target,
    others: Sequence[OtherRuntime],
    table: dict[str, Any],
    weights: str,
    cases: list[parity.Case],
    progress: Progress,
) -> tuple[tuple[RuntimeCheck, ...], list[str]]:
    """What became of a fresh artifact, verified in its own runtime, in every runtime that its target knows of.

    The others decide nothing.

    Args:
        others: of the target.
        table: of the comparison that verified it.
        weights: its scheme.

    Returns:
        What happened by runtime, and what its report should say about that.
    """
    tolerance = parity.recorded_tolerance(weights, table)
    ours = target.status == "verified-by-evaluator"
    known = __version__ if ours else distribution_version(target.runtime)
    own = RuntimeCheck(target.runtime, known, True, True, table["max_abs"], "")
    found = [_check(other, tolerance, cases, None, progress) for other in others]
    return (own, *(check for check, _ in found)), [note for _, notes in found for note in notes]


def check_native(
    artifact: Artifact,
    others: Sequence[OtherRuntime],
    tolerance: parity.Tolerance,
    cases: list[parity.Case],
    columns: Columns,
    dist: Path,
    progress: Progress,
) -> Artifact:
    """A published artifact in the runtime that it is for, where that isn't the one that verifies it.

    Args:
        others: further runtimes of its target; those that aren't native are left as the build found them.
        columns: of the logits that are compared, or None for all.
        dist: its folder, for messages.

    Returns:
        The artifact, with what became of it on this machine.

    Raises:
        VerificationFailed: the runtime is there, and refuses the artifact or computes something else.
    """
    for other in (o for o in others if o.native):
        check, notes = _check(other, tolerance, cases, columns, progress)
        if check.loaded is not None and not check.reproduced:
            name = f"{other.name} {other.version}".strip()
            fix = "the evaluator finds no fault in it, so compare another system or other compute units"
            raise VerificationFailed(f"in {name}: {check.reason}", where=str(dist), fix=fix)
        runtimes = [check if r.runtime == check.runtime else r for r in artifact.runtimes]
        if check not in runtimes:
            runtimes.append(check)
        artifact = replace(artifact, runtimes=tuple(runtimes), notes=(*artifact.notes, *notes))
    return artifact


def _check(
    other: OtherRuntime, tolerance: parity.Tolerance, cases: list[parity.Case], columns: Columns, progress: Progress
) -> tuple[RuntimeCheck, list[str]]:
    """What became of an artifact in one runtime, and what a report should say about it beyond that."""

    def told(loaded: bool | None, good: bool | None, error: float | None, reason: str) -> RuntimeCheck:
        return RuntimeCheck(other.name, other.version, loaded, good, error, reason)

    if other.open is None:
        return told(None, None, None, other.reason), []
    notes: list[str] = []
    try:
        with closing(other.open()) as runner, progress.stage(f"run in {other.name}", len(cases)) as task:
            measured = parity.compare(runner, cases, columns, task.advance)
            if other.native:
                notes += [f"in {other.name} {other.version}: {half.in_words(measured)}", *runner.told()]
    except RuntimeRefused as refusal:
        return told(False, None, None, str(refusal)), []
    except VerificationFailed as failure:
        return told(True, False, None, failure.what), []
    fault = (half.judge_half(measured) if other.native else parity.judge(measured, tolerance)) or ""
    return told(True, not fault, measured.max_abs, fault), notes
