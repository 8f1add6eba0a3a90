"""Estimated and imported times in words, beside what was measured and never as if they were it."""

from __future__ import annotations

from needle_export.config.rates import HOST
from needle_export.report.elsewhere import ImportedLatency, LatencyEstimate
from needle_export.report.schema import Artifact
from needle_export.report.units import milliseconds, plural, rate, whole

_BASIS = {
    "published": "rates published",
    "measured": "rates measured there",
    "guess": "rates partly GUESSED",
}

COLUMNS = ("kind", "device", "what", "time", "rate", "by")
"""Of :func:`rows`."""


def lines(artifact: Artifact) -> list[tuple[str, str]]:
    """A label and a sentence for each estimate, and for each time that was imported."""
    found = [("estimated", f"({e.device}, roofline) {_estimate(artifact, e)}") for e in artifact.estimates]
    return found + [("imported", f"({i.device}) {_imported(i)}") for i in artifact.imported]


def _estimate(artifact: Artifact, e: LatencyEstimate) -> str:
    text = f"decode {milliseconds(e.decode_ms)} after {plural(e.position, 'token')}{_beside(artifact, e)}"
    if e.prefill:
        longest = e.prefill[-1]
        text += f"; prompt of {longest.tokens} at {rate(longest.tokens_per_s)}"
    return f"{text}; {_BASIS[e.basis]}, not a measurement"


def _beside(artifact: Artifact, e: LatencyEstimate) -> str:
    """How far a decode step of this machine's estimate is from the one measured here; empty for another device."""
    latency = artifact.latency
    if e.device != HOST or latency is None or latency.kind != "measured" or latency.decode is None:
        return ""
    off = e.decode_ms / latency.decode.ms_p50 - 1
    return f" ({abs(off):.0%} {'above' if off > 0 else 'below'} the {milliseconds(latency.decode.ms_p50)} measured)"


def _imported(i: ImportedLatency) -> str:
    spread = [f"{name} {milliseconds(value)}" for name, value in (("min", i.ms_min), ("max", i.ms_max)) if value]
    runs = "" if i.runs is None else f" of {plural(i.runs, 'run')}"
    told = ", ".join([f"{i.statistic}{runs}", *spread])
    day = "" if i.date is None else f", {i.date}"
    return f"{_what(i)} {milliseconds(i.ms)} ({told}); measured there by {i.format}, read from {i.file}{day}"


def _what(i: ImportedLatency) -> str:
    return "decode" if i.phase == "decode" else f"prompt of {whole(i.tokens)}"


def rows(artifact: Artifact) -> list[tuple[str, ...]]:
    """Every time of an artifact with the kind that it is; nothing if only measured ones are there."""
    if not artifact.estimates and not artifact.imported:
        return []
    found: list[tuple[str, ...]] = []
    if latency := artifact.latency:
        if latency.decode is not None:
            took = latency.decode.ms_p50
            found.append((latency.kind, "here", "decode", milliseconds(took), rate(1e3 / took), "median"))
        found += [
            (latency.kind, "here", f"prompt of {p.tokens}", milliseconds(p.ms_p50), rate(p.tokens_per_s), "median")
            for p in latency.prefill
        ]
    for e in artifact.estimates:
        how = f"roofline, {_BASIS[e.basis]}"
        found.append((e.kind, e.device, "decode", milliseconds(e.decode_ms), rate(1e3 / e.decode_ms), how))
        found += [
            (e.kind, e.device, f"prompt of {p.tokens}", milliseconds(p.ms), rate(p.tokens_per_s), how)
            for p in e.prefill
        ]
    found += [
        (i.kind, i.device, _what(i), milliseconds(i.ms), rate(i.tokens_per_s), f"{i.format}, {i.file}")
        for i in artifact.imported
    ]
    return found
