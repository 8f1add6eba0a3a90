"""Latencies of devices: what was imported comes first, and an estimate answers only who asks for one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace as Told
from typing import Any

import pytest

from needle_export.report.gate import check, recorded
from needle_export.report.schema import Artifact, Report
from tests.support.budgets import artifact, budget, verdict
from tests.support.reports import make_report


@dataclass(frozen=True)
class Elsewhere(Artifact):
    """An artifact with times that weren't measured where it was built."""

    estimates: Any = ()
    imported: Any = ()


def estimate(device: str, decode_ms: float = 3.0) -> Told:
    prefill = (Told(tokens=64, ms=20.0, tokens_per_s=3200.0), Told(tokens=256, ms=160.0, tokens_per_s=1600.0))
    return Told(device=device, basis="guess", position=256, decode_ms=decode_ms, prefill=prefill)


def timed(device: str, phase: str, tokens: int, ms: float, file: str = "bench.txt") -> Told:
    return Told(device=device, phase=phase, tokens=tokens, ms=ms, file=file, statistic="mean")


def report(**fields: Any) -> list[Report]:
    plain = artifact()
    values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(Artifact)}
    return [make_report(Elsewhere(**{**values, **fields}))]


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


@dataclass(frozen=True)
class Planned(Report):
    """A report with a plan."""

    plan: Any = None


def planned(*budgets: dict[str, Any], **made: Any) -> Report:
    plain = report(**made)[0]
    values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(Report) if field.name != "plan"}
    return Planned(**values, plan=Told(recipe="android-balanced", device="pixel-8", budgets=budgets))


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
    assert recorded("a", make_report()) == []
