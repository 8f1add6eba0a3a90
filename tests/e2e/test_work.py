"""What finished artifacts tell of their work, and the estimates that builds of a calibrated machine have of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.measure.latency import host
from needle_export.measure.work import Work
from needle_export.report.schema import Report, load_report
from needle_export.targets import find_target
from needle_export.targets.base import TellsWork

CONTEXT = 160


def work_of(target: str, folder: Path, position: int = 10, prompts: tuple[int, ...] = (8, 20)) -> Work:
    found = find_target(target)
    assert isinstance(found, TellsWork)
    return found.work(folder, position, prompts)


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory):
    """ONNX builds of the small model by their options."""
    folder = tmp_path_factory.mktemp("onnx")
    write_sample(folder / "three.safetensors", SMALL, 3)
    made: dict[tuple[object, ...], tuple[Path, Report]] = {}

    def get(**options) -> tuple[Path, Report]:
        key = tuple(sorted(options.items()))
        if key not in made:
            out = folder / f"build{len(made)}"
            asked = BuildOptions(str(folder / "three.safetensors"), out, context=CONTEXT, bench=False, **options)
            made[key] = out, pipeline.build(asked, NullProgress())
        return made[key]

    return get


def products(work: Work) -> int:
    """Multiply-adds of a decode step by q, k, v, gate and output of every block, and by the head."""
    g = SMALL
    q, k, v = g.num_heads * g.qk_head_dim, g.num_kv_heads * g.qk_head_dim, g.num_kv_heads * g.v_head_dim
    out = g.num_heads * g.v_head_dim
    return g.num_layers * g.d_model * (q + k + v + 2 * out) + g.d_model * g.vocab_size


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "int4", "cache": "int8"}, {"opset": 21}, {"weights": "cq4"}],
    ids=str,
)
def test_the_work_of_onnx(onnx, options: dict[str, object]) -> None:
    folder, report = onnx(**options)
    work = work_of("onnx", folder)
    decode = work.decode
    # Every node but those that are done when the model is loaded.
    assert 0.6 * report.artifacts[0].nodes.decode < decode.count <= report.artifacts[0].nodes.decode
    assert products(work) < decode.macs < 6 * products(work)
    assert 0 < decode.weight_bytes < 1.1 * report.artifacts[0].size.total_bytes * (8 if "weights" in options else 1)
    # A chunk is no longer than the window, 16.
    assert [[c.tokens for c in p.calls] for p in work.prompts] == [[8], [16, 4]]
    assert work.prompts[1].calls[0].macs > 1.9 * work.prompts[0].calls[0].macs > 7 * decode.macs


def test_rows_in_use_are_what_onnx_reads(onnx) -> None:
    folder, _ = onnx()
    few, many = (work_of("onnx", folder, position).decode for position in (10, 100))
    assert (few.rows, many.rows) == (64, 128)
    # A window shorter than that is read whole in both.
    assert few.state_bytes < many.state_bytes <= 2 * few.state_bytes
    assert few.weight_bytes == many.weight_bytes


def test_integers_are_read_as_integers(onnx) -> None:
    narrow_options = {"weights": "int4", "cache": "int8"}
    plain, narrow = (work_of("onnx", onnx(**options)[0]).decode for options in ({}, narrow_options))
    assert narrow.weight_bytes < 0.6 * plain.weight_bytes
    assert sum(op.macs * op.count for op in narrow.ops if op.dtype == "int4") > products(work_of("onnx", onnx()[0])) / 2
    assert {op.dtype for op in plain.ops} == {"fp32"}


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_the_work_of_tflite(builds, weights: str) -> None:
    folder, report = builds[weights]
    near, far = (work_of("tflite", folder, position) for position in (5, 40))
    assert near.decode == far.decode and near.decode.rows == 48
    # What widens a constant runs when the file is loaded.
    nodes = report.artifacts[0].nodes
    assert near.decode.count == nodes.decode - nodes.by_op.get("DEQUANTIZE", 0)
    wanted = {"fp32": {"fp32"}}.get(weights, {"fp32", weights})
    assert {op.dtype for op in near.decode.ops} >= wanted
    # 20 tokens: a bucket of 16 and one of 8 that is half full.
    assert [[c.tokens for c in p.calls] for p in near.prompts] == [[8], [16, 8]]


@pytest.mark.parametrize("options", [{}, {"os": "ios17"}, {"weights": "int4"}, {"weights": "cq4"}], ids=str)
def test_the_work_of_core_ml(packages, options: dict[str, object]) -> None:
    folder, report = packages.get(**options)
    work = work_of("coreml", folder)
    assert work.decode.count == report.artifacts[0].nodes.decode
    assert work.decode.macs > products(work)
    assert work.decode.state_bytes > 0
    assert 0 < work.decode.weight_bytes < 1.1 * report.artifacts[0].size.total_bytes
    assert [[c.tokens for c in p.calls] for p in work.prompts] == [[8], [16, 8]]


HOST = """\
id = "host"
name = "This machine"
kind = "host"
os = "Linux"
os_version = {{ value = "6.1", kind = "measured", source = "uname -r" }}
chip = {{ name = "{chip}" }}
memory = {{ value = "8 GB", kind = "measured", source = "free" }}

[[runtime]]
target = "onnx"
name = "ONNX Runtime"
version = {{ value = "1.32.0", kind = "measured", source = "pip show" }}
opset = {{ value = 24, kind = "measured", source = "a build" }}
ir = {{ value = 11, kind = "measured", source = "a build" }}
[runtime.rates]
bandwidth = {{ value = "10 GB/s", kind = "measured", source = "calibrate" }}
fp32 = {{ value = "20 GMAC/s", kind = "measured", source = "calibrate" }}
op = {{ value = "1 us", kind = "measured", source = "calibrate" }}
call = {{ value = "10 us", kind = "measured", source = "calibrate" }}
"""


def test_a_build_on_a_calibrated_machine_has_an_estimate(onnx, tmp_path: Path, monkeypatch) -> None:
    checkpoint = onnx()[0].parent / "three.safetensors"
    file = tmp_path / "host.toml"
    file.write_text(HOST.format(chip=host()))
    monkeypatch.setenv("NEEDLE_EXPORT_HOST", str(file))
    asked = BuildOptions(str(checkpoint), tmp_path / "out", context=CONTEXT, bench=False)
    pipeline.build(asked, NullProgress())
    (artifact,) = load_report(tmp_path / "out").artifacts
    (made,) = artifact.estimates
    assert (made.device, made.basis, made.kind) == ("host", "measured", "estimated")
    work = work_of("onnx", tmp_path / "out", made.position)
    assert made.parts.ops == pytest.approx(work.decode.count * 1e-3)
    assert [p.tokens for p in made.prefill] == [64]
    # Of another machine it is not used, and the report says so.
    file.write_text(HOST.format(chip="Imaginary 9000"))
    report = pipeline.build(asked, NullProgress())
    assert report.artifacts[0].estimates == ()
    assert any("another machine (Imaginary 9000)" in note for note in report.artifacts[0].notes)
