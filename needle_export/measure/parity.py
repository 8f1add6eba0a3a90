"""Does the artifact compute what the reference computes?

Prompts are drawn from a seed. Each is prefilled in one go, then tokens are forced one by one, so that a
deviation can't hide behind the text that it leads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, VerificationFailed

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

#: Decode steps after each prompt.
STEPS = 64

#: Prompt lengths: a few tokens, a chunk, more than a chunk.
PROMPTS = (5, 37, 150)

#: Logit columns that are kept for a later verification, besides each position's best.
KEPT_COLUMNS = 128


@dataclass(frozen=True)
class Tolerance:
    """Largest deviations allowed, and why that much."""

    logits: float
    state: float
    reason: str
    #: Predictions may differ where the reference's own two best lie closer than this.
    ties: float = 0.0

    def tightened(self, bounds: Mapping[str, Any]) -> Tolerance:
        """With smaller bounds where some are given, by name: never with greater ones, and none that is no number."""
        known = {n: v for n, v in bounds.items() if isinstance(v, float | int) and v > 0}
        logits, state = (min(getattr(self, name), known.get(name, math.inf)) for name in ("logits", "state"))
        if (logits, state) == (self.logits, self.state):
            return self
        return replace(self, logits=logits, state=state, reason=f"tightened by --tolerances; else: {self.reason}")


@dataclass(frozen=True)
class Sensitivity:
    """How far the reference's own results move when the inputs of its products move by their last bits.

    Attributes:
        logits: largest change of a logit.
        state: largest change of a state, of its range.
    """

    logits: float = 0.0
    state: float = 0.0

    def is_told_by(self, runs: int, steps: int) -> bool:
        """Whether so many runs of so many tokens times blocks are enough, and some value fell to another level."""
        return runs >= JITTERS and runs * steps >= STEPS_MOVED and min(self.logits, self.state) > _FLOAT

    def widened(self, case: Case, logits: Floats, state: Mapping[str, NDArray[Any]]) -> Sensitivity:
        """With what another run of a case gave: logits [N, V], and state by name."""
        moved = [float(np.abs(state[name] - value).max(initial=0)) / _span(value) for name, value in case.state.items()]
        farthest = float(np.abs(logits - case.logits).max(initial=0))
        return Sensitivity(max(self.logits, farthest), max(self.state, *moved, 0.0))


#: Where both sides compute in float32, with the same numbers. Nothing here is loosened for one checkpoint.
_FLOAT = 1e-4

_REASONS = {
    "fp32": "float32 on both sides; sums are taken in another order",
    "fp16": "the same halves on both sides, widened to float32 before any arithmetic",
}
_SAME = "the same rounded weights on both sides, widened to float32 before any arithmetic"

#: How often the reference runs with its last bits moved, and at most; and tokens times blocks in all of these runs. In
#: a toy few values lie at the edge of two levels, so that three runs may find none of them.
JITTERS, MOST_JITTERS, STEPS_MOVED = 3, 24, 1500

#: What is allowed beyond the reference's own sensitivity, where something is rounded at run time.
SENSITIVITY_FACTOR = 2.0


def tolerance_of(
    weights: str, sensitivity: Sensitivity | None, rounds_inputs: bool = False, cache: str = "fp32"
) -> Tolerance:
    """The largest deviations allowed of a scheme.

    Args:
        weights: scheme.
        sensitivity: of the reference, where inputs or caches are rounded.
        rounds_inputs: whether the runtime rounds the inputs of products.
        cache: what new rows of caches are rounded to.

    A scheme that rounds the inputs of its products, or keys and values, amplifies the last bit: a value at the edge of
    two levels falls to the other one, which the next block's inputs feel. No bound that holds for every model follows
    from that; the reference tells for this one, by how far its own results move with its last bits.

    Raises:
        ValueError: the scheme rounds at run time, and no sensitivity is given.
    """
    if not rounds_inputs and cache == "fp32":
        return Tolerance(_FLOAT, _FLOAT, _REASONS.get(weights, _SAME))
    if sensitivity is None:
        raise ValueError(f"{weights} needs the reference's sensitivity")
    logits, state = SENSITIVITY_FACTOR * sensitivity.logits, SENSITIVITY_FACTOR * sensitivity.state
    what, moves = [], []
    if rounds_inputs:
        what.append("inputs of products are rounded to int8")
        moves.append("its products' inputs do by one unit in the last place")
    if cache != "fp32":
        what.append(f"rows of caches are rounded to {cache}")
        moves.append("rows of its caches do by 2^-20 of their greatest number")
    reason = (
        f"{' and '.join(what)} at run time, so the last bit can move a value by a level: twice the distance that the"
        f" reference itself moves when {' and '.join(moves)}"
    )
    return Tolerance(max(logits, _FLOAT), max(state, _FLOAT), reason, 2 * logits)


def recorded_tolerance(weights: str, table: Mapping[str, Any]) -> Tolerance:
    """The tolerance of a build's comparison, from its report's table.

    Raises:
        BadInput: the scheme needs the reference's sensitivity, and the report doesn't give it.
    """
    scheme, told = table.get("scheme") or {}, table.get("tolerance")
    bounds = told if isinstance(told, Mapping) else {}  # which a build may have tightened
    rounds, cache = bool(scheme.get("activations")), str(scheme.get("cache") or "fp32")
    if not rounds and cache == "fp32":
        return tolerance_of(weights, None).tightened(bounds)
    try:
        moved = table["sensitivity"]
        sensitivity = Sensitivity(float(moved["logits"]), float(moved["state"]))
    except (KeyError, TypeError, ValueError) as fault:
        raise BadInput(
            f"the report doesn't tell how sensitive the {weights} reference is", where="parity", fix="build again"
        ) from fault
    return tolerance_of(weights, sensitivity, rounds, cache).tightened(bounds)


class Session(Protocol):
    """The part of a runner that a comparison needs."""

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]; logits [T, V]."""

    def state(self) -> dict[str, NDArray[Any]]:
        """State by name."""


