"""An ONNX build's matrices are the checkpoint's, bit for bit, or it says which row isn't; later too."""

from __future__ import annotations

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import VerificationFailed
from needle_export.report.text import render_text
from tests.support.forged import redescribe
from tests.support.onnx_tamper import OUT_PROJ, Spoiled, flip, spoil_finished

pytest.importorskip("onnxruntime")

QUIET = NullProgress()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "two.safetensors"
    write_sample(path, SMALL, 3)
    return path


def options(checkpoint, out):
    return BuildOptions(str(checkpoint), out, weights="int4", layers=2, context=24, bench=False)


def spoil(files):
    files.change("rows(layers.1.attention.out_proj)", flip(3, 1, 2))


def test_a_build_says_how_much_was_compared_and_a_change_is_found_later(checkpoint, tmp_path):
    out = tmp_path / "dist"
    report = pipeline.build(options(checkpoint, out), QUIET)
    (artifact,) = report.artifacts
    compared = artifact.parity["weights"]
    assert compared["matrices"] and compared["bytes"] and compared["folded"] == 2 * 2
    text = " ".join(render_text(report, width=200).split())
    assert f"{compared['matrices']} matrices" in text and "the checkpoint's in every bit" in text
    # Changed with its report, so that nothing but the checkpoint can tell.
    spoil(Spoiled(out))
    redescribe(out)
    with pytest.raises(VerificationFailed, match=r"out_proj/kernel of block 1 .* row 3 first") as failure:
        pipeline.verify(out, checkpoint=str(checkpoint), progress=QUIET)
    assert failure.value.where == str(out) and "build it again" in failure.value.fix


def test_a_spoiled_file_is_not_published(checkpoint, tmp_path, monkeypatch):
    spoil_finished(monkeypatch, spoil)
    with pytest.raises(VerificationFailed, match=rf"{OUT_PROJ} of block 1 \(content\): 1 of 96 rows differ") as failure:
        pipeline.build(options(checkpoint, tmp_path / "dist"), QUIET)
    assert failure.value.exit_code == 4 and list(tmp_path.iterdir()) == []
    assert (failure.value.where, failure.value.fix) == ("onnx", "nothing was published")
