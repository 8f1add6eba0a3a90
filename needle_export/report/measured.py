"""The part of a report that was measured on a machine: times and memory, each with what is needed to believe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LatencyKind = Literal["measured", "estimated"]


@dataclass(frozen=True)
class PrefillLatency:
    """Reading a prompt of ``tokens`` tokens: median time of the whole prompt, and its rate."""

    tokens: int
    ms_p50: float
    tokens_per_s: float


@dataclass(frozen=True)
class DecodeLatency:
    """One decode step with ``position`` tokens before it: median, 95th percentile, rate at the median."""

    ms_p50: float
    ms_p95: float
    tokens_per_s: float
    position: int


@dataclass(frozen=True)
class Latency:
    """Times, and what is needed to believe them.

    Attributes:
        kind: "measured" on ``host``, or "estimated" for it.
        host: the machine in words: processor, cores, system.
        threads: of the runtime.
        command: what repeats the measurement.
        load_ms: opening the artifact until it can run, None when unknown.
        first_ms: from then to the first token of a one-token prompt, None when unknown.
        peak_rss_bytes: the process's highest resident size, None when unknown.
    """

    kind: LatencyKind
    host: str
    threads: int
    command: str
    load_ms: float | None
    first_ms: float | None
    prefill: tuple[PrefillLatency, ...]
    decode: DecodeLatency | None
    peak_rss_bytes: int | None


@dataclass(frozen=True)
class Loaded:
    """Resident memory of one fresh process, in bytes: everything in it counts, the interpreter and libraries too.

    Attributes:
        baseline_bytes: with the runtime imported and nothing opened.
        rss_bytes: with the artifact loaded and run.
        mapped_bytes: of these, pages of files, which the system can drop and read again; None where it doesn't tell.
        peak_bytes: the highest until then, None where the system doesn't tell.
    """

    baseline_bytes: int
    rss_bytes: int
    mapped_bytes: int | None
    peak_bytes: int | None

    def __post_init__(self) -> None:
        for name in ("baseline_bytes", "rss_bytes", "mapped_bytes", "peak_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, below zero")


@dataclass(frozen=True)
class Memory:
    """What loading an artifact takes, measured on ``host`` in two processes.

    Attributes:
        host, threads, command: as of :class:`Latency`.
        decode: what decoding needs is loaded, and one step was run.
        all: what reads prompts is loaded too, and a prompt of ``prompt_tokens`` was read before the step.
    """

    host: str
    threads: int
    command: str
    decode: Loaded
    all: Loaded
    prompt_tokens: int
