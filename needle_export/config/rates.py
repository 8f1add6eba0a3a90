"""How fast a machine is, in the few numbers that an estimate of latency needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST = "host"
"""The id of the device file that is this machine's own."""


@dataclass(frozen=True)
class Rates:
    """What one runtime does on one device, with one thread.

    Attributes:
        bandwidth: bytes a second that weights and caches of keys and values stream from memory at.
        throughput: multiply-adds a second by the type of the operands: ``fp32``, ``fp16``, ``int8`` and others.
        op: seconds that an op costs however little it computes, while the cache has kept all that a call needs.
        cold: the same where nothing was kept and an op's own data come from memory; 0 where it isn't known, and then
            ``op`` holds everywhere.
        own: bytes of its own data that an op has the cache hold.
        call: seconds that a call of the runtime costs whatever is in it.
        streams: bandwidth by the type of the weights, where the kernels of a type were measured.
        cache: bytes of a call that the processor's last cache keeps until the next; 0 where that isn't known, and then
            everything comes from memory.
        cached: as ``streams``, of weights that the cache has kept.
        values: bytes a second that ops hand values on at; None where it isn't known, and then only the cost of an op
            stands for that.
    """

    bandwidth: float
    throughput: Mapping[str, float]
    op: float
    call: float = 0.0
    cold: float = 0.0
    own: float = 0.0
    streams: Mapping[str, float] = field(default_factory=dict)
    cache: float = 0.0
    cached: Mapping[str, float] = field(default_factory=dict)
    values: float | None = None
