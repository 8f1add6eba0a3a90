"""Answers are counted as docs/evaluate.md says, and shares have the interval that Wilson's paper defines."""

from __future__ import annotations

import math

import pytest

from needle_export.generate.assistant import Answer
from needle_export.generate.calls import Call
from needle_export.measure.answers import Agreement, Tally, Z, wilson

ON, OFF = Call("set_lights", {"room": "kitchen"}), Call("set_lights", {"room": "hall"})
PLAY = Call("play", {})


def answer(*calls: Call, tokens: tuple[int, ...] = (1,), finished: bool = True, valid: bool = True,
           problem: str = "") -> Answer:
    return Answer(tokens, "", calls if valid else None, finished, 9, 0.1, 0.1, problem)


@pytest.mark.parametrize(("right", "given", "counted"), [
    ((ON,), answer(ON), {"exact", "names"}),
    ((ON,), answer(OFF), {"names"}),
    ((ON,), answer(PLAY), set()),
    ((ON, PLAY), answer(PLAY, ON), set()),
    ((ON, PLAY), answer(ON), set()),
    ((), answer(), {"exact", "names", "to_nothing", "nothing", "rightly_nothing"}),
    ((), answer(ON), {"to_nothing"}),
    ((ON,), answer(), {"nothing"}),
    ((ON,), answer(valid=False), {"invalid"}),
    ((), answer(valid=False), {"to_nothing", "invalid"}),
    ((ON,), answer(OFF, problem="no such room"), {"names", "invalid"}),
    ((ON,), answer(ON, finished=False), {"cut"}),
    ((), answer(finished=False), {"to_nothing", "cut"}),
])
def test_what_is_counted(right: tuple[Call, ...], given: Answer, counted: set[str]) -> None:
    tally = Tally()
    tally.add(right, given)
    assert {name for name, count in vars(tally).items() if count} == {"queries", *counted}
    assert all(count in (0, 1) for count in vars(tally).values())


@pytest.mark.parametrize(("one", "other", "calls", "tokens"), [
    (answer(ON), answer(ON), 1, 1),
    (answer(ON), answer(ON, tokens=(2,)), 1, 0),
    (answer(ON), answer(OFF, tokens=(2,)), 0, 0),
    (answer(valid=False), answer(valid=False), 1, 1),
    (answer(valid=False), answer(valid=False, tokens=(2,)), 0, 0),
    (answer(ON, finished=False), answer(ON), 0, 0),
    (answer(ON, finished=False), answer(ON, finished=False), 1, 1),
])
def test_who_agrees(one: Answer, other: Answer, calls: int, tokens: int) -> None:
    agreement = Agreement()
    agreement.add(one, other)
    assert (agreement.queries, agreement.calls, agreement.tokens) == (1, calls, tokens)


@pytest.mark.parametrize(("count", "of"), [(1, 2), (1, 20), (47, 50), (471, 500), (0, 10), (10, 10), (0, 1), (1, 1)])
def test_the_interval_is_of_the_shares_that_the_count_does_not_contradict(count: int, of: int) -> None:
    """Wilson's ends are those shares from which the counted one is just Z standard errors away."""
    low, high = wilson(count, of)
    assert 0 <= low <= count / of <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(count / of - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / of))
    assert (low == 0) == (count == 0) and (high == 1) == (count == of)


def test_known_intervals() -> None:
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for (count, of), ends in {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611),
                              (1, 29): (0.0061, 0.1718)}.items():
        assert wilson(count, of) == pytest.approx(ends, abs=5e-5)


@pytest.mark.parametrize(("count", "of"), [(0, 0), (2, 1), (-1, 3)])
def test_nothing_counted_is_no_share(count: int, of: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        wilson(count, of)
