"""The roofline on work that can be added up by hand."""

from __future__ import annotations

import pytest

from needle_export.config.rates import Rates
from needle_export.measure.estimate import estimate, kept_share
from needle_export.measure.work import OpWork, Phase, Prompt, Work, decode_position, gathered, pieces

RATES = Rates(bandwidth=10e9, throughput={"fp32": 20e9, "int8": 80e9}, op=1e-6, call=50e-6)


def work(*ops: OpWork, prompts: tuple[Prompt, ...] = ()) -> Work:
    return Work("onnx", 100, Phase("decode", 1, 128, ops), prompts)


def test_an_op_takes_what_its_slower_side_takes() -> None:
    weighty = OpWork("MatMul", 2, 10_000_000, 0, 0, 1_000_000, "fp32")  # 1 ms of bytes, 0.05 ms of arithmetic
    busy = OpWork("MatMul", 1, 1_000_000, 0, 0, 40_000_000, "fp32")  # 0.1 ms and 2 ms
    parts = estimate(work(weighty, busy), RATES).decode
    assert parts.bytes == pytest.approx(2e-3)
    assert parts.arithmetic == pytest.approx(2e-3)
    assert parts.ops == pytest.approx(3e-6)
    assert parts.calls == pytest.approx(50e-6)
    assert parts.total == pytest.approx(4.053e-3)
    assert estimate(work(weighty, busy), RATES).decode_ms == pytest.approx(4.053)


def test_values_between_ops_cost_nothing_where_their_rate_is_not_known() -> None:
    handed = OpWork("Add", 10, 0, 0, 4_000_000, 0, "fp32")
    assert estimate(work(handed), RATES).decode.total == pytest.approx(10e-6 + 50e-6)
    known = Rates(10e9, {"fp32": 1e9}, 1e-6, values=40e9)
    assert estimate(work(handed), known).decode.values == pytest.approx(1e-3)


def test_a_measured_stream_of_a_type_is_used_for_its_weights_alone() -> None:
    rates = Rates(10e9, {"fp32": 1e12}, 0.0, streams={"int4": 5e9})
    ops = OpWork("MatMulNBits", 1, 5_000_000, 10_000_000, 0, 0, "int4"), OpWork("Gemm", 1, 10_000_000, 0, 0, 0, "fp32")
    assert estimate(work(*ops), rates).decode.bytes == pytest.approx(1e-3 + 1e-3 + 1e-3)


@pytest.mark.parametrize(("dtype", "seconds"), [("int4", 1.0), ("int8", 1.0), ("fp16", 4.0), ("fp32", 4.0)])
def test_a_type_without_a_rate_goes_at_the_rate_of_the_one_it_is_widened_to(dtype: str, seconds: float) -> None:
    parts = estimate(work(OpWork("MatMul", 1, 0, 0, 0, 80 * 10**9, dtype)), RATES).decode
    assert parts.arithmetic == pytest.approx(seconds)


def test_no_rate_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rate for fp16 among int8"):
        estimate(work(OpWork("MatMul", 1, 0, 0, 0, 1, "fp16")), Rates(1e9, {"int8": 1e9}, 0.0))


def test_a_prompt_is_the_sum_of_its_calls() -> None:
    chunk = Phase("prefill", 64, 64, (OpWork("MatMul", 1, 0, 0, 0, 20_000_000, "fp32"),))
    found = estimate(work(prompts=(Prompt(128, (chunk, chunk)),)), RATES).prompts[0]
    assert found.parts.total == pytest.approx(2 * (1e-3 + 1e-6 + 50e-6))
    assert found.tokens_per_s == pytest.approx(128 / found.parts.total)


def test_a_cache_keeps_everything_that_fits_and_little_of_what_is_twice_its_size() -> None:
    assert kept_share(10, 0) == 0
    assert kept_share(10, 10) == kept_share(5, 10) == 1
    assert kept_share(20, 10) == pytest.approx(0.2032, abs=1e-3)  # h = exp(-2 (1 - h))
    assert kept_share(100, 10) < 1e-4
    shares = [kept_share(size, 10) for size in range(1, 60)]
    assert shares == sorted(shares, reverse=True)


def test_what_the_cache_has_kept_comes_at_the_cache_s_rate() -> None:
    rates = Rates(10e9, {"fp32": 1e12}, 0.0, cache=8e6, cached={"fp32": 80e9})
    assert estimate(work(OpWork("Gemm", 1, 8_000_000, 0, 0, 0, "fp32")), rates).decode.bytes == pytest.approx(1e-4)
    twice = estimate(work(OpWork("Gemm", 2, 8_000_000, 0, 0, 0, "fp32")), rates).decode.bytes
    assert twice == pytest.approx(16e6 * (0.7968 / 10e9 + 0.2032 / 80e9), rel=1e-3)


def test_equal_work_is_counted_together() -> None:
    one = OpWork("Add", 1, 0, 0, 8, 0, "fp32")
    assert gathered([one, OpWork("Add", 2, 0, 0, 8, 0, "fp32"), OpWork("Add", 1, 0, 0, 9, 0, "fp32")]) == (
        OpWork("Add", 1, 0, 0, 9, 0, "fp32"),
        OpWork("Add", 3, 0, 0, 8, 0, "fp32"),
    )


def test_work_below_zero_and_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="below zero"):
        OpWork("Add", 1, -1, 0, 0, 0, "fp32")
    with pytest.raises(ValueError, match="int3"):
        OpWork("Add", 1, 0, 0, 0, 0, "int3")


def test_phases_add_up() -> None:
    phase = Phase("decode", 1, 8, (OpWork("A", 2, 3, 5, 7, 11, "fp32"), OpWork("B", 1, 1, 1, 1, 1, "int8")))
    assert (phase.count, phase.weight_bytes, phase.state_bytes, phase.moved_bytes, phase.macs) == (3, 7, 11, 15, 23)


def test_the_position_is_in_the_middle_of_the_steps_that_are_timed() -> None:
    assert decode_position(1024) == 192 + 4
    assert decode_position(128) == (128 - 68) + 4
    assert decode_position(16) == 4
    assert list(pieces(300, 128)) == [(0, 128), (128, 128), (256, 44)]
