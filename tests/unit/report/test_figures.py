"""Latencies of devices: what was imported comes first, and an estimate answers only who asks for one."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from needle_export.report.elsewhere import EstimateParts, ImportedLatency, LatencyEstimate, PrefillEstimate
from needle_export.report.gate import check, recorded
from needle_export.report.schema import PlanInfo, Report
from tests.support.budgets import artifact, budget, verdict
from tests.support.reports import make_report


def estimate(device: str, decode_ms: float = 3.0) -> LatencyEstimate:
    prompts = (PrefillEstimate(64, 20.0, 3200.0), PrefillEstimate(256, 160.0, 1600.0))
    parts = EstimateParts(decode_ms, 0.0, 0.0, 0.0, 0.0)
    return LatencyEstimate("estimated", device, device, "guess", 256, decode_ms, parts, prompts)


def timed(
    device: str, phase: Literal["decode", "prefill"], tokens: int, ms: float, file: str = "bench.txt"
) -> ImportedLatency:
    unknown = (None,) * 7
    return ImportedLatency("imported", device, "csv", file, "0" * 64, None, phase, tokens, ms, "mean", *unknown)


def report(**fields: Any) -> list[Report]:
    return [dataclasses.replace(make_report(artifact(**fields)), plan=None)]


def test_an_estimate_decides_only_where_the_budget_says_so() -> None:
    reports = report(estimates=(estimate("pixel-8"),))
    silent = verdict(budget("decode", max="4 ms", device="pixel-8"), reports=reports)
    assert (silent.status, silent.value, silent.basis) == ("unknown", None, "estimated")
    assert "estimated = true" in silent.why
    for bound, status in (("3 ms", "within"), ("2.9 ms", "exceeded")):
        found = verdict(budget("decode", max=bound, device="pixel-8", estimated=True), reports=reports)
        assert (found.status, found.value, found.basis) == (status, 3.0, "estimated")
        assert found.where == "for pixel-8, with rates of kind guess, after 256 tokens"
    # Of another device there is none, and what was measured here is no answer.
    other = verdict(budget("decode", max="4 ms", device="pixel-9", estimated=True), reports=reports)
    assert (other.status, other.why) == ("unknown", "nothing was measured on pixel-9, and there is no estimate for it")


@pytest.mark.parametrize(("prompt", "value"), [(None, 1600.0), (64, 3200.0), (65, None)])
def test_prompts_of_an_estimate(prompt: int | None, value: float | None) -> None:
    more = {} if prompt is None else {"prompt": prompt}
    asked = budget("prefill", min="1 tokens/s", device="pixel-8", estimated=True, **more)
    assert verdict(asked, reports=report(estimates=(estimate("pixel-8"),))).value == value


def test_what_a_device_measured_comes_before_an_estimate() -> None:
    reports = report(estimates=(estimate("pixel-8"),), imported=(
        timed("pixel-8", "decode", 1, 5.0), timed("pixel-8", "decode", 1, 6.0, "slow.txt"),
        timed("pixel-8", "prefill", 64, 32.0), timed("pixel-9", "decode", 1, 1.0)))
    for estimated in (False, True):
        found = verdict(budget("decode", max="10 ms", device="pixel-8", estimated=estimated), reports=reports)
        assert (found.value, found.basis) == (6.0, "imported")
        assert found.where == "on pixel-8, mean, from slow.txt, for 1 token"
    assert verdict(budget("prefill", min="1 tokens/s", device="pixel-8"), reports=reports).value == 2000.0
    # The device can be named by whoever checks, too.
    assert verdict(budget("decode", max="10 ms"), reports=reports, device="pixel-9").value == 1.0
    assert verdict(budget("decode", max="10 ms"), reports=reports).value == 2.5


def planned(*budgets: dict[str, Any], **made: Any) -> Report:
    return dataclasses.replace(report(**made)[0], plan=PlanInfo("android-balanced", "pixel-8", budgets))


def test_a_report_is_held_to_its_own_plan_and_no_other_report() -> None:
    first = planned({"metric": "size", "max": "1 kB"},
                    {"metric": "decode", "max": "4 ms", "estimated": True}, estimates=(estimate("pixel-8"),))
    second = planned({"metric": "size", "max": "1 MB"})
    reports = [("a", first), ("b", second)]
    found = check([entry for name, made in reports for entry in recorded(name, made)], reports)
    assert [(v.report, v.metric, v.status, v.basis) for v in found.verdicts] == [
        ("a", "size", "exceeded", "counted"), ("a", "decode", "within", "estimated"),
        ("b", "size", "within", "counted")]
    assert {(v.file, v.in_file) for v in found.verdicts} == {("android-balanced and pixel-8", False)}


def test_a_report_without_a_plan_has_no_budgets() -> None:
    assert recorded("a", report()[0]) == []
