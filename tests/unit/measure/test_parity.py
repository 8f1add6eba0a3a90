"""What is allowed of a comparison, by scheme, and what is a tie."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from needle_export.config.options import WEIGHTS
from needle_export.errors import BadInput, VerificationFailed
from needle_export.measure import parity
from needle_export.measure.parity import Case, Measured, Sensitivity, Tolerance, judge, margins, tolerance_of

MOVED = Sensitivity(logits=0.01, state=0.003)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_float_schemes_have_one_tolerance_whatever_the_model(weights: str) -> None:
    tolerance = tolerance_of(weights, None)
    assert (tolerance.logits, tolerance.state, tolerance.ties) == (1e-4, 1e-4, 0.0) and tolerance.reason
    assert tolerance_of(weights, Sensitivity(5.0, 5.0)) == tolerance
    assert parity.recorded_tolerance(weights, {}) == tolerance


def test_int8_is_allowed_twice_what_the_reference_moves() -> None:
    tolerance = tolerance_of("int8", MOVED, True)
    assert (tolerance.logits, tolerance.state) == (0.02, 0.006)
    # Both of the two best may move by as much as is allowed.
    assert tolerance.ties == 0.04 and "one unit in the last place" in tolerance.reason


def test_int8_is_never_held_tighter_than_float32() -> None:
    tolerance = tolerance_of("int8", Sensitivity(1e-7, 0.0), True)
    floor = tolerance_of("fp32", None)
    assert (tolerance.logits, tolerance.state) == (floor.logits, floor.state)
    assert tolerance.ties == 4e-7  # which says nothing about predictions


@pytest.mark.parametrize("weights", sorted(set(WEIGHTS) - {"fp32", "fp16"}))
def test_schemes_that_round_inputs_have_none_without_a_sensitivity(weights: str) -> None:
    with pytest.raises(ValueError, match=f"{weights} needs the reference's sensitivity"):
        tolerance_of(weights, None, True)
    assert tolerance_of(weights, None).logits == tolerance_of("fp32", None).logits


def test_a_report_gives_the_tolerance_of_its_build() -> None:
    scheme = {"activations": "asymmetric"}
    table = {"sensitivity": dataclasses.asdict(MOVED), "tolerance": {"logits": 99.0}, "scheme": scheme}
    # From what was measured, and not from what a report claims to be allowed.
    assert parity.recorded_tolerance("int8", table) == tolerance_of("int8", MOVED, True)
    for damaged in ({}, {"sensitivity": None}, {"sensitivity": {"logits": 1.0}}):
        with pytest.raises(BadInput, match="how sensitive"):
            parity.recorded_tolerance("int8", {**damaged, "scheme": scheme})
    # A report that doesn't say that inputs are rounded is held to the tightest.
    assert parity.recorded_tolerance("int8", {}) == tolerance_of("int8", None)


def test_rounded_caches_need_a_sensitivity_too() -> None:
    with pytest.raises(ValueError, match="fp32 needs the reference's sensitivity"):
        tolerance_of("fp32", None, cache="int8")
    alone, both = tolerance_of("fp32", MOVED, cache="fp16"), tolerance_of("int8", MOVED, True, "int8")
    assert (alone.logits, alone.state, alone.ties) == (both.logits, both.state, both.ties) == (0.02, 0.006, 0.04)
    assert "rounded to fp16" in alone.reason and "inputs of products" not in alone.reason
    assert "inputs of products" in both.reason and "2^-20" in both.reason
    scheme = {"activations": None, "cache": "fp16"}
    table = {"sensitivity": dataclasses.asdict(MOVED), "scheme": scheme}
    assert parity.recorded_tolerance("fp32", table) == alone
    with pytest.raises(BadInput, match="how sensitive"):
        parity.recorded_tolerance("fp32", {"scheme": scheme})


def test_a_sensitivity_is_the_farthest_of_all_runs() -> None:
    logits = some_logits()
    state = {"k": np.array([2.0, -4.0], np.float32), "v": np.zeros(0, np.float32)}
    first = Sensitivity(0.0, 0.0).widened(case(logits, state=state), logits + 0.5, state)
    assert first == Sensitivity(0.5, 0.0)
    second = first.widened(case(logits, state=state), logits, {**state, "k": np.array([2.0, -5.0], np.float32)})
    assert second == Sensitivity(0.5, 0.25)


def test_a_sensitivity_of_a_toy_takes_more_runs() -> None:
    flipped, still = Sensitivity(0.007, 0.003), Sensitivity(0.007, 3e-7)
    assert [flipped.is_told_by(runs, 2000) for runs in (0, 2, 3, 24)] == [False, False, True, True]
    assert [flipped.is_told_by(runs, 250) for runs in (3, 5, 6, 7)] == [False, False, True, True]
    assert not any(still.is_told_by(runs, 2000) or Sensitivity().is_told_by(runs, 2000) for runs in range(24))


def test_margins_are_between_the_two_best() -> None:
    logits = np.array([[1.0, 4.0, 2.5, -9.0], [3.0, 3.0, 1.0, 0.0], [-1.0, -2.0, -1.5, -8.0]], np.float32)
    assert margins(logits).tolist() == [1.5, 0.0, 0.5]
    assert margins(logits).dtype == np.float32
    assert margins(np.array([[7.0, 5.0]], np.float32)).tolist() == [2.0]
    random = np.random.default_rng(0).normal(size=(50, 30)).astype(np.float32)
    ordered = np.sort(random, axis=-1)
    assert np.array_equal(margins(random), ordered[:, -1] - ordered[:, -2])


TIES = Tolerance(logits=0.1, state=0.1, reason="", ties=0.2)


def measured(**changes: Any) -> Measured:
    return Measured(**{"max_abs": 0.05, "state_max_abs": 0.05, "steps": 10, "argmax_equal": 10, **changes})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"max_abs": 0.1, "state_max_abs": 0.1}, None),
        ({"max_abs": 0.11}, "logits differ by 1.10e-01, more than 1e-01"),
        ({"state_max_abs": 0.11}, "states differ by 1.10e-01 of their range, more than 1e-01"),
        ({"argmax_equal": 9, "clearest_miss": 0.19}, None),
        ({"argmax_equal": 7, "clearest_miss": 0.19}, None),
        ({"argmax_equal": 9, "clearest_miss": 0.2}, "1 of 10 predictions differ"),
        ({"argmax_equal": 7, "clearest_miss": np.inf}, "3 of 10 predictions differ"),
        ({"argmax_equal": 9, "clearest_miss": np.nan}, "1 of 10 predictions differ"),
    ],
)
def test_predictions_may_differ_in_ties_only(changes: dict[str, Any], fault: str | None) -> None:
    assert judge(measured(**changes), TIES) == fault


def test_without_ties_every_prediction_counts() -> None:
    assert judge(measured(), tolerance_of("fp32", None)) is not None  # for its logits
    small = {"max_abs": 1e-5, "state_max_abs": 1e-5}
    assert judge(measured(**small), tolerance_of("fp32", None)) is None
    # The closest of two logits is no excuse in float32.
    fault = judge(measured(**small, argmax_equal=9, clearest_miss=0.0), tolerance_of("fp32", None))
    assert fault == "1 of 10 predictions differ"


class Said:
    """A session that has its answers ready."""

    def __init__(self, logits: np.ndarray, state: dict[str, np.ndarray] | None = None) -> None:
        self.logits, self.at, self.held = logits, 0, state or {}

    def reset(self) -> None:
        self.at = 0

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        self.at += len(tokens)
        return self.logits[self.at - len(tokens) : self.at]

    def state(self) -> dict[str, np.ndarray]:
        return self.held


def case(logits: np.ndarray, **changes: Any) -> Case:
    best = logits.argmax(-1)
    return Case(np.arange(len(logits)), 2, logits, best, **{"margin": margins(logits), **changes})


def compared(session: Said, *cases: Case) -> Measured:
    return parity.compare(session, cases, None, lambda _: None)


def some_logits() -> np.ndarray:
    logits = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    logits[4] = [0, 1, 1.125, 0, 0]
    return logits


def test_the_clearest_miss_is_the_margin_of_a_prediction_that_differs() -> None:
    wanted = some_logits()
    assert compared(Said(wanted), case(wanted)).clearest_miss == 0
    got = wanted.copy()
    got[4, 1] += 0.25
    found = compared(Said(got), case(wanted))
    assert (found.steps, found.argmax_equal, found.clearest_miss) == (4, 3, 0.125)
    # One in the prompt counts neither as a step nor as equal, and is as clear a miss.
    got[1, got[1].argmin()] += 100
    found = compared(Said(got), case(wanted))
    assert (found.steps, found.argmax_equal) == (4, 3)
    assert found.clearest_miss == max(0.125, float(margins(wanted)[1]))


def test_without_recorded_margins_every_miss_is_clear() -> None:
    wanted = some_logits()
    got = wanted.copy()
    got[4, 1] += 0.25
    assert compared(Said(got), case(wanted, margin=np.zeros(0, np.float32))).clearest_miss == np.inf


def test_margins_are_recorded_with_the_reference() -> None:
    first, second = some_logits(), some_logits()[:4] * 2
    cases, columns = parity.unpack(parity.pack([case(first), case(second)], 0))
    assert [c.margin.tolist() for c in cases] == [margins(first).tolist(), margins(second).tolist()]
    assert columns.tolist() == [0, 1, 2, 3, 4]
    got = first.copy()
    got[4, 1] += 0.25
    found = parity.compare(Said(got), cases[:1], columns, lambda _: None)
    assert (found.argmax_equal, found.clearest_miss) == (3, 0.125)


def test_a_comparison_refuses_what_is_no_answer() -> None:
    wanted = some_logits()
    spoiled = wanted.copy()
    spoiled[3, 0] = np.nan
    with pytest.raises(VerificationFailed, match="not finite"):
        compared(Said(spoiled), case(wanted))
    state = {"k": np.zeros((3, 2), np.float32)}
    with pytest.raises(VerificationFailed, match="shape"):
        compared(Said(wanted, {"k": np.zeros((2, 2), np.float32)}), case(wanted, state=state))
    moved = {"k": np.full((3, 2), 0.25, np.float32)}
    assert compared(Said(wanted, moved), case(wanted, state=state)).state_max_abs == 0.25


def test_bounds_only_tighten() -> None:
    own = tolerance_of("fp32", None)
    assert own.tightened({}) is own and own.tightened({"logits": 1.0, "state": 1e-4}) is own
    assert own.tightened({"logits": "0", "state": -1.0, "ties": 3.0}) is own  # as a damaged report may have it
    tight = own.tightened({"logits": 1e-6})
    assert (tight.logits, tight.state, tight.ties) == (1e-6, own.state, own.ties)
    assert parity.recorded_tolerance("fp32", {"tolerance": {"logits": 1e-6, "state": 1.0}}) == tight
