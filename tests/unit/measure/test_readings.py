"""Outputs of other people's benchmarks: what is read from them, and how damaged and foreign ones are refused."""

from __future__ import annotations

import pytest

from needle_export.errors import BadInput
from needle_export.measure.readings import COLUMNS, read

BENCHMARK_MODEL = """\
INFO: STARTING!
INFO: Num threads: [2]
INFO: Loaded model /data/local/tmp/model.tflite
INFO: Initialized session in 85.512ms.
INFO: count=60 first=9060 curr=8268 min=8182 max=9060 avg=8325.1 std=130

INFO: count=121 first=8289 curr=8397 min=8164 max=8600 avg=8260.4 std=45

INFO: Inference timings in us: Init: 85512, First inference: 9060, Warmup (avg): 8325.1, Inference (avg): 8260.4
INFO: Memory footprint delta from the start of the tool (MB): init=130.2 overall=141.5
"""

OLD_BENCHMARK_MODEL = """\
Num threads: [2]
count=7 first=127425 curr=66709 min=66709 max=127425 avg=76605.9 std=20944
count=15 first=66753 curr=66800 min=66699 max=66838 avg=66767.6 std=39
Average inference timings in us: Warmup: 76605.9, Init: 9933, no stats: 66767.6
"""

PERF_TEST = """\
Setting intra_op_num_threads to 1
Session creation time cost: 0.318721 s
First inference time cost: 12 ms
Total inference time cost: 4.1234 s
Total inference requests: 1000
Average inference time cost: 4.1234 ms
Total inference run time: 4.12511 s
Number of inferences per second: 242.418
Min Latency: 0.00385281 s
Max Latency: 0.0091327 s
P50 Latency: 0.00409331 s
P90 Latency: 0.00428 s
"""

OLD_PERF_TEST = """\
Total time cost: 58.8053
Total iterations: 1000
Average time cost: 58.8053 ms
Min Latency is 0.0559777 sec
Max Latency is 0.0623472 sec
"""


def test_benchmark_model_s_summary_and_the_runs_behind_the_warm_up() -> None:
    format, (one,) = read(BENCHMARK_MODEL.encode(), "a.txt")
    assert format == "benchmark_model"
    assert (one.ms, one.statistic, one.runs) == (pytest.approx(8.2604), "mean", 121)
    assert (one.ms_min, one.ms_max, one.ms_std) == (8.164, 8.6, 0.045)
    assert (one.first_ms, one.load_ms, one.threads) == (9.06, 85.512, 2)
    assert one.phase is None and one.device is None and one.date is None


def test_benchmark_model_as_it_was() -> None:
    _, (one,) = read(OLD_BENCHMARK_MODEL.encode(), "a.txt")
    assert (one.ms, one.runs, one.load_ms, one.first_ms) == (pytest.approx(66.7676), 15, 9.933, None)


def test_perf_test_s_median_where_it_tells_one() -> None:
    format, (one,) = read(PERF_TEST.encode(), "a.txt")
    assert format == "onnxruntime_perf_test"
    assert (one.ms, one.statistic, one.runs) == (pytest.approx(4.09331), "median", 1000)
    assert (one.ms_min, one.ms_max, one.load_ms) == tuple(map(pytest.approx, (3.85281, 9.1327, 318.721)))
    assert one.threads == 1
    _, (old,) = read(OLD_PERF_TEST.encode(), "a.txt")
    assert (old.ms, old.statistic, old.runs) == (58.8053, "mean", 1000)
    assert old.ms_min == pytest.approx(55.9777) and old.threads is None


def test_a_csv_with_all_columns() -> None:
    rows = "prefill,64,91.5,median,20,90,95,1.5,120,300,4,bench phone,2026-11-30\ndecode,,8.25,,,,,,,,,,\n"
    text = ",".join(COLUMNS) + "\n" + rows
    format, (prefill, decode) = read(b"\xef\xbb\xbf" + text.encode(), "a.csv")
    assert format == "csv"
    assert (prefill.phase, prefill.tokens, prefill.ms, prefill.statistic) == ("prefill", 64, 91.5, "median")
    assert (prefill.runs, prefill.threads, prefill.device, prefill.date) == (20, 4, "bench phone", "2026-11-30")
    assert (decode.phase, decode.tokens, decode.ms, decode.statistic, decode.runs) == ("decode", 1, 8.25, "mean", None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither the output of"),
        (b"\x89PNG\r\n\x1a\n\xff", "isn't UTF-8"),
        (b"x" * (5 << 20), "far too large"),
        (BENCHMARK_MODEL.partition("Inference timings")[0].encode(), "neither the output of"),
        (2 * BENCHMARK_MODEL.encode(), "several runs"),
        (2 * PERF_TEST.encode(), "several runs"),
        (PERF_TEST.replace("4.1234 ms", "ms").encode(), "no average time in milliseconds"),
        (BENCHMARK_MODEL.replace("8260.4\n", "0\n").encode(), "0 ms is no time"),
        (b"phase,ms\n", "no row"),
        (b"phase,ms,colour\ndecode,1,red\n", "no column 'colour'"),
        (b"phase,ms,ms\ndecode,1,1\n", "once"),
        (b"phase,ms\ndecode\n", "more or fewer cells"),
        (b"phase,ms\ndecode,fast\n", "line 2, ms: 'fast' isn't a number"),
        (b"phase,ms\ndecode,nan\n", "isn't a number"),
        (b"phase,ms\ndecode,-1\n", "isn't a number"),
        (b"phase,ms\nverify,1\n", "neither decode nor prefill"),
        (b"phase,ms\nprefill,1\n", "of how many tokens"),
        (b"phase,ms,tokens\ndecode,1,64\n", "of how many tokens"),
        (b"phase,ms,date\ndecode,1,yesterday\n", "isn't a date"),
        (b"phase,ms,runs\ndecode,1,2.5\n", "whole number"),
        (b"phase,ms,statistic\ndecode,1,mode\n", "neither mean nor median"),
        (b'phase,ms\n"decode,1\n', "isn't a CSV"),
        (b"phase,ms\n" + b"decode,1\n" * 1001, "more than 1000 rows"),
    ],
)
def test_what_is_no_such_output_gets_a_sentence(data: bytes, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read(data, "a.txt")


def test_a_named_format_is_not_guessed() -> None:
    with pytest.raises(BadInput, match="no line of timings"):
        read(PERF_TEST.encode(), "a.txt", "benchmark_model")
