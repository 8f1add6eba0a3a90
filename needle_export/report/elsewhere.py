"""Times of an artifact that weren't measured by this program: estimated for a device, or imported from one.

Neither ever stands for what was measured here; :mod:`.metrics` gives them by the device alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Basis = Literal["published", "measured", "guess"]
"""Where the rates behind an estimate come from, the weakest of them."""

ImportFormat = Literal["benchmark_model", "onnxruntime_perf_test", "csv"]
"""Whose output a time was read from."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PrefillEstimate:
    """Reading a prompt of ``tokens`` tokens: the whole prompt, and its rate."""

    tokens: int
    ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class EstimateParts:
    """Milliseconds of an estimated decode step by what takes them.

    Attributes:
        bytes: weights and caches, of ops that wait for them.
        arithmetic: multiply-adds, of ops that wait for those.
        values: what ops hand on.
        ops: the cost of their number.
        calls: the cost of calling the runtime.
    """

    bytes: float
    arithmetic: float
    values: float
    ops: float
    calls: float


@dataclass(frozen=True)
class LatencyEstimate:
    """What a roofline over the artifact's own ops makes of a device's rates; nothing ran there for it.

    Attributes:
        kind: "estimated".
        device: id of the device file.
        name: of the device, for people.
        basis: where its rates come from, the weakest of them: a guess makes it all a guess.
        position: tokens before the decode step.
        decode_ms: one decode step.
        parts: of that, by what takes them.
        prefill: prompts by length.
    """

    kind: Literal["estimated"]
    device: str
    name: str
    basis: Basis
    position: int
    decode_ms: float
    parts: EstimateParts
    prefill: tuple[PrefillEstimate, ...]

    def __post_init__(self) -> None:
        made = self.parts.bytes + self.parts.arithmetic + self.parts.values + self.parts.ops + self.parts.calls
        if abs(made - self.decode_ms) > 1e-6 * self.decode_ms:
            raise ValueError(f"the parts make {made:.6g} ms, not {self.decode_ms:.6g}")


@dataclass(frozen=True)
class ImportedLatency:
    """A time that somebody else's program measured on a device, and the file that says so.

    Attributes:
        kind: "imported".
        device: as whoever imported it calls it: an id of a device file, or any name.
        format: whose output it is.
        file: its name, without folder.
        sha256: of the file.
        date: of the measurement, as the file has it; None where it has none.
        phase: what was timed.
        tokens: that a call takes: 1 of decode.
        ms: of one call.
        statistic: what that is of the runs.
        runs: how many; None where the file doesn't tell, as of all that follows.
        ms_min, ms_max, ms_std: of the runs.
        first_ms: the first call.
        load_ms: until the model could run.
        threads: that the runtime was given.
    """

    kind: Literal["imported"]
    device: str
    format: ImportFormat
    file: str
    sha256: str
    date: str | None
    phase: Literal["decode", "prefill"]
    tokens: int
    ms: float
    statistic: Literal["mean", "median"]
    runs: int | None
    ms_min: float | None
    ms_max: float | None
    ms_std: float | None
    first_ms: float | None
    load_ms: float | None
    threads: int | None

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.sha256[:80]!r} isn't a SHA-256 in hex")
        if self.ms <= 0 or self.tokens < 1:
            raise ValueError(f"{self.tokens} tokens in {self.ms} ms is no measurement")

    @property
    def tokens_per_s(self) -> float:
        """The rate."""
        return self.tokens / self.ms * 1e3
