"""What an artifact has to do for a decode step and for a prompt: bytes to move and multiply-adds, op by op.

A target reads it off its finished files (``targets/*/work.py``), a plan predicts it; :mod:`.estimate` makes time of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: Types that operands of products may have.
DTYPES = ("fp32", "fp16", "int8", "int4")

#: Decode steps that are run and not timed.
_WARM_UP = 4


@dataclass(frozen=True, order=True)
class OpWork:
    """Ops of one kind that have the same work to do.

    Attributes:
        op: the kind, as the target calls it.
        count: how many of them run in a call.
        weight_bytes: of constants that each reads, as they lie in memory while it runs. Of a table only the rows read.
        state_bytes: of caches that each reads, in the rows that it reads; they outlive the call, as weights do.
        moved_bytes: of values that each takes from ops before it and hands to ops behind it.
        macs: multiply-adds of each.
        dtype: of the weights as they are multiplied, one of :data:`DTYPES`; of an op without weights, of its values.
    """

    op: str
    count: int
    weight_bytes: int
    state_bytes: int
    moved_bytes: int
    macs: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype!r} is none of {', '.join(DTYPES)}")
        if min(self.count, self.weight_bytes, self.state_bytes, self.moved_bytes, self.macs) < 0:
            raise ValueError(f"{self.op} has work below zero")


@dataclass(frozen=True)
class Phase:
    """One call of the runtime.

    Attributes:
        name: of the graph, signature or function that is called.
        tokens: that it takes, padding included.
        rows: of a full cache that it reads.
        ops: that it runs.
    """

    name: str
    tokens: int
    rows: int
    ops: tuple[OpWork, ...]

    @property
    def count(self) -> int:
        """Ops that a call runs."""
        return sum(op.count for op in self.ops)

    @property
    def weight_bytes(self) -> int:
        """Bytes of constants that a call reads."""
        return sum(op.count * op.weight_bytes for op in self.ops)

    @property
    def state_bytes(self) -> int:
        """Bytes of caches that a call reads."""
        return sum(op.count * op.state_bytes for op in self.ops)

    @property
    def moved_bytes(self) -> int:
        """Bytes that ops hand to each other in a call."""
        return sum(op.count * op.moved_bytes for op in self.ops)

    @property
    def macs(self) -> int:
        """Multiply-adds of a call."""
        return sum(op.count * op.macs for op in self.ops)


@dataclass(frozen=True)
class Prompt:
    """Reading a prompt of ``tokens`` tokens from the start: the calls that it takes, in order."""

    tokens: int
    calls: tuple[Phase, ...]


@dataclass(frozen=True)
class Work:
    """Of one artifact.

    Attributes:
        target: its name.
        position: tokens before the decode step.
        decode: a step.
        prompts: by length, ascending.
    """

    target: str
    position: int
    decode: Phase
    prompts: tuple[Prompt, ...]


def gathered(ops: Iterable[OpWork]) -> tuple[OpWork, ...]:
    """Ops with equal work counted together, in a fixed order."""
    counts: Counter[tuple[str, int, int, int, int, str]] = Counter()
    for op in ops:
        counts[op.op, op.weight_bytes, op.state_bytes, op.moved_bytes, op.macs, op.dtype] += op.count
    made = (OpWork(kind, count, *rest) for (kind, *rest), count in counts.items())  # type: ignore[arg-type]  # one tuple
    return tuple(sorted(made))


def timed_steps(context: int, steps: int) -> tuple[int, int, int]:
    """Where decode steps are timed: tokens before the warm-up, steps of that, steps that are timed."""
    # Where the measured steps straddle the middle of what a usual context has room for.
    before = min(max(0, context - steps - _WARM_UP), 192)
    count = min(steps, max(1, context - before - _WARM_UP))
    return before, min(_WARM_UP, context - before - count), count


def decode_position(context: int, steps: int = 64) -> int:
    """Tokens before the first decode step that is timed, which is what a report tells of it."""
    before, warm, _ = timed_steps(context, steps)
    return before + warm


def pieces(length: int, largest: int) -> Iterator[tuple[int, int]]:
    """A prompt in chunks of at most ``largest``: (tokens before, tokens) of each."""
    for start in range(0, length, largest):
        yield start, min(largest, length - start)
