"""The commands with nothing faked: a sample through build, verify, bench, eval and report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from needle_export.report.schema import load_report
from needle_export.report.text import render_text

#: The program of the environment that runs the tests, whatever PATH says.
PROGRAM = Path(sys.executable).with_name("needle-export")


def needle_export(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sample checkpoint and a build of its rung of two layers."""
    folder = tmp_path_factory.mktemp("work")
    made = needle_export("sample", "small.safetensors", "--geometry", "small", cwd=folder)
    assert made.returncode == 0, made.stderr
    built = needle_export("build", "small.safetensors", "--layers", "2", "--context", "96", "--out", "dist",
                          cwd=folder)
    assert (built.returncode, built.stderr) == (0, "")
    assert built.stdout == render_text(load_report(folder / "dist"))
    return folder


def test_the_report_is_complete_and_labelled(folder: Path) -> None:
    report = load_report(folder / "dist")
    assert report.checkpoint.random
    assert (report.checkpoint.layers, report.checkpoint.parent_layers) == (2, 3)
    (artifact,) = report.artifacts
    assert artifact.status == "verified-on-runtime"
    assert artifact.parity["argmax_equal"] == artifact.parity["steps"] > 0
    assert artifact.latency is not None
    assert artifact.latency.kind == "measured"
    assert sum((folder / "dist" / file.name).stat().st_size for file in artifact.files) \
        == artifact.size.total_bytes


def test_the_views_agree(folder: Path) -> None:
    text = needle_export("report", "dist", cwd=folder).stdout
    assert "RANDOM WEIGHTS" in text.splitlines()[1]
    assert needle_export("report", "dist", "--format", "json", cwd=folder).stdout.encode() \
        == (folder / "dist" / "report.json").read_bytes()
    markdown = needle_export("report", "dist", "--format", "markdown", cwd=folder).stdout
    assert "RANDOM WEIGHTS" in markdown


def test_verify_again(folder: Path) -> None:
    recorded = needle_export("verify", "dist", cwd=folder)
    assert (recorded.returncode, recorded.stderr) == (0, "")
    anew = needle_export("verify", "dist", "--checkpoint", "small.safetensors", "--json", cwd=folder)
    assert (anew.returncode, anew.stderr) == (0, "")
    assert json.loads(anew.stdout)["checkpoint"]["random"] is True


def test_bench_again(folder: Path) -> None:
    result = needle_export("bench", "dist", "--steps", "8", "--prompt", "16", "--json", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    latency = json.loads(result.stdout)["artifacts"][0]["latency"]
    assert [prompt["tokens"] for prompt in latency["prefill"]] == [16]
    assert "--steps 8 --prompt 16" in latency["command"]


def test_eval(folder: Path) -> None:
    np.save(folder / "ids.npy", np.arange(90) * 7 % 256)
    result = needle_export("eval", "dist", "--tokens", "ids.npy", "--out", "logits.npy", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    logits = np.load(folder / "logits.npy")
    assert (logits.shape, logits.dtype) == ((90, 256), np.float32)
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_a_second_build_replaces_the_first_with_the_same_bytes(folder: Path) -> None:
    before = load_report(folder / "dist")
    result = needle_export("build", "small.safetensors", "--layers", "2", "--context", "96", "--out", "dist",
                           "--no-bench", "--quiet", cwd=folder)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    after = load_report(folder / "dist")
    assert after.artifacts[0].latency is None
    assert after.artifacts[0].files == before.artifacts[0].files
    assert not list(folder.glob(".dist*"))


def test_compare_real_builds(folder: Path) -> None:
    """float32, measured, beside int8 of the same checkpoint, not measured."""
    built = needle_export("build", "small.safetensors", "--layers", "2", "--context", "96", "--weights", "int8",
                          "--no-bench", "--quiet", "--out", "dist-int8", cwd=folder)
    assert (built.returncode, built.stderr) == (0, "")
    measured = needle_export("bench", "dist", "--steps", "8", "--json", cwd=folder)
    (folder / "measured.json").write_text(measured.stdout)
    result = needle_export("compare", "measured.json", "dist-int8", "--json", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    int8, fp32 = json.loads(result.stdout)["rows"]
    assert (int8["folder"], fp32["folder"]) == ("dist-int8", "measured.json")
    assert int8["unbeaten"] is fp32["unbeaten"] is True and int8["model"] == fp32["model"]
    exact, lossy = fp32["metrics"], int8["metrics"]
    assert 0 < lossy["size"]["value"] < exact["size"]["value"]
    assert exact["kl"]["value"] == 0 and "no scheme" in exact["kl"]["why"]
    assert 0 < lossy["kl"]["value"] < 1 and 0 < lossy["token_agreement"]["value"] <= 1
    report = load_report(folder / "dist-int8").artifacts[0]
    assert lossy["kl"]["value"] == report.parity["scheme_loss"]["kl"]
    assert lossy["artifact_error"]["value"] == report.parity["max_abs"] > exact["artifact_error"]["value"] > 0
    assert exact["runtime_rss"]["value"] < exact["load_rss"]["value"] < exact["load_rss_all"]["value"]
    assert exact["decode"]["value"] > 0 and exact["prefill"]["value"] > 0
    assert "--no-bench" in lossy["load_rss"]["why"] and lossy["decode"]["value"] is None
    text = needle_export("compare", "dist-int8", "measured.json", cwd=folder).stdout
    assert "RANDOM WEIGHTS" in text and "*  dist-int8" in text and "*  measured.json" in text


def test_a_changed_file_fails_verification(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (folder / "dist").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    largest = max(load_report(broken).artifacts[0].files, key=lambda file: file.bytes)
    data = bytearray((broken / largest.name).read_bytes())
    data[len(data) // 2] ^= 1
    (broken / largest.name).write_bytes(data)
    result = needle_export("verify", str(broken), cwd=folder)
    assert result.returncode == 4
    assert largest.name in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_tflite_build_prints_its_report_and_nothing_else(folder: Path) -> None:
    """The converter and the runtime write to both streams from native code; none of it may be seen."""
    built = needle_export("build", "small.safetensors", "--target", "tflite", "--weights", "int8", "--layers", "2",
                          "--context", "40", "--buckets", "16,8", "--out", "tflite", "--json", cwd=folder)
    assert (built.returncode, built.stderr) == (0, "")
    assert built.stdout.encode() == (folder / "tflite" / "report.json").read_bytes()
    (artifact,) = json.loads(built.stdout)["artifacts"]
    assert (artifact["target"], artifact["weights"]) == ("tflite", "int8")
    assert set(artifact["signatures"]) == {"decode", "prefill_8", "prefill_16"}
    assert artifact["latency"]["kind"] == "measured"
    verified = needle_export("verify", "tflite", "--checkpoint", "small.safetensors", cwd=folder)
    assert (verified.returncode, verified.stderr) == (0, "")
    assert verified.stdout == render_text(load_report(folder / "tflite"))
    assert "a lint from public sources" in " ".join(verified.stdout.split())


def test_a_tflite_build_that_fails_says_one_sentence(folder: Path) -> None:
    line = ("build", "small.safetensors", "--target", "tflite", "--context", "40", "--buckets", "17", "--out", "none")
    failed = needle_export(*line, cwd=folder)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "error: --buckets: 17 tokens are more than the window of 16\n"
    assert not (folder / "none").exists()
