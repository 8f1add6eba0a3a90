"""Rates from times: those that made the times are found again, and times that no rates make are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from needle_export.config.rates import Rates
from needle_export.errors import Unsupported
from needle_export.measure.estimate import estimate
from needle_export.measure.rates import DTYPES, Timed, kernels, merged, nonnegative, solve
from needle_export.measure.work import OpWork, Phase, Work

CACHE = 32 << 20

RATES = Rates(
    bandwidth=18e9,
    throughput={"fp32": 50e9, "int8": 200e9, "int4": 150e9},
    op=0.15e-6,
    call=5e-6,
    cold=0.6e-6,
    own=1000.0,
    streams={"fp32": 18e9, "int8": 17e9, "int4": 12e9},
    cache=CACHE * 10 / 16,
    cached={"fp32": 70e9, "int8": 60e9, "int4": 36e9},
    values=40e9,
)


def phase(kernel: dict[str, object]) -> Phase:
    """The work of a graph as a target would tell it, roughly."""
    count, rows, dtype = int(kernel.get("count", 1)), int(kernel.get("rows", 1)), str(kernel.get("dtype", "fp32"))  # type: ignore[call-overload]  # numbers
    matrix = OpWork("product", 1, DTYPES[dtype], 0, 2 * 4 * 768 * rows, 768 * 768 * rows, dtype)
    if kernel["kind"] == "small":
        return Phase("small", 1, 0, (OpWork("op", 1, 0, 0, 6144, 0, "fp32"),))
    if kernel["kind"] == "products":
        return Phase("products", rows, 0, (replace(matrix, count=count),))
    others = OpWork("op", 90 * count, 0, 0, 2000 * rows, 0, "fp32")
    return Phase("blocks", rows, 0, (replace(matrix, count=3 * count), others))


def times(rates: Rates) -> dict[str, Timed]:
    found = {}
    for name, kernel in kernels(CACHE).items():
        made = phase(kernel)
        found[name] = Timed(estimate(Work("", 0, made, ()), rates).decode.total, made)
    return found


def test_the_rates_that_made_the_times_are_found() -> None:
    found = solve(times(RATES), CACHE)
    for name in ("streams", "cached", "throughput"):
        for dtype, rate in getattr(RATES, name).items():
            assert getattr(found, name)[dtype] == pytest.approx(rate, rel=0.05), (name, dtype)
    assert found.op == pytest.approx(RATES.op, rel=0.1)
    assert found.cold == pytest.approx(RATES.cold, rel=0.1)
    assert found.values == pytest.approx(RATES.values, rel=0.1)
    assert found.cache == RATES.cache and found.own == RATES.own


def test_what_they_predict_is_right_where_nothing_was_timed() -> None:
    found = solve(times(RATES), CACHE)
    matrices = OpWork("product", 40, 1_200_000, 0, 6144, 1_200_000, "int8")
    model = Work("", 0, Phase("decode", 1, 0, (matrices, OpWork("op", 2000, 0, 0, 2000, 0, "fp32"))), ())
    assert estimate(model, found).decode_ms == pytest.approx(estimate(model, RATES).decode_ms, rel=0.05)


def test_the_median_of_several_runs_counts() -> None:
    usual = times(RATES)
    lucky, slow = ({name: replace(t, seconds=by * t.seconds) for name, t in usual.items()} for by in (0.5, 2))
    assert merged([slow, lucky, usual]) == usual


def test_times_that_contradict_each_other_are_refused() -> None:
    found = times(RATES)
    # Blocks take no longer than their matrices alone, so that ops would cost less than nothing.
    wrong = {name: replace(t, seconds=t.seconds / 50) if name.startswith("blocks") else t for name, t in found.items()}
    with pytest.raises(Unsupported, match="contradict each other"):
        solve(wrong, CACHE)


def test_least_squares_without_a_negative_number() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    assert nonnegative(rows, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert nonnegative(rows, np.array([-3.0, -2.0, -1.0])) == pytest.approx([0.0, 0.0])


def test_chains_surely_stay_in_the_cache_or_surely_do_not() -> None:
    made = kernels(CACHE)
    for dtype, size in DTYPES.items():
        assert made[f"cached {dtype}"]["count"] * size < CACHE / 2
        assert made[f"streamed {dtype}"]["count"] * size > 3 * CACHE
    assert all(kernel.get("count", 1) >= 1 for kernel in kernels(1 << 20).values())
