"""Each command calls its function with what was asked for, and prints what came back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, SMALL, parameter_count
from needle_export.config.options import BuildOptions
from needle_export.report.markdown import render_markdown
from needle_export.report.schema import dump_report, load_report, parse_report
from needle_export.report.text import render_text
from tests.cli.conftest import Run
from tests.support import fake_pipeline
from tests.support.reports import is_whole


def calls() -> list[tuple[str, dict[str, Any]]]:
    return fake_pipeline.CALLS


def test_build_with_defaults(run: Run) -> None:
    result = run("build", "x", "--out", "o")
    assert result.exit_code == 0
    assert calls() == [("build", vars(BuildOptions("x", Path("o"))))]
    assert result.stdout == render_text(load_report(Path("o")))
    assert is_whole(Path("o"))


def test_build_with_everything(run: Run) -> None:
    line = ("build hf:a/b --target onnx --out o --layers 8 --lora l.safetensors --context 64 --weights fp16 "
            "--opset 21 --keep-confidence --seed 7 --threads 2 --no-bench --json")
    result = run(*line.split())
    assert result.exit_code == 0
    asked = BuildOptions("hf:a/b", Path("o"), layers=8, lora="l.safetensors", context=64, weights="fp16",
                         opset=21, keep_confidence=True, seed=7, threads=2, bench=False)
    assert calls() == [("build", vars(asked))]
    assert parse_report(result.stdout.encode()) == load_report(Path("o"))
    assert result.stdout.encode() == Path("o/report.json").read_bytes()


def test_build_of_another_target_with_everything(run: Run) -> None:
    line = ("build x --target tflite --out o --weights int8 --context 64 --buckets 16,8 --heads confidence,router "
            "--no-bench --json")
    assert run(*line.split()).exit_code == 0
    asked = BuildOptions("x", Path("o"), "tflite", weights="int8", context=64, buckets=(8, 16),
                         heads=("confidence", "router"), bench=False)
    assert calls() == [("build", vars(asked))]


@pytest.mark.parametrize(("line", "sentence"), [
    ("--target tflite --opset 24", "--opset: the tflite target has no opset"),
    ("--buckets 64", "--buckets: prefill is of variable length in ONNX"),
    ("--heads confidence", "--heads: probe heads aren't part of an ONNX artifact"),
    ("--weights palette4", "--weights: the onnx target has no palette4: no kernel reads a table of levels"),
    ("--weights int4 --opset 23", "--opset: int4 needs ONNX Runtime's own ops"),
    ("--target tflite --buckets 1", "--buckets: 1 is below 2"),
    ("--target tflite --buckets 2000", "--buckets: 2000 tokens don't fit in the context of 1024"),
])
def test_build_options_of_the_other_target_are_refused(run: Run, line: str, sentence: str) -> None:
    result = run("build", "x", "--out", "o", *line.split())
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert calls() == [] and not Path("o").exists()


@pytest.mark.parametrize(("flags", "printed"), [
    (["--quiet"], False), (["-q"], False), (["-q", "--json"], True)])
def test_quiet_build(run: Run, flags: list[str], printed: bool) -> None:
    result = run("build", "x", "--out", "o", *flags)
    assert result.exit_code == 0
    assert bool(result.stdout) == printed
    assert result.stderr == ""


def test_verify(run: Run, dist: Path) -> None:
    report = load_report(dist)
    assert run("verify", str(dist)).stdout == render_text(report)
    assert run("verify", str(dist), "--checkpoint", "c", "--json").stdout == dump_report(report).decode()
    assert calls() == [("verify", {"dist": dist, "checkpoint": None}),
                       ("verify", {"dist": dist, "checkpoint": "c"})]


def test_bench(run: Run, dist: Path) -> None:
    assert run("bench", str(dist)).exit_code == 0
    result = run("bench", str(dist), "--threads", "2", "--steps", "9", "--prompt", "8, 16", "--json")
    assert json.loads(result.stdout)["artifacts"][0]["latency"]["kind"] == "measured"
    assert run("bench", str(dist), "--compute-units", "cpu-ne").exit_code == 0
    usual = {"dist": dist, "threads": 1, "steps": 64, "prompt": None, "compute_units": None, "devices": []}
    assert calls() == [("bench", usual),
                       ("bench", {**usual, "threads": 2, "steps": 9, "prompt": (8, 16)}),
                       ("bench", {**usual, "compute_units": "cpu-ne"})]
    assert run("bench", str(dist), "--device", "pixel-8", "--device", "raspberry-pi-5").exit_code == 0
    assert calls()[-1][1]["devices"] == ["pixel-8", "raspberry-pi-5"]
    assert run("bench", str(dist), "--device", "pixel-9").exit_code == 2
    assert run("bench", str(dist), "--compute-units", "ne").exit_code == 2


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_eval(run: Run, dist: Path, tmp_path: Path, dtype: type) -> None:
    ids, out = tmp_path / "ids.npy", tmp_path / "logits.npy"
    np.save(ids, np.array([3, 1, 255], dtype))
    result = run("eval", str(dist), "--tokens", str(ids), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "[3, 5]" in result.stdout
    logits = np.load(out)
    assert logits.dtype == np.float32
    assert logits[:, 0].tolist() == [3, 1, 255]
    tokens = calls()[0][1]["tokens"]
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [3, 1, 255]
    answer = run("eval", str(dist), "--tokens", str(ids), "--out", str(out), "--json").stdout
    assert json.loads(answer) == {"path": str(out), "shape": [3, 5]}


BAD_TOKENS = {
    "floats": (np.zeros(3), "float64 [3], not whole numbers [T]"),
    "a matrix": (np.zeros((2, 2), np.int64), "int64 [2, 2], not whole numbers [T]"),
    "booleans": (np.zeros(3, bool), "bool [3], not whole numbers"),
    "objects": (np.array([None, 1]), "damaged or holds no numbers"),
    "nothing": (np.zeros(0, np.int64), "has 0 ids, and this build takes 1 to 1024"),
    "too many": (np.zeros(1025, np.int64), "has 1025 ids, and this build takes 1 to 1024; build with"),
    "too large": (np.array([0, 256]), "id 256 at position 1 is outside the vocabulary of 256"),
    "negative": (np.array([5, 0, -1]), "id -1 at position 2 is outside the vocabulary of 256"),
}


@pytest.mark.parametrize(("array", "sentence"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_eval_refuses_what_are_no_tokens(run: Run, dist: Path, array: np.ndarray, sentence: str) -> None:
    np.save("ids.npy", array, allow_pickle=True)
    result = run("eval", str(dist), "--tokens", "ids.npy", "--out", "o.npy")
    assert result.exit_code == 3
    assert sentence in result.stderr
    assert not Path("o.npy").exists()
    assert calls() == []


DAMAGED = {
    "empty": b"", "magic only": b"\x93NUMPY", "text": b"text", "zip": b"PK\x03\x04",
    "open header": b"\x93NUMPY\x01\x00\x76\x00{" + b" " * 117,
    "code": b"\x93NUMPY\x01\x00\x76\x00" + b"__import__('os').abort()".ljust(117) + b"\n",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_eval_refuses_damaged_files(run: Run, dist: Path, data: bytes) -> None:
    Path("ids.npy").write_bytes(data)
    result = run("eval", str(dist), "--tokens", "ids.npy", "--out", "o.npy")
    assert result.exit_code == 3
    assert "ids.npy: th" in result.stderr
    assert ".npy file" in result.stderr


@pytest.mark.parametrize("count", [4 * 10**11, 2**62, 2**70, -1])
def test_eval_refuses_a_header_that_claims_more_than_the_file_has(run: Run, dist: Path, count: int) -> None:
    with Path("ids.npy").open("wb") as handle:
        header = {"descr": "<i8", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(handle, header)
        handle.write(bytes(64))
    result = run("eval", str(dist), "--tokens", "ids.npy", "--out", "o.npy")
    assert result.exit_code == 3
    assert "damaged" in result.stderr


def test_eval_refuses_archives_and_folders(run: Run, dist: Path) -> None:
    np.savez("ids.npz", a=np.zeros(3))
    assert "isn't a .npy file" in run("eval", str(dist), "--tokens", "ids.npz", "--out", "o.npy").stderr
    assert run("eval", str(dist), "--tokens", ".", "--out", "o.npy").exit_code == 3


def test_eval_refuses_a_report_without_its_numbers(run: Run, dist: Path) -> None:
    raw = json.loads((dist / "report.json").read_text())
    raw["options"]["context"] = "many"
    (dist / "report.json").write_text(json.dumps(raw))
    np.save("ids.npy", np.zeros(1, np.int64))
    result = run("eval", str(dist), "--tokens", "ids.npy", "--out", "o.npy")
    assert result.exit_code == 3
    assert "options.context" in result.stderr


def test_a_failed_eval_leaves_an_earlier_output(run: Run, dist: Path) -> None:
    np.save("ids.npy", np.zeros(1, np.int64))
    Path("o.npy").write_bytes(b"earlier")
    assert run("eval", str(dist), "--tokens", "ids.npy", "--out", "o.npy", fake="crash").exit_code == 70
    assert Path("o.npy").read_bytes() == b"earlier"


def test_report_in_every_form(run: Run, dist: Path) -> None:
    report = load_report(dist)
    assert run("report", str(dist)).stdout == render_text(report)
    assert run("report", str(dist / "report.json"), "--format", "text").stdout == render_text(report)
    assert run("report", str(dist), "--format", "markdown").stdout == render_markdown(report)
    for flags in (["--format", "json"], ["--json"]):
        assert run("report", str(dist), *flags).stdout == dump_report(report).decode()


def test_report_into_a_file(run: Run, dist: Path) -> None:
    result = run("report", str(dist), "--format", "markdown", "--out", "r.md")
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path("r.md").read_text() == render_markdown(load_report(dist))
    assert run("report", str(dist), "--out", "absent/r.md").exit_code == 2


def test_a_folder_stranded_between_two_renames_is_recovered_on_reading(run: Run, dist: Path) -> None:
    dist.rename(dist.with_name(".dist.previous"))
    assert run("report", str(dist)).exit_code == 0
    assert is_whole(dist)


def test_inspect(run: Run, sample: Path) -> None:
    text = run("inspect", str(sample), "--bits", "2", "--head", "64/64,48/64", "--context", "32").stdout
    for part in ("RANDOM WEIGHTS", "2 bits", "48/64 (this model)", "at 32 tokens"):
        assert part in text
    answer = json.loads(run("inspect", str(sample), "--bits", "2.5", "--json").stdout)
    assert answer["file"]["random"] is True
    assert answer["model"]["bits"] == 2.5
    assert answer["model"]["head_shapes"] == []


def test_inspect_refuses_impossible_widths(run: Run, sample: Path) -> None:
    assert run("inspect", str(sample), "--bits", "0").exit_code == 2
    assert run("inspect", str(sample), "--head", "47/64").exit_code == 2
    assert run("inspect", str(sample), "--context", "0").exit_code == 2


def test_sample(run: Run, tmp_path: Path) -> None:
    result = run("sample", "a.safetensors", "--geometry", "small", "--layers", "5", "--seed", "3", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    checkpoint = read_checkpoint("a.safetensors")
    assert checkpoint.source.random
    assert checkpoint.geometry == SMALL.with_layers(5)
    assert answer["model"]["parameters"] == parameter_count(SMALL.with_layers(5))
    assert "RANDOM WEIGHTS" in run("sample", "b.safetensors").stdout
    for name, seed in (("c", "3"), ("d", "4")):
        run("sample", name, "--layers", "5", "--seed", seed)
    same, other = (Path(name).read_bytes() == Path("a.safetensors").read_bytes() for name in "cd")
    assert (same, other) == (True, False)


def test_sample_of_the_published_geometry(run: Run) -> None:
    # Two layers keep it small: one engram site is outside, the widths are the real ones.
    assert run("sample", "a.safetensors", "--geometry", "published", "--layers", "2").exit_code == 0
    assert read_checkpoint("a.safetensors").geometry == PUBLISHED.with_layers(2)
