"""How fast and how large in memory an artifact is: who may be measured here, and the report with what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from needle_export.config.options import COMPUTE_UNITS
from needle_export.config.progress import Progress
from needle_export.errors import Unsupported, UsageError
from needle_export.measure import latency, memory
from needle_export.report.measured import DecodeLatency, Latency, Loaded, Memory, PrefillLatency
from needle_export.report.schema import Report
from needle_export.targets import find_target
from needle_export.targets.base import LoadsApart, RunsNatively

_PROMPTS, STEPS = (64, 256), 64


def usual_prompts(context: int) -> tuple[int, ...]:
    """Prompt lengths to time where nobody asks for others, in tokens."""
    return tuple(n for n in _PROMPTS if n <= context) or (context,)


def check_measurable(report: Report, dist: Path, threads: int, compute_units: str | None) -> None:
    """Whether every artifact of a folder can be timed here as asked.

    Args:
        threads: asked for.
        compute_units: asked for, or None.

    Raises:
        UsageError: an artifact's runtime has no such choice.
        Unsupported: it isn't on this machine.
    """
    for artifact in report.artifacts:
        target = find_target(artifact.target)
        if target.status == "verified-on-runtime":
            if compute_units is not None:
                raise UsageError(
                    f"the {artifact.target} target has no compute units", where="--compute-units", fix="leave it out"
                )
            continue
        what = target.missing() if isinstance(target, RunsNatively) else "nothing here runs it"
        if what:
            raise Unsupported(
                f"a {artifact.target} artifact doesn't run here, and the evaluator's speed isn't a device's: {what}",
                where=str(dist),
                fix="measure it on a device",
            )
        if threads != 1:
            raise UsageError("Core ML chooses its threads itself", where="--threads", fix="leave it out")


def with_measurements(
    report: Report,
    folder: Path,
    *,
    threads: int,
    steps: int,
    prompts: tuple[int, ...],
    progress: Progress,
    shown: Path,
    compute_units: str | None = None,
) -> Report:
    """A report with times and load memory measured now, each in a process of its own.

    Memory is measured of targets that load apart (:class:`targets.base.LoadsApart`).

    Args:
        folder: that the artifacts lie in.
        threads: of a runtime that takes them.
        steps: decode steps to time.
        prompts: lengths to time, in tokens.
        shown: the folder in the command that repeats the measurement.
        compute_units: of a runtime that has such a choice; None takes all.

    Raises:
        BadInput: a process that is measured failed.
    """
    artifacts = []
    for artifact in report.artifacts:
        target = find_target(artifact.target)
        units, host = None, latency.host()
        asked = f"--threads {threads}"
        if target.status != "verified-on-runtime" and isinstance(target, RunsNatively):
            units = compute_units or COMPUTE_UNITS[0]
            host, asked = target.machine(units), f"--compute-units {units}"
        command = f"needle-export bench {shown} {asked} --steps {steps} --prompt {','.join(map(str, prompts))}"
        vocab = report.checkpoint.geometry["out_vocab"] or report.checkpoint.geometry["vocab_size"]
        with progress.stage(f"measure {artifact.target}"):
            times = latency.measure(
                artifact.target, folder, vocab, threads=threads, steps=steps, prompts=prompts, compute_units=units
            )
        # Where the runtime chooses its threads there are none to report.
        measured = _latency(times, host, 0 if units else threads, command)
        notes = (*artifact.notes, *times["told"])
        taken = None
        if units is None and isinstance(target, LoadsApart):
            prompt = min(memory.PROMPT, int(report.options["context"]) - 1)
            with progress.stage(f"measure the memory of {artifact.target}"):
                parts = [
                    memory.measure(
                        artifact.target, folder, vocab, threads=threads, prompt=length, decode_alone=alone
                    )
                    for alone, length in ((True, 0), (False, prompt))
                ]
            taken = _memory(parts, host, threads, command, prompt)
            if taken is None:
                notes += ("load memory wasn't measured: this system doesn't tell a process's resident size",)
        artifacts.append(replace(artifact, latency=measured, memory=taken, notes=notes))
    return replace(report, artifacts=tuple(artifacts))


def _memory(
    parts: list[dict[str, Any] | None], host: str, threads: int, command: str, prompt: int
) -> Memory | None:
    """What loading takes as the report has it: of decode alone, and of everything."""
    decode, every = parts
    if decode is None or every is None:
        return None
    return Memory(host, threads, command, Loaded(**decode), Loaded(**every), prompt)


def _latency(times: dict[str, Any], host: str, threads: int, command: str) -> Latency:
    """Measured times as the report has them."""
    return Latency(
        kind="measured",
        host=host,
        threads=threads,
        command=command,
        load_ms=times["load_ms"],
        first_ms=times["first_ms"],
        prefill=tuple(PrefillLatency(**p) for p in times["prefill"]),
        decode=DecodeLatency(**times["decode"]),
        peak_rss_bytes=times["peak_rss_bytes"],
    )
