"""A build for a device: its report holds the device's estimate, and the plan's budgets are held against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.budget import Budget
from needle_export.config.device import load_device
from needle_export.config.progress import NullProgress
from needle_export.plan import forecast, resolve
from needle_export.report.gate import Entry, check
from needle_export.report.schema import load_report

pytest.importorskip("onnxruntime")


def test_a_build_for_a_device_is_estimated_for_it(tmp_path: Path) -> None:
    source, out = tmp_path / "model.safetensors", tmp_path / "dist"
    write_sample(source, SMALL.with_layers(2), 5)
    given = {"target": "onnx", "context": 64, "bench": False}
    plan = resolve(None, load_device("pixel-8"), given, checkpoint=str(source), out=out)
    pipeline.build(plan.options, NullProgress(), plan.info(), device=plan.device)

    report = load_report(out)
    (artifact,) = report.artifacts
    (made,) = artifact.estimates
    assert (made.kind, made.device, made.basis) == ("estimated", "pixel-8", "guess")
    assert artifact.latency is None
    assert report.plan is not None and report.plan.device == "pixel-8"

    # What was told before the build came from the same rates, over work that was predicted.
    from needle_export.loading import load

    told = forecast(plan, load(plan.options, NullProgress())[0]).estimate
    assert told is not None
    assert told.decode_ms == pytest.approx(made.decode_ms, rel=0.1)

    def status(**changes: object) -> str:
        budget = Budget(metric="decode", max="1 s", device="pixel-8", **changes)
        return check([Entry(budget, "b.toml")], [("dist", report)]).verdicts[0].status

    assert status(estimated=True) == "within"
    assert status() == "unknown"
