"""How long an artifact's work takes by a machine's rates: a roofline over its ops. It is never a measurement.

An op costs what its slower side takes, moving its bytes or doing its arithmetic, and a cost of its own that depends on
neither (Williams, Waterman and Patterson, "Roofline", CACM 2009, with a term for the overhead of small ops). A call of
the runtime costs a constant. docs/latency.md has the formula and what it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from needle_export.config.rates import Rates
from needle_export.measure.work import Phase, Work

#: Where a machine's rate isn't known for a type, the type whose rate stands for it: 4-bit levels are widened to 8, and
#: what can't be done in halves is done in float32.
_INSTEAD = {"int4": "int8", "int8": "fp32", "fp16": "fp32"}


@dataclass(frozen=True)
class Parts:
    """The time of one call, or of several, in seconds by what it is spent on.

    Attributes:
        bytes: of ops that wait for weights and caches.
        arithmetic: of ops that wait for multiply-adds.
        values: of values that ops hand to each other.
        ops: the cost of their number.
        calls: the cost of calling the runtime.
    """

    bytes: float = 0.0
    arithmetic: float = 0.0
    values: float = 0.0
    ops: float = 0.0
    calls: float = 0.0

    @property
    def total(self) -> float:
        """Seconds."""
        return self.bytes + self.arithmetic + self.values + self.ops + self.calls

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class PromptEstimate:
    """Reading a prompt of ``tokens`` tokens."""

    tokens: int
    parts: Parts

    @property
    def tokens_per_s(self) -> float:
        """The rate."""
        return self.tokens / self.parts.total


@dataclass(frozen=True)
class Estimate:
    """One artifact on one machine, with one thread: a decode step with ``position`` tokens before it, and prompts."""

    position: int
    decode: Parts
    prompts: tuple[PromptEstimate, ...]

    @property
    def decode_ms(self) -> float:
        """A decode step in milliseconds."""
        return self.decode.total * 1e3


def estimate(work: Work, rates: Rates) -> Estimate:
    """The time that work takes at a machine's rates."""
    prompts = tuple(
        PromptEstimate(prompt.tokens, sum((_call(phase, rates) for phase in prompt.calls), Parts()))
        for prompt in work.prompts
    )
    return Estimate(work.position, _call(work.decode, rates), prompts)


def _call(phase: Phase, rates: Rates) -> Parts:
    kept = kept_share(phase.weight_bytes + phase.state_bytes + phase.count * rates.own, rates.cache)
    cost = rates.op if not rates.cold else kept * rates.op + (1 - kept) * rates.cold
    moving = computing = 0.0
    for op in phase.ops:
        memory = op.weight_bytes * _lasting(rates, op.dtype, kept) + op.state_bytes * _lasting(rates, "fp32", kept)
        arithmetic = op.macs / rate_of(rates.throughput, op.dtype)
        if memory >= arithmetic:
            moving += op.count * memory
        else:
            computing += op.count * arithmetic
    values = phase.moved_bytes / rates.values if rates.values else 0.0
    return Parts(moving, computing, values, phase.count * cost, rates.call)


def _lasting(rates: Rates, dtype: str, kept: float) -> float:
    """Seconds a byte of what outlives a call, of which the cache has kept a share."""
    streamed = rates.streams.get(dtype, rates.bandwidth)
    return (1 - kept) / streamed + kept / rates.cached.get(dtype, streamed)


def kept_share(lasting: float, cache: float) -> float:
    """The share of a call's lasting bytes that a cache still holds when the next call reads them.

    Calls read the same bytes in the same order. Of a cache that replaces at random, a line survives each of the misses
    of one round with 1 - 1/cache, so that the share h solves h = exp(-(1 - h) lasting / cache); all stay if they fit.
    """
    if cache <= 0 or not lasting:
        return 0.0
    rounds = lasting / cache
    if rounds <= 1:
        return 1.0
    share = 0.0
    # Rises to the least solution; near 1 slowly, hence so many steps.
    for _ in range(1000):
        share = math.exp(-(1 - share) * rounds)
    return share


def rate_of(rates: Mapping[str, float], dtype: str) -> float:
    """The rate of a type, or of the one that is used in its stead where it isn't known.

    Raises:
        ValueError: there is none.
    """
    kind: str | None = dtype
    while kind is not None and kind not in rates:
        kind = _INSTEAD.get(kind)
    if kind is None:
        raise ValueError(f"there is no rate for {dtype} among {', '.join(sorted(rates)) or 'none'}")
    return rates[kind]
