"""Times of an artifact from wherever a report has them, in one form, with measured and estimated told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from needle_export.report.cited import Citation, Number
from needle_export.report.elsewhere import ImportedLatency, LatencyEstimate, PrefillEstimate
from needle_export.report.measured import Latency
from needle_export.report.schema import Artifact
from needle_export.report.units import milliseconds, plural, rate, threads, whole

Kind = Literal["measured", "imported", "estimated"]
"""Measured by this program, measured by another one and imported, or computed without running anything."""

_ORDER: tuple[Kind, ...] = ("measured", "imported", "estimated")

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class PromptTime:
    """Reading a prompt."""

    tokens: Number
    ms: Number
    rate: Number | None


@dataclass(frozen=True)
class Timing:
    """One artifact on one machine.

    Attributes:
        kind: whether it ran there, and who says so.
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

    kind: Kind
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
    """Every timing of the artifact with this index in its report: measured here, then imported, then estimated."""
    at: Place = ("artifacts", index)
    found = [_latency(cite, (*at, "latency"), artifact.latency)] if artifact.latency else []
    found += [_estimate(cite, (*at, "estimates", i), e) for i, e in enumerate(artifact.estimates)]
    files: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(artifact.imported):
        files.setdefault((one.device, one.file, one.sha256, one.threads), []).append(i)
    found += [_imported(cite, (*at, "imported"), artifact.imported, entries) for entries in files.values()]
    return tuple(sorted(found, key=lambda timing: _ORDER.index(timing.kind)))


def _latency(cite: Citation, at: Place, latency: Latency) -> Timing:
    step = latency.decode is not None
    return Timing(
        kind=latency.kind,
        machine=latency.host,
        how=threads(latency.threads),
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


def _estimate(cite: Citation, at: Place, e: LatencyEstimate) -> Timing:
    """What a device's rates make of the artifact's operations."""
    return Timing(
        kind="estimated", machine=e.name, how=f"computed from rates of the device, of which the weakest is "
        f"{'a guess' if e.basis == 'guess' else e.basis}; nothing ran there", command="",
        decode=cite(milliseconds, *at, "decode_ms"), within=None, decode_rate=None,
        position=cite(whole, *at, "position"),
        prompts=_prompts(cite, at, "prefill", e.prefill),
        start=tuple((f"of a step: {part}", cite(milliseconds, *at, "parts", part)) for part in sorted(vars(e.parts))),
    )


def _prompts(cite: Citation, at: Place, key: str, prompts: Sequence[PrefillEstimate]) -> tuple[PromptTime, ...]:
    return tuple(
        PromptTime(cite(whole, *at, key, i, "tokens"), cite(milliseconds, *at, key, i, "ms"),
                   cite(rate, *at, key, i, "tokens_per_s"))
        for i in sorted(range(len(prompts)), key=lambda i: prompts[i].tokens)
    )


def _imported(cite: Citation, at: Place, every: Sequence[ImportedLatency], entries: list[int]) -> Timing:
    """What one file of another program tells of a device; of several decode steps the last."""
    first = every[entries[0]]
    steps = [i for i in entries if every[i].phase == "decode"]
    prompts = sorted((i for i in entries if every[i].phase == "prefill"), key=lambda i: every[i].tokens)
    told = [f"{first.statistic} by {first.format}"]
    told += [plural(first.threads, "thread")] if first.threads is not None else []
    told += [first.date] if first.date is not None else []
    return Timing(
        kind="imported", machine=first.device, command="",
        how=f"{', '.join(told)}; from {first.file}, SHA-256 {first.sha256}",
        decode=cite(milliseconds, *at, steps[-1], "ms") if steps else None,
        within=None, decode_rate=None, position=None,
        prompts=tuple(PromptTime(cite(whole, *at, i, "tokens"), cite(milliseconds, *at, i, "ms"), None)
                      for i in prompts),
        start=tuple((title, cite(milliseconds, *at, i, name))
                    for title, name in (("load", "load_ms"), ("first call", "first_ms"))
                    for i in entries if getattr(every[i], name) is not None),
    )
