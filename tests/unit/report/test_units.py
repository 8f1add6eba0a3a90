"""Numbers as people read them."""

from __future__ import annotations

import pytest

from needle_export.report import units


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_999, "10.00 kB"), (35_335_380, "35.3 MB"),
    (242_047_978, "242.0 MB"), (999_999, "1.00 MB"), (1_234_567_890, "1.23 GB"), (-1500, "-1.50 kB"),
])
def test_sizes(count: int, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1500, "+1.50 kB"), (-1500, "-1.50 kB")])
def test_differences_have_a_sign(count: int, text: str) -> None:
    assert units.signed_size(count) == text


@pytest.mark.parametrize(("value", "text"), [
    (0.1234, "0.123 ms"), (4.213, "4.21 ms"), (42.13, "42.1 ms"), (421.3, "421.3 ms"), (1240, "1.24 s")])
def test_times(value: float, text: str) -> None:
    assert units.milliseconds(value) == text


def test_rates_and_shares_and_errors() -> None:
    assert units.rate(237.4) == "237 tokens/s"
    assert units.rate(3.14) == "3.1 tokens/s"
    assert units.percent(1, 3) == "33.3 %"
    assert units.percent(0, 0) == "0.0 %"
    assert units.small(0.0) == "0"
    assert units.small(1.234e-6) == "1.2e-06"


def test_plurals() -> None:
    assert [units.plural(n, "file") for n in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]


@pytest.mark.parametrize(("part", "bar"), [
    (0, ""), (1, "▏"), (500, "█████"), (1000, "██████████"), (563, "█████▋")])
def test_bars(part: int, bar: str) -> None:
    assert units.bar(part, 1000, 10) == bar
    assert units.bar(part, 0, 10) == ""
