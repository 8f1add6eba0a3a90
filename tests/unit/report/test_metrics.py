"""Figures of an artifact by name: each has a value or a reason, and the two losses stay apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from needle_export.config.metrics import METRICS
from needle_export.report.measured import Latency
from needle_export.report.metrics import FLOAT_CACHES, NO_SCHEME, Value, metrics_of, prompts
from needle_export.report.schema import Artifact
from tests.support.reports import make_artifact, make_report

LOSS = {"kl": 0.08, "argmax_equal": 0.75, "max_abs": 1.9}


def artifact(**parity: Any) -> Artifact:
    plain = make_artifact()
    return dataclasses.replace(plain, parity={**plain.parity, **parity})


def figures(made: Artifact, prompt: int | None = None) -> dict[str, Value]:
    return metrics_of(make_report(made), made, prompt)


def latency(**changes: Any) -> Latency:
    made = make_artifact().latency
    assert made is not None
    return dataclasses.replace(made, **changes)


def test_every_figure_is_read_from_its_place() -> None:
    found = figures(artifact(scheme_loss=LOSS, cache_loss={**LOSS, "kl": 0.002}))
    assert {name: value.value for name, value in found.items()} == {
        "size": 2148, "compressed": 1933, "state": 700,
        "load_rss": 128_000_000, "load_rss_all": 221_000_000, "runtime_rss": 49_000_000,
        "decode": 2.5, "prefill": 3200.0, "kl": 0.08, "token_agreement": 0.75, "cache_kl": 0.002,
        "artifact_error": 1.25e-6, "artifact_kl": 3e-9, "exact_call_accuracy": 0.9, "nothing_precision": 0.75,
        "nothing_recall": 0.9, "reference_agreement": 0.975}
    assert list(found) == [metric.name for metric in METRICS]
    assert all(found[metric.name].unit == metric.unit and not found[metric.name].why for metric in METRICS)


def test_without_a_scheme_the_loss_is_nothing_by_definition() -> None:
    found = figures(artifact(scheme_loss=None))
    assert (found["kl"], found["token_agreement"]) == (Value(0.0, "nats", NO_SCHEME), Value(1.0, "share", NO_SCHEME))


def test_what_caches_cost_is_a_number_of_its_own() -> None:
    plain, rounded = figures(artifact(scheme_loss=LOSS)), figures(artifact(scheme_loss=LOSS, cache_loss=LOSS))
    assert plain["cache_kl"].value is None and "doesn't tell" in plain["cache_kl"].why
    assert figures(artifact(cache_loss=None))["cache_kl"] == Value(0.0, "nats", FLOAT_CACHES)
    assert {name for name in plain if plain[name] != rounded[name]} == {"cache_kl"}


@pytest.mark.parametrize("parity", [{}, {"scheme_loss": {}}, {"scheme_loss": "little"},
                                    {"scheme_loss": {"kl": True, "argmax_equal": "most"}}])
def test_a_loss_that_nobody_tells_is_missing_and_not_nothing(parity: dict[str, Any]) -> None:
    found = figures(artifact(**parity))
    assert (found["kl"].value, found["token_agreement"].value) == (None, None)
    assert "the report " in found["kl"].why and "the report " in found["token_agreement"].why


def test_the_export_error_is_no_loss_of_the_scheme() -> None:
    one, other = figures(artifact(scheme_loss=LOSS, max_abs=0.5, kl=0.1)), figures(artifact(scheme_loss=LOSS))
    assert {name for name in one if one[name] != other[name]} == {"artifact_error", "artifact_kl"}


@pytest.mark.parametrize(("status", "why"), [
    ("verified-on-runtime", "--no-bench"), ("verified-by-evaluator", "an evaluator")])
def test_what_was_not_measured_says_why(status: str, why: str) -> None:
    found = figures(make_artifact(latency=None, memory=None, status=status))
    missing = {name: value.why for name, value in found.items() if value.value is None and "measured" in value.why}
    assert set(missing) == {"load_rss", "load_rss_all", "runtime_rss", "decode", "prefill"}
    assert all(why in text for text in missing.values())
    timed = figures(make_artifact(memory=None))
    assert timed["decode"].value == 2.5 and "no way" in timed["load_rss"].why


def test_prefill_is_of_the_prompt_that_was_asked_for() -> None:
    made = make_artifact(latency=latency(decode=None))
    assert figures(made, 64)["prefill"].value == figures(made)["prefill"].value == 3200.0
    assert figures(made, 128)["prefill"] == Value(None, "tokens/s", "no prompt of 128 tokens was measured")
    assert figures(made)["decode"] == Value(None, "ms", "no decode step was measured")
    assert figures(make_artifact(latency=latency(prefill=())))["prefill"].why == "no prompt was measured"


def test_the_longest_prompt_of_all() -> None:
    both, none = make_artifact(), make_artifact(latency=None)
    short = make_artifact(latency=latency(prefill=latency().prefill[:1]))
    empty = make_artifact(latency=latency(prefill=()))
    assert prompts([both]) == 256
    assert prompts([both, short, none, empty]) == 64
    assert prompts([none]) is None
    other = make_artifact(latency=latency(prefill=(dataclasses.replace(latency().prefill[0], tokens=32),)))
    assert prompts([both, other]) is None
