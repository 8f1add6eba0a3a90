"""Estimated and imported latencies: what they refuse, and that no figure takes them for measured."""

from __future__ import annotations

import dataclasses

import pytest

from needle_export.report.elsewhere import EstimateParts
from needle_export.report.metrics import metrics_of
from tests.support.reports import make_artifact, make_report


def test_the_parts_of_an_estimate_are_the_whole() -> None:
    (estimate,) = make_artifact().estimates
    with pytest.raises(ValueError, match="the parts make 8 ms, not 9"):
        dataclasses.replace(estimate, parts=EstimateParts(5.0, 1.0, 0.5, 1.0, 0.5))


@pytest.mark.parametrize("change", [{"sha256": "e"}, {"ms": 0.0}, {"tokens": 0}])
def test_an_import_that_is_no_measurement_is_refused(change: dict[str, object]) -> None:
    (imported,) = make_artifact().imported
    with pytest.raises(ValueError):
        dataclasses.replace(imported, **change)


def test_no_figure_takes_an_estimate_for_measured() -> None:
    artifact = make_artifact(latency=None)
    figures = metrics_of(make_report(artifact), artifact)
    assert figures["decode"].value is None and figures["prefill"].value is None
    assert metrics_of(make_report(), make_artifact())["decode"].value == 2.5
