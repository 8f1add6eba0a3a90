"""How fast a machine is, in the few numbers that an estimate of latency needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What one runtime does on one device, with one thread.

    Attributes:
        bandwidth: bytes a second that weights and caches stream from memory at.
        throughput: multiply-adds a second by the type of the operands: ``fp32``, ``fp16``, ``int8`` and others.
        op: seconds that an op costs however little it computes.
        call: seconds that a call of the runtime costs whatever is in it.
    """

    bandwidth: float
    throughput: Mapping[str, float]
    op: float
    call: float = 0.0
