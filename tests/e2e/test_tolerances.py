"""Bounds of the verification that are asked for: tighter ones hold, looser ones are refused before anything is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import UsageError, VerificationFailed

QUIET = NullProgress()


def test_a_looser_bound_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    asked = BuildOptions(str(tmp_path / "nowhere"), tmp_path / "out", tolerances=(("logits", 1e-3),))
    with pytest.raises(UsageError, match=r"0.001 for logits is looser than the scheme's own 0.0001"):
        pipeline.build(asked, QUIET)
    assert not (tmp_path / "out").exists()


def test_a_tighter_one_holds_when_built_and_when_verified(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path, out = tmp_path / "x.safetensors", tmp_path / "out"
    write_sample(path, SMALL.with_layers(2), 0)
    asked = BuildOptions(str(path), out, context=48, bench=False, tolerances=(("state", 5e-5), ("logits", 5e-5)))
    report = pipeline.build(asked, QUIET)
    told = report.artifacts[0].parity["tolerance"]
    assert (told["logits"], told["state"]) == (5e-5, 5e-5) and told["reason"].startswith("tightened")
    assert report.options["tolerances"] == {"logits": 5e-5, "state": 5e-5}
    # What was met is held against something that can't be: the same artifact fails then.
    raw = json.loads((out / "report.json").read_text(encoding="utf-8"))
    raw["artifacts"][0]["parity"]["tolerance"]["logits"] = 1e-12
    (out / "report.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(VerificationFailed, match="logits differ by"):
        pipeline.verify(out, checkpoint=None, progress=QUIET)
    with pytest.raises(VerificationFailed, match="more than 1e-12"):
        pipeline.build(replace(asked, out=tmp_path / "other", tolerances=(("logits", 1e-12),)), QUIET)
    assert not (tmp_path / "other").exists()
