"""What rounding every op costs: the numbers of the report, and what is no number any more."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from needle_export.errors import VerificationFailed
from needle_export.measure.parity import Case, kl
from needle_export.measure.rounded import STEPS, measure_rounded

VOCAB = 7


@dataclass
class Found:
    """A finding of a runner."""

    op_name: str
    function: str
    kind: str
    count: int


@dataclass
class Fake:
    """A session that gives the reference's logits, moved by this much."""

    case: Case
    by: NDArray[np.float32]
    findings: list[Found] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    at: int = 99

    def reset(self) -> None:
        self.at = 0
        self.calls.append(0)

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        here = slice(self.at, self.at + len(tokens))
        assert np.array_equal(tokens, self.case.tokens[here])
        self.at += len(tokens)
        self.calls.append(len(tokens))
        moved: NDArray[np.float32] = self.case.logits[here] + self.by[here]
        return moved


def case(length: int, prompt: int) -> Case:
    rng = np.random.default_rng(length)
    logits = rng.standard_normal((length, VOCAB)).astype(np.float32)
    return Case(np.arange(length), prompt, logits, logits.argmax(-1))


def by(length: int, size: float = 1.0) -> NDArray[np.float32]:
    """The same on every logit but one, whose place goes round."""
    moved = np.zeros((length, VOCAB), np.float32)
    moved[np.arange(length), np.arange(length) % VOCAB] = size
    return moved


@pytest.mark.parametrize(("length", "forced"), [(8, 3), (5 + STEPS, STEPS), (60, STEPS)])
def test_only_forced_steps_count(length: int, forced: int) -> None:
    given, moved, told = case(length, 5), by(length), []
    moved[:5] *= 100  # of the prompt, which must not be counted
    session = Fake(given, moved)
    table = measure_rounded(session, given, told.append)
    assert session.calls == [0, 5, *[1] * forced] and told == [1] * forced
    here = slice(5, 5 + forced)
    want, got = given.logits[here], given.logits[here] + moved[here]
    assert table["steps"] == forced and table["max_abs"] == pytest.approx(1.0, rel=1e-6)
    signal = float((want.astype(np.float64) ** 2).sum())
    assert table["sqnr_db"] == pytest.approx(10 * np.log10(signal / forced), rel=1e-6)
    assert table["kl"] == pytest.approx(float(kl(want, got).mean())) and table["kl"] > 0
    assert table["argmax_equal"] == int((got.argmax(-1) == want.argmax(-1)).sum())
    assert forced == 3 or 0 < table["argmax_equal"] < forced


def test_nothing_lost_is_no_noise() -> None:
    given = case(10, 4)
    table = measure_rounded(Fake(given, by(10, 0.0)), given, lambda _: None)
    assert table == {"max_abs": 0.0, "sqnr_db": None, "kl": 0.0, "steps": 6, "argmax_equal": 6}


def test_without_room_for_steps_the_prompt_counts() -> None:
    given, told = case(3, 3), []
    table = measure_rounded(Fake(given, by(3)), given, told.append)
    assert told == [] and table["steps"] == 3 and table["max_abs"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", ["overflow", "nan", "constant nan", "constant infinite"])
def test_what_is_no_number_is_refused_by_name(kind: str) -> None:
    given = case(10, 4)
    found = [Found("block_03_mul_7", "decode", kind, 12), Found("small", "decode", "underflow", 99)]
    with pytest.raises(VerificationFailed) as failure:
        measure_rounded(Fake(given, by(10), found), given, lambda _: None)
    assert failure.value.exit_code == 4 and failure.value.fix == "build with --weights fp32"
    assert f"half precision isn't enough: {kind} in decode: block_03_mul_7 (12 elements);" in str(failure.value)
    assert "small" not in str(failure.value) and "more ops" not in str(failure.value)


def test_an_underflow_alone_is_none() -> None:
    given = case(10, 4)
    assert measure_rounded(Fake(given, by(10), [Found("a", "decode", "underflow", 3)]), given, lambda _: None)


def test_the_worst_five_are_named_and_the_rest_counted() -> None:
    given = case(10, 4)
    found = [Found(f"op_{i}", "decode", "overflow", 10 + i) for i in range(8)]
    found.append(Found("op_2", "decode", "overflow", 100))  # the same again counts together
    with pytest.raises(VerificationFailed) as failure:
        measure_rounded(Fake(given, by(10), found), given, lambda _: None)
    named = failure.value.what.removeprefix("half precision isn't enough: ").split("; ")
    assert named == [f"overflow in decode: op_{i} ({n} elements)" for i, n in
                     ((2, 112), (7, 17), (6, 16), (5, 15), (4, 14))] + ["and 3 more ops"]
