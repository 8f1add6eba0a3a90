"""Scales, round numbers on axes, and labels that cover nothing."""

from __future__ import annotations

import itertools
import random

import pytest

from needle_export.report.charts import (
    BESIDE,
    Label,
    Scale,
    around,
    decades,
    from_zero,
    place_labels,
    rounds,
    text_width,
)


def test_a_scale_by_value_and_by_logarithm() -> None:
    assert [Scale(0, 8)(value) for value in (0, 2, 8, 16)] == [0, 0.25, 1, 2]
    assert [Scale(1, 100, True)(value) for value in (1, 10, 100)] == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize("ends", [(1, 1), (2, 1), (0, 1), (-1, 1)])
def test_a_scale_that_cannot_be(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="an axis can't go"):
        Scale(*ends, logarithmic=True)


@pytest.mark.parametrize(("greatest", "ticks"), [
    (428.0, (0, 100, 200, 300, 400, 500)), (0.83, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    (1000.0, (0, 200, 400, 600, 800, 1000)), (0.0, (0, 0.2, 0.4, 0.6, 0.8, 1.0)), (7, (0, 2, 4, 6, 8)),
])
def test_axes_from_zero_have_round_numbers(greatest: float, ticks: tuple[float, ...]) -> None:
    scale, found = from_zero(greatest)
    assert found == pytest.approx(ticks) and scale.low == 0 and scale.high == pytest.approx(ticks[-1])


@pytest.mark.parametrize(("least", "greatest", "ticks"), [
    (0.0008, 0.08, (1e-4, 1e-3, 1e-2, 1e-1)), (0.01, 0.1, (0.01, 0.1)), (5, 5, (1, 10)), (10, 10, (10, 100)),
])
def test_decades(least: float, greatest: float, ticks: tuple[float, ...]) -> None:
    scale, found = decades(least, greatest)
    assert found == pytest.approx(ticks)
    assert -1e-9 <= scale(least) <= scale(greatest) <= 1 + 1e-9


@pytest.mark.parametrize("values", [[65e6, 127e6, 486e6], [3.0], [1.0, 1e9], [100.0, 101.0]])
def test_a_scale_around_values_has_room_and_few_round_numbers(values: list[float]) -> None:
    scale = around(values)
    assert all(0 < scale(value) < 1 for value in values)
    found = rounds(scale)
    assert len(found) <= 10 and all(0 <= scale(value) <= 1 for value in found)


def boxes(points: list[tuple[float, float]], texts: list[str], labels: list[Label | None], width: float,
          ) -> list[tuple[float, float, float, float]]:
    """What labels cover in a frame, worked out apart from the module."""
    out = []
    for (x, y), text, label in zip(points, texts, labels, strict=True):
        if label is None:
            continue
        long, at = text_width(text, 12), x * width + label.dx
        left = {"start": at, "end": at - long, "middle": at - long / 2}[label.anchor]
        out.append((left, y + label.dy - 6, left + long, y + label.dy + 6))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_labels_cover_neither_each_other_nor_points_at_any_width(seed: int) -> None:
    source = random.Random(seed)
    points = [(source.random(), source.uniform(5, 255)) for _ in range(12)]
    points[1] = (points[0][0] + 0.005, points[0][1] + 2)
    texts = [f"artifact {index}" for index in range(12)]
    labels = place_labels(points, texts, 12, (240, 640), 260)
    assert sum(label is not None for label in labels) >= 8
    for width in (240, 320, 480, 640):
        found = boxes(points, texts, labels, width)
        for left, top, right, bottom in found:
            assert left >= 0 and right <= width and top >= 0 and bottom <= 260
        for a, b in itertools.combinations(found, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_lone_label_stands_to_the_right_and_at_the_edge_to_the_left() -> None:
    assert place_labels([(0.2, 100)], ["int8"], 12, (240, 640), 260) == [Label("start", 10, 0)]
    assert place_labels([(0.99, 100)], ["int8"], 12, (240, 640), 260) == [Label("end", -10, 0)]


def test_a_label_without_room_is_none() -> None:
    assert place_labels([(0.5, 100)], ["x" * 200], 12, (240, 640), 260) == [None]


def test_names_of_lines_stand_beside_their_ends() -> None:
    ends = [(0.55, 100.0), (0.55, 104.0), (0.55, 240.0)]
    first, second, third = place_labels(ends, ["onnx int4", "onnx int8", "tflite"], 12, (240, 640), 260, BESIDE)
    assert first == Label("start", 10, 0) == third
    assert second is not None and second.away and second.anchor == "start"