@dataclass(frozen=True)
class Case:
    """One sequence: a prompt to prefill and tokens to force, and what the reference says.

    Attributes:
        tokens: [N] the whole sequence.
        prompt: how many of them are the prompt.
        logits: [N, V] of the reference, or [N, len(columns)] where only columns are kept.
        best: [N] the reference's most likely next token.
        state: of the reference at the end, by name; empty where it isn't compared.
        margin: [N] distance between the reference's two best logits.
    """

    tokens: Tokens
    prompt: int
    logits: Floats
    best: Tokens
    state: dict[str, NDArray[Any]] = field(default_factory=dict)
    margin: Floats = field(default_factory=lambda: np.zeros(0, np.float32))


def margins(logits: Floats) -> Floats:
    """Distance between the two best logits of each position: [N, V] -> [N]."""
    two = np.partition(logits, -2, axis=-1)[:, -2:]
    distance: Floats = (two[:, 1] - two[:, 0]).astype(np.float32)
    return distance


def draw(vocab: int, context: int, seed: int, ring_rows: int, first: int = 1) -> list[tuple[Tokens, int]]:
    """Seeded sequences and their prompt lengths; where caches wrap, one that wraps them.

    Args:
        ring_rows: rows of the smallest ring, 0 if nothing wraps.
        first: the smallest token id drawn (0 is padding).
    """
    rng = np.random.default_rng(seed)
    if context < 4:
        # No room for a chunk and steps behind it: once all in one chunk, once step by step.
        return [(rng.integers(first, vocab, context, dtype=np.int64), n) for n in (context, 1)]
    steps = min(STEPS, context // 2)
    lengths = [n for n in PROMPTS if n + steps <= context] or [context - steps]
    if ring_rows:
        # Longer than the ring however little longer the context is; with room, decode starts after the wrap.
        lengths.append(min(context, ring_rows + 9 + steps) - steps)
    return [(rng.integers(first, vocab, n + steps, dtype=np.int64), n) for n in lengths]


@dataclass
class Measured:
    """Deviations summed over cases."""

    max_abs: float = 0.0
    state_max_abs: float = 0.0
    error: float = 0.0
    signal: float = 0.0
    kl: float = 0.0
    kl_max: float = 0.0
    positions: int = 0
    steps: int = 0
    argmax_equal: int = 0
    top5_equal: int = 0
    distinct: set[int] = field(default_factory=set)
    prompts: list[int] = field(default_factory=list)
    sampled: int | None = None
    #: Of predictions that differ, the clearest one's margin in the reference.
    clearest_miss: float = 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal to error over all logits compared, in decibels; infinite where there is no error."""
        return sqnr_db(self.signal, self.error)

    def table(self, tolerance: Tolerance) -> dict[str, Any]:
        """The numbers for the report."""
        return {
            "max_abs": self.max_abs,
            "state_max_abs": self.state_max_abs,
            "sqnr_db": finite(self.sqnr_db),
            "kl": self.kl / max(self.positions, 1),
            "kl_max": self.kl_max,
            "positions": self.positions,
            "prompts": self.prompts,
            "steps": self.steps,
            "argmax_equal": self.argmax_equal,
            "top5_equal": self.top5_equal,
            "distinct_predictions": len(self.distinct),
            "columns_compared": self.sampled,
            "tolerance": {
                "logits": tolerance.logits,
                "state": tolerance.state,
                "ties": tolerance.ties,
                "reason": tolerance.reason,
            },
        }


def compare(
    session: Session, cases: Sequence[Case], columns: NDArray[np.int64] | None, done: Callable[[int], None]
) -> Measured:
    """Run all cases and measure; ``columns`` are the kept ones, or None for all.

    Decode steps are compared one by one, prompts position by position.
    """
    total = Measured(sampled=None if columns is None else len(columns))
    for case in cases:
        session.reset()
        parts = [session.feed(case.tokens[: case.prompt])]
        parts += [session.feed(case.tokens[i : i + 1]) for i in range(case.prompt, len(case.tokens))]
        got = np.concatenate(parts)
        total.prompts.append(case.prompt)
        _add(total, case, got, columns)
        for name, want in case.state.items():
            have = session.state()[name]
            if have.shape != want.shape:
                raise VerificationFailed(
                    f"the state has shape {have.shape} instead of {want.shape}", where=name
                )
            total.state_max_abs = max(total.state_max_abs, float(np.abs(have - want).max(initial=0)) / _span(want))
        done(1)
    return total


def _span(state: NDArray[Any]) -> float:
    """What a difference of a state is told in units of."""
    return max(1.0, float(np.abs(state).max(initial=0)))


def _add(total: Measured, case: Case, got: Floats, columns: NDArray[np.int64] | None) -> None:
    if not np.isfinite(got).all():
        raise VerificationFailed("the artifact's logits are not finite", where=f"prompt of {case.prompt}")
    best = got.argmax(-1)
    seen = got if columns is None else got[:, columns]
    difference = (seen - case.logits).astype(np.float64)
    total.max_abs = max(total.max_abs, float(np.abs(difference).max()))
    total.error += float((difference**2).sum())
    total.signal += float((case.logits.astype(np.float64) ** 2).sum())
    total.positions += len(got)
    total.steps += len(got) - case.prompt
    forced = slice(case.prompt, None)
    equal = best == case.best
    total.argmax_equal += int(equal[forced].sum())
    if not equal.all():
        missed = case.margin[~equal] if len(case.margin) else np.full(1, np.inf)
        total.clearest_miss = max(total.clearest_miss, float(missed.max()))
    total.distinct |= set(case.best.tolist())
    if columns is None:
        divergence = kl(case.logits, got)
        total.kl += float(divergence.sum())
        total.kl_max = max(total.kl_max, float(divergence.max()))
        total.top5_equal += int((top(got[forced], 5) == top(case.logits[forced], 5)).all(-1).sum())


def sqnr_db(signal: float, error: float) -> float:
    """Signal to error in decibels, of sums of squares; infinite where there is no error."""
    if not error:
        return math.inf
    return 10 * math.log10(signal / error) if signal else -math.inf


def finite(value: float) -> float | None:
    """A number for JSON, which has no infinity: None instead."""
    return value if math.isfinite(value) else None


def loss(before: Floats, after: Floats) -> dict[str, float]:
    """What a rounding does to a model, from its logits [N, V] without and with it."""
    return {
        "max_abs": float(np.abs(before - after).max()),
        "kl": float(kl(before, after).mean()),
        "argmax_equal": float((before.argmax(-1) == after.argmax(-1)).mean()),
    }


def kl(reference: Floats, other: Floats) -> NDArray[np.float64]:
    """Kullback-Leibler divergence KL(reference || other) in nats by position: [N, V] twice -> [N]."""
    p, q = _log_softmax(reference), _log_softmax(other)
    # Rounding can make a vanishing divergence negative by an ulp of the sum.
    divergence: NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)
    return divergence


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def top(logits: Floats, count: int) -> NDArray[np.int64]:
    """Best token ids in order, [N, count]."""
    order: NDArray[np.int64] = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    return order


def judge(measured: Measured, tolerance: Tolerance) -> str | None:
    """What is out of tolerance, or None."""
    if measured.max_abs > tolerance.logits:
        return f"logits differ by {measured.max_abs:.2e}, more than {tolerance.logits:.0e}"
    if measured.state_max_abs > tolerance.state:
        return (
            f"states differ by {measured.state_max_abs:.2e} of their range, more than {tolerance.state:.0e}"
        )
    if measured.argmax_equal != measured.steps and not measured.clearest_miss < tolerance.ties:
        return f"{measured.steps - measured.argmax_equal} of {measured.steps} predictions differ"
    return None


def pack(cases: Sequence[Case], seed: int) -> dict[str, NDArray[Any]]:
    """What a later verification needs, as arrays: tokens, best ids, and a seeded sample of logit columns."""
    vocab = cases[0].logits.shape[1]
    rng = np.random.default_rng(seed)
    columns = np.sort(rng.choice(vocab, min(KEPT_COLUMNS, vocab), replace=False)).astype(np.int64)
    packed: dict[str, NDArray[Any]] = {"columns": columns}
    for index, case in enumerate(cases):
        packed[f"tokens_{index}"] = case.tokens.astype(np.int32)
        packed[f"prompt_{index}"] = np.array(case.prompt, np.int32)
        packed[f"best_{index}"] = case.best.astype(np.int32)
        packed[f"margin_{index}"] = case.margin
        packed[f"logits_{index}"] = case.logits[:, columns]
    return packed


def unpack(packed: dict[str, NDArray[Any]]) -> tuple[list[Case], NDArray[np.int64]]:
    """The inverse of :func:`pack`: cases with the kept columns only."""
    cases = []
    index = 0
    while f"tokens_{index}" in packed:
        cases.append(
            Case(
                packed[f"tokens_{index}"].astype(np.int64),
                int(packed[f"prompt_{index}"]),
                packed[f"logits_{index}"],
                packed[f"best_{index}"].astype(np.int64),
                margin=packed[f"margin_{index}"],
            )
        )
        index += 1
    return cases, packed["columns"]
