"""A build that is to have the confidence head: its signature, its answer in the comparison, its refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from needle_export import pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.errors import UsageError, VerificationFailed
from needle_export.model.network import Needle
from needle_export.targets import find_target
from needle_export.targets.tflite.session import Loop
from tests.support.tflite_builds import GEOMETRY, QUIET, options


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_the_head_is_there_and_compared(weights, builds, tmp_path):
    out = tmp_path / "dist"
    report = pipeline.build(options(builds.checkpoint, out, weights=weights, heads=("confidence",)), QUIET)
    (artifact,) = report.artifacts
    assert set(artifact.signatures) == {"decode", "prefill_8", "prefill_16", "confidence"}
    assert artifact.io["signatures"][-1] == "confidence" and report.options["heads"] == ["confidence"]
    assert not any("not part of this artifact" in note for note in artifact.notes)
    assert artifact.size.by_role["heads"] > 0
    assert artifact.state_bytes.by_part["probes"] > 0
    assert [check.reproduced for check in artifact.runtimes if check.loaded] == [True] * sum(
        bool(check.loaded) for check in artifact.runtimes
    )
    assert pipeline.verify(out, checkpoint=str(builds.checkpoint), progress=QUIET) == report
    if weights == "fp32":
        source = read_checkpoint(builds.checkpoint)
        net = Needle(source.geometry, source.tensors, source.permutations)
        ids = np.random.default_rng(5).integers(1, GEOMETRY.vocab_size, 21)
        runner = find_target("tflite").open(out)
        runner.reset()
        runner.feed(ids)
        with torch.inference_mode():
            want = net.head("confidence", torch.from_numpy(ids)).numpy()
        assert np.abs(runner.loop.confidence() - want).max() < 1e-5


def test_a_wrong_answer_of_the_head_fails_the_build(builds, tmp_path, monkeypatch):
    right = Loop.head
    monkeypatch.setattr(Loop, "head", lambda self, name: right(self, name) + np.float32(1e-2))
    with pytest.raises(VerificationFailed, match="states differ"):
        pipeline.build(options(builds.checkpoint, tmp_path / "dist", heads=("confidence",)), QUIET)
    assert not (tmp_path / "dist").exists()


def test_a_head_that_the_checkpoint_lacks_is_refused(builds, tmp_path):
    with pytest.raises(UsageError, match="router"):
        pipeline.build(options(builds.checkpoint, tmp_path / "dist", heads=("router",)), QUIET)
