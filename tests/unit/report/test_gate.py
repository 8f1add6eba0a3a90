"""Verdicts on budgets: what is inside, beyond, unknown or meant by nobody, and the exit code that follows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from needle_export.config.metrics import METRICS
from needle_export.errors import CheckFailed, UsageError
from needle_export.report.gate import SLACK
from needle_export.report.measured import Latency
from needle_export.report.schema import FileInfo
from tests.support.budgets import artifact, budget, gate, verdict
from tests.support.reports import make_artifact, make_report, make_size


def latency(**changes: Any) -> Latency:
    made = make_artifact().latency
    assert made is not None
    return dataclasses.replace(made, **changes)


#: Every figure with a bound that is just met, and one that just isn't.
BOUNDS = {
    "size": ("max", "2148 B", "2147 B"), "compressed": ("max", "1933 B", "1932 B"), "state": ("max", "0.7 kB", "699 B"),
    "load_rss": ("max", "128 MB", "127.9 MB"), "load_rss_all": ("max", "221 MB", "220 MB"),
    "runtime_rss": ("max", "49 MB", "48 MB"), "decode": ("max", "2.5 ms", "2.4999 ms"),
    "prefill": ("min", "3200 tokens/s", "3200.1 tokens/s"), "kl": ("max", 0.08, 0.0799),
    "token_agreement": ("min", "75 %", "75.1 %"), "cache_kl": ("max", 0, None),
    "artifact_error": ("max", 1.25e-6, 1.24e-6), "artifact_kl": ("max", 3e-9, 2.9e-9),
    "exact_call_accuracy": ("min", "90 %", "90.1 %"), "nothing_precision": ("min", 0.75, 0.7501),
    "nothing_recall": ("min", "90 %", "91 %"), "reference_agreement": ("min", "97.5 %", 0.976),
}


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_every_figure_can_be_met_and_missed(metric: str) -> None:
    end, met, missed = BOUNDS[metric]
    kept = verdict(budget(metric, **{end: met}))
    assert kept.status == "within" and kept.value == pytest.approx(kept.bound)
    assert kept.upper == (end == "max")
    if missed is not None:
        assert verdict(budget(metric, **{end: missed})).status == "exceeded"


@pytest.mark.parametrize(("role", "bound", "status"), [
    ("routing", "537 B", "within"), ("routing", "536 B", "exceeded"), ("overhead", "537 B", "within"),
    ("overhead", "536 B", "exceeded"), ("heads", "0 B", "within"),  # which this artifact has none of
])
def test_bytes_of_a_role(role: str, bound: str, status: str) -> None:
    assert verdict(budget("size", role=role, max=bound)).status == status


def test_a_role_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"budgets\.toml, line 1: there is no role 'rooting'; did you mean routing\?"):
        gate(budget("size", role="rooting", max="1 MB"))


def test_which_artifacts_are_meant() -> None:
    reports = [make_report(artifact(weights="int4")),
               make_report(artifact(target="tflite", weights="int4, content=int8")),
               make_report(artifact(target="tflite", weights="fp16"))]

    def meant(**which: str) -> list[str]:
        return [f"{v.report} {v.status}" for v in gate(budget("size", max="1 MB", **which), reports=reports).verdicts]

    assert meant() == ["a within", "b within", "c within"]
    assert meant(target="tflite") == ["b within", "c within"]
    assert meant(weights="int4") == ["a within"]
    assert meant(weights="int4*") == ["a within", "b within"]
    assert meant(target="tflite", weights="int4*") == ["b within"]
    assert meant(target="coreml") == [" unmatched"]


def test_a_budget_that_nothing_matches_is_no_success() -> None:
    lost = budget("size", max="1 MB", target="coreml")
    found = gate(lost, budget("size", max="1 MB"))
    assert [v.status for v in found.verdicts] == ["unmatched", "within"]
    assert found.exit_code == 2
    failure = found.failure()
    assert isinstance(failure, UsageError)
    assert failure.sentence == ("budgets.toml, line 1: size, coreml: at most 1 MB: no artifact is meant; there is "
                                "onnx fp32; correct it, or say optional = true")
    # What is exceeded comes first.
    assert gate(lost, budget("size", max="1 B")).exit_code == 1
    optional = gate(budget("size", max="1 MB", target="coreml", optional=True), budget("size", max="1 MB"))
    assert ([v.status for v in optional.verdicts], optional.exit_code) == (["skipped", "within"], 0)


def test_budgets_that_are_all_skipped_check_nothing() -> None:
    found = gate(budget("size", max="1 MB", target="coreml", optional=True))
    assert found.exit_code == 2
    assert "nothing was checked" in str(found.failure())


def test_no_budgets_are_no_success() -> None:
    with pytest.raises(UsageError, match="there are no budgets to check"):
        gate()


def test_a_figure_that_was_not_measured_fails_with_the_reason() -> None:
    report = make_report(artifact(latency=None, memory=None))
    for metric, bound in (("decode", "4 ms"), ("load_rss", "1 GB")):
        found = gate(budget(metric, max=bound), reports=[report])
        assert (found.verdicts[0].status, found.exit_code) == ("unknown", 1)
        assert "--no-bench" in found.verdicts[0].why
        assert isinstance(found.failure(), CheckFailed)
        optional = budget(metric, max=bound, optional=True)
        assert verdict(optional, reports=[report]).status == "skipped"


def test_a_loss_that_a_report_does_not_tell_is_not_zero() -> None:
    made = artifact()
    del made.parity["scheme_loss"]
    assert verdict(budget("kl", max=1), reports=[make_report(made)]).status == "unknown"


def test_measured_values_say_where() -> None:
    found = verdict(budget("decode", max="4 ms"))
    assert (found.basis, found.where) == ("measured", "on Imaginary 9000, 2 cores, Linux, 1 thread, after 256 tokens")
    assert verdict(budget("load_rss", max="1 GB")).where == "on Imaginary 9000, 2 cores, Linux, 1 thread"
    assert verdict(budget("size", max="1 GB")).where == ""


@pytest.mark.parametrize(("prompt", "where"), [(None, "for 256 tokens"), (64, "for 64 tokens")])
def test_prefill_of_a_prompt(prompt: int | None, where: str) -> None:
    found = verdict(budget("prefill", min="1 tokens/s", **({} if prompt is None else {"prompt": prompt})))
    assert found.where.endswith(where)


def test_a_prompt_that_was_not_measured_is_unknown() -> None:
    found = verdict(budget("prefill", min="1 tokens/s", prompt=65))
    assert (found.status, found.why) == ("unknown", "no prompt of 65 tokens was measured")


def test_an_estimate_decides_only_where_the_budget_says_so() -> None:
    report = make_report(artifact(latency=latency(kind="estimated")))
    refused = verdict(budget("decode", max="4 ms"), reports=[report])
    assert refused.status == "unknown" and refused.value is None and "estimated = true" in refused.why
    admitted = verdict(budget("decode", max="4 ms", estimated=True), reports=[report])
    assert (admitted.status, admitted.basis) == ("within", "estimated")
    assert verdict(budget("decode", max="1 ms", estimated=True), reports=[report]).status == "exceeded"


def test_another_device_is_not_this_machine() -> None:
    found = verdict(budget("decode", max="4 ms", device="pixel-8"))
    assert found.status == "unknown" and "pixel-8" in found.why


def test_one_device_at_a_time() -> None:
    both = [budget("size", max="1 MB", device="pixel-8"), budget("size", max="1 MB", device="iphone-15"),
            budget("size", max="1 MB")]
    assert [v.status for v in gate(*both, device="iphone-15").verdicts] == ["skipped", "within", "within"]
    assert [v.status for v in gate(*both).verdicts] == ["within"] * 3


def sized(total: int, **changes: Any) -> Any:
    """A report over an artifact of so many bytes, a quarter of them routing."""
    return make_report(artifact(files=(FileInfo("model.onnx", total, "d" * 64),),
                                size=make_size(total, {"routing": total // 4}), **changes))


@pytest.mark.parametrize(("bound", "most"), [
    ("+2 %", 1020), ("+20 B", 1020), ("-1 %", 990), ("-10 B", 990), ("+0 %", 1000)])
def test_against_a_baseline(bound: str, most: int) -> None:
    for total, status in ((most, "within"), (most + 1, "exceeded")):
        found = verdict(budget("size", max=bound), reports=[sized(total)], baselines=[sized(1000)])
        assert (found.status, found.baseline) == (status, 1000)
        assert found.bound == pytest.approx(most)


def test_a_role_against_a_baseline() -> None:
    found = verdict(budget("size", role="routing", max="+0 %"), reports=[sized(1004)], baselines=[sized(1000)])
    assert (found.status, found.value, found.baseline) == ("exceeded", 251, 250)


def test_the_baseline_has_the_same_artifact_or_none() -> None:
    old = [sized(1000), sized(10, weights="int8")]
    assert verdict(budget("size", max="+0 %"), reports=[sized(1000)], baselines=old).status == "within"
    absent = verdict(budget("size", max="+0 %"), reports=[sized(1000, weights="int4")], baselines=old)
    assert (absent.status, absent.why) == ("unmatched", "the baseline has no onnx int4")
    double = verdict(budget("size", max="+0 %"), reports=[sized(1000)], baselines=[sized(1000), sized(1001)])
    assert (double.status, double.why) == ("unmatched", "the baseline has several onnx fp32")


def test_of_several_baselines_the_one_built_alike_counts() -> None:
    other = dataclasses.replace(sized(10), options={"context": 64})
    found = verdict(budget("size", max="+0 %"), reports=[sized(1000)], baselines=[other, sized(1000)])
    assert (found.status, found.baseline) == ("within", 1000)


def test_without_a_baseline_a_relative_budget_is_refused_or_skipped() -> None:
    with pytest.raises(UsageError, match=r"line 1: size: at most \+2 % is relative to a baseline, and none is given"):
        gate(budget("size", max="+2 %"))
    found = verdict(budget("size", max="+2 %", optional=True))
    assert (found.status, found.why) == ("skipped", "there is no baseline")


def test_times_of_other_machines_are_no_baseline() -> None:
    here, there = make_report(artifact()), make_report(artifact(latency=latency(host="Another, 8 cores")))
    assert verdict(budget("decode", max="+0 %"), reports=[here], baselines=[here]).status == "within"
    found = verdict(budget("decode", max="+500 %"), reports=[here], baselines=[there])
    assert found.status == "unknown" and "Another, 8 cores" in found.why
    missing = verdict(budget("decode", max="+0 %"), reports=[here], baselines=[make_report(artifact(latency=None))])
    assert missing.status == "unknown" and missing.why.startswith("the baseline has none: not measured")


def test_prefill_against_a_baseline_is_of_a_prompt_that_both_have() -> None:
    made = latency()
    short = make_report(artifact(latency=dataclasses.replace(made, prefill=made.prefill[:1])))
    found = verdict(budget("prefill", min="-1 %"), baselines=[short])
    assert found.status == "within" and found.where.endswith("for 64 tokens")


@pytest.mark.parametrize(("total", "bound", "suggested"), [
    (451_234, "900 kB", 'max = "456 kB"'),
    (35_112_345, "72 MB", 'max = "35.5 MB"'),
    (990, "2 kB", 'max = "1 kB"'),
    (50, "1 kB", 'max = "51 B"'),
    (950, "1 kB", ""),  # little to win
    (949, "1 kB", 'max = "959 B"'),
])
def test_a_smaller_artifact_suggests_a_tighter_budget(total: int, bound: str, suggested: str) -> None:
    found = verdict(budget("size", max=bound), reports=[sized(total)])
    assert found.suggestion == suggested
    if suggested:
        # It holds as it is pasted.
        tight = verdict(budget("size", max=suggested.split('"')[1]), reports=[sized(total)])
        assert tight.status == "within" and tight.bound is not None and total >= (1 - SLACK) * tight.bound


def test_what_is_noise_or_follows_a_baseline_suggests_nothing() -> None:
    assert not verdict(budget("decode", max="1 s")).suggestion
    assert not verdict(budget("load_rss", max="10 GB")).suggestion
    assert not verdict(budget("size", max="+50 %"), baselines=[make_report(artifact())]).suggestion
    assert not verdict(budget("size", min="1 B")).suggestion
    assert not verdict(budget("size", role="heads", max="1 MB")).suggestion


def test_random_weights_are_told() -> None:
    assert not gate(budget("size", max="1 MB")).warnings
    (warning,) = gate(budget("size", max="1 MB"), reports=[make_report(artifact(), random=True)]).warnings
    assert warning.startswith("RANDOM WEIGHTS") and warning.endswith("(a)")
