"""Times of an artifact from wherever a report has them, in one form, with measured and estimated told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needle_export.report.cited import Citation, Number
from needle_export.report.measured import LatencyKind
from needle_export.report.schema import Artifact
from needle_export.report.units import milliseconds, plural, rate, whole

KINDS: dict[LatencyKind, str] = {
    "measured": "ran on the machine named",
    "estimated": "computed from the artifact's operations and the machine's rates; nothing ran there",
}
"""What each kind of time is."""


@dataclass(frozen=True)
class PromptTime:
    """Reading a prompt."""

    tokens: Number
    ms: Number
    rate: Number


@dataclass(frozen=True)
class Timing:
    """One artifact on one machine.

    Attributes:
        kind: whether it ran there.
        machine: in words.
        how: threads, and what repeats it.
        command: what repeats it; empty where nothing does.
        decode: a step, None where there is none.
        within: what 95 of 100 steps stay within, None where that isn't known.
        decode_rate: steps a second.
        position: tokens before the step.
        prompts: by length.
        start: what else was timed: a name and a number each.
    """

    kind: LatencyKind
    machine: str
    how: str
    command: str
    decode: Number | None
    within: Number | None
    decode_rate: Number | None
    position: Number | None
    prompts: tuple[PromptTime, ...]
    start: tuple[tuple[str, Number], ...]


def timings(cite: Citation, index: int, artifact: Artifact) -> tuple[Timing, ...]:
    """Every timing of the artifact with this index in its report, measured ones first."""
    found = [_latency(cite, index, artifact)] if artifact.latency else []
    return tuple(sorted(found, key=lambda timing: timing.kind != "measured"))


def _latency(cite: Citation, index: int, artifact: Artifact) -> Timing:
    latency = artifact.latency
    assert latency is not None
    at: Sequence[str | int] = ("artifacts", index, "latency")
    step = latency.decode is not None
    return Timing(
        kind=latency.kind,
        machine=latency.host,
        how=plural(latency.threads, "thread") if latency.threads else "threads as the runtime chooses",
        command=latency.command,
        decode=cite(milliseconds, *at, "decode", "ms_p50") if step else None,
        within=cite(milliseconds, *at, "decode", "ms_p95") if step else None,
        decode_rate=cite(rate, *at, "decode", "tokens_per_s") if step else None,
        position=cite(whole, *at, "decode", "position") if step else None,
        prompts=tuple(
            PromptTime(
                cite(whole, *at, "prefill", i, "tokens"),
                cite(milliseconds, *at, "prefill", i, "ms_p50"),
                cite(rate, *at, "prefill", i, "tokens_per_s"),
            )
            for i in sorted(range(len(latency.prefill)), key=lambda i: latency.prefill[i].tokens)
        ),
        start=tuple(
            (title, cite(milliseconds, *at, name))
            for title, name in (("load", "load_ms"), ("first token", "first_ms"))
            if getattr(latency, name) is not None
        ),
    )
