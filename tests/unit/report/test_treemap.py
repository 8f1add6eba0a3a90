"""The treemap: areas in proportion, the frame filled, nothing overlapping."""

from __future__ import annotations

import itertools
import random

import pytest

from needle_export.report.treemap import Rect, squarify

FRAME = Rect(10, 20, 600, 400)


def drawn(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [int(10 ** source.uniform(0, 8)) for _ in range(count)]


CASES = [[6, 6, 4, 3, 2, 2, 1], [1], [5, 0, 5], [1] * 20, [10**9, 1], *(drawn(seed, 40) for seed in range(5))]


@pytest.mark.parametrize("weights", CASES)
def test_areas_are_in_proportion(weights: list[int]) -> None:
    rects = squarify(weights, FRAME)
    assert len(rects) == len(weights)
    for weight, rect in zip(weights, rects, strict=True):
        assert rect.area == pytest.approx(FRAME.area * weight / sum(weights), rel=1e-9, abs=1e-9)
    assert sum(rect.area for rect in rects) == pytest.approx(FRAME.area, rel=1e-12)


@pytest.mark.parametrize("weights", CASES)
def test_nothing_overlaps_or_leaves_the_frame(weights: list[int]) -> None:
    rects = [rect for rect in squarify(weights, FRAME) if rect.area]
    slack = 1e-6
    for r in rects:
        assert r.x >= FRAME.x - slack and r.x + r.width <= FRAME.x + FRAME.width + slack
        assert r.y >= FRAME.y - slack and r.y + r.height <= FRAME.y + FRAME.height + slack
    for a, b in itertools.combinations(rects, 2):
        across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
        down = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
        assert across <= slack or down <= slack


def test_the_example_of_the_paper() -> None:
    """Figure 4: 6, 6, 4, 3, 2, 2, 1 in 6 x 4; the first two fill the left half."""
    first, second, third, *_ = squarify([6, 6, 4, 3, 2, 2, 1], Rect(0, 0, 6, 4))
    assert (first, second) == (Rect(0, 0, 3, 2), Rect(0, 2, 3, 2))
    assert (third.x, third.width) == (3, pytest.approx(12 / 7))


def test_the_order_of_the_arguments_is_kept() -> None:
    small, large = squarify([1, 3], Rect(0, 0, 4, 1))
    assert large == Rect(0, 0, 3, 1) and small == Rect(3, 0, 1, 1)


def test_shapes_stay_near_squares() -> None:
    ratios = [max(r.width / r.height, r.height / r.width) for r in squarify([1] * 20, Rect(0, 0, 500, 400))]
    assert max(ratios) < 1.5


def test_nothing_and_what_cannot_be() -> None:
    assert squarify([], FRAME) == []
    assert [rect.area for rect in squarify([0, 0], FRAME)] == [0, 0]
    with pytest.raises(ValueError, match="below 0"):
        squarify([1, -1], FRAME)
    with pytest.raises(ValueError, match="no area"):
        squarify([1], Rect(0, 0, 0, 5))
