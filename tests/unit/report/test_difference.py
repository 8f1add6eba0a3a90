"""What changed from one report to another: sums that hold, the largest first, and what can't be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from needle_export.report.difference import (
    ArtifactDifference,
    Change,
    Difference,
    FigureChange,
    Setting,
    TensorChange,
    difference,
)
from needle_export.report.difference_view import render_difference
from needle_export.report.schema import FileInfo, Nodes, Report, StateBytes
from needle_export.report.sizes import Size, TensorBytes
from tests.support.budgets import artifact
from tests.support.reports import make_report

DOC = (Path(__file__).parents[3] / "docs" / "budgets.md").read_text()


def made(tensors: dict[str, tuple[str, tuple[int, ...]]], overhead: int, **changes: Any) -> Report:
    """A report over an artifact with these tensors: role, and bytes by block."""
    table = tuple(TensorBytes(name, role, sum(layers), layers) for name, (role, layers) in tensors.items())
    roles: dict[str, int] = {}
    for tensor in table:
        roles[tensor.role] = roles.get(tensor.role, 0) + tensor.bytes
    total = sum(roles.values()) + overhead
    files = (FileInfo("model.onnx", overhead, "d" * 64), FileInfo("weights.bin", total - overhead, "e" * 64))
    return make_report(artifact(files=files, size=Size(total, total // 2, roles, overhead, table), **changes))


OLD = {"q": ("routing", (100, 100)), "k": ("routing", (50, 50)), "v": ("content", (80, 80)), "e": ("memory", (30,))}
NEW = {"q": ("routing", (100, 160)), "k": ("routing", (20, 20)), "v": ("content", (80, 80)), "p": ("mixing", (500,))}


def only(old: Report, new: Report) -> ArtifactDifference:
    (found,) = difference(("old", old), ("new", new)).artifacts
    return found


def test_growth_by_role_and_tensor_the_largest_first() -> None:
    found = only(made(OLD, 1000), made(NEW, 1200))
    assert found.total == Change("total", 1490, 2160, 670)
    assert found.compressed == Change("compressed", 745, 1080, 335)
    assert found.roles == (Change("mixing", None, 500, 500), Change("overhead", 1000, 1200, 200),
                           Change("memory", 30, None, -30))
    # Of routing nothing is left over: one tensor grew by what the other lost.
    assert found.tensors == (
        TensorChange("p", "mixing", None, 500, 500, (0,)), TensorChange("q", "routing", 200, 260, 60, (1,)),
        TensorChange("k", "routing", 100, 40, -60, (0, 1)), TensorChange("e", "memory", 30, None, -30, (0,)))
    assert found.files == (Change("weights.bin", 490, 960, 470), Change("model.onnx", 1000, 1200, 200))


@pytest.mark.parametrize("swap", [False, True])
def test_the_parts_make_the_whole(swap: bool) -> None:
    pair = (made(NEW, 7), made(OLD, 1000)) if swap else (made(OLD, 1000), made(NEW, 7))
    found = only(*pair)
    assert sum(c.delta for c in found.roles) == sum(c.delta for c in found.files) == found.total.delta
    weights = found.total.delta - sum(c.delta for c in found.roles if c.name == "overhead")
    assert sum(t.delta for t in found.tensors) == weights


def test_nothing_changed() -> None:
    found = only(made(OLD, 10), made(OLD, 10))
    assert (found.total.delta, found.roles, found.tensors, found.files, found.settings) == (0, (), (), (), ())
    assert all(f.delta == 0 for f in found.figures)
    text = render_difference(difference(("a", made(OLD, 10)), ("b", made(OLD, 10))), "text")
    assert "500 B, no change" in text and "Bytes by role" not in text


def test_state_and_operators() -> None:
    old = made(OLD, 10, state_bytes=StateBytes(30, {"keys": 10, "values": 20}),
               nodes=Nodes(None, 3, {"MatMul": 2, "Add": 1}))
    new = made(OLD, 10, state_bytes=StateBytes(30, {"keys": 20, "taps": 10}), nodes=Nodes(9, 5, {"MatMul": 5}))
    found = only(old, new)
    assert found.state == (Change("values", 20, None, -20), Change("keys", 10, 20, 10), Change("taps", None, 10, 10))
    assert found.ops == (Change("MatMul", 2, 5, 3), Change("Add", 1, None, -1))
    assert found.nodes == (Change("prefill", None, 9, 9), Change("decode", 3, 5, 2))


def test_artifacts_meet_their_likes() -> None:
    def of(*kinds: tuple[str, str]) -> Report:
        return make_report(*(artifact(target=target, weights=weights) for target, weights in kinds))

    onnx4, onnx8, tflite = ("onnx", "int4"), ("onnx", "int8"), ("tflite", "int4")
    same = difference(("a", of(onnx4, tflite)), ("b", of(tflite, onnx4)))
    assert [(d.old, d.new) for d in same.artifacts] == [
        ("a onnx int4", "b onnx int4"), ("a tflite int4", "b tflite int4")]
    # One is left in each.
    renamed = difference(("a", of(onnx4, tflite)), ("b", of(onnx8, tflite)))
    assert ("a onnx int4", "b onnx int8") in [(d.old, d.new) for d in renamed.artifacts]
    grown = difference(("a", of(onnx4)), ("b", of(onnx4, onnx8, tflite)))
    assert (grown.added, grown.removed) == (("onnx int8", "tflite int4"), ())
    assert (difference(("a", of(onnx4, onnx8, tflite)), ("b", of(tflite))).removed) == ("onnx int4", "onnx int8")


def test_what_was_decided_otherwise() -> None:
    old, new = made(OLD, 10), made(OLD, 10, weights="int8", versions={"onnx": "1.24.0"})
    new = dataclasses.replace(
        new, options={**new.options, "context": 64, "buckets": [32, 64]},
        checkpoint=dataclasses.replace(new.checkpoint, sha256="f" * 64, layers=2, lora=()))
    assert only(old, new).settings == (
        Setting("checkpoint", "needle3.safetensors aaaaaaaa", "needle3.safetensors ffffffff"),
        Setting("layers", "3", "2"), Setting("adapters", "home.safetensors bbbbbbbb", ""),
        Setting("weights", "fp32", "int8"), Setting("context", "1024", "64"), Setting("buckets", "", "32, 64"),
        Setting("onnx (library)", "1.23.2", "1.24.0"), Setting("onnxruntime (library)", "1.32.0", ""))


def figure(old: Report, new: Report, metric: str) -> FigureChange:
    (found,) = [f for f in only(old, new).figures if f.metric == metric]
    return found


def test_figures_are_compared_where_they_can_be() -> None:
    base = artifact()
    assert base.latency is not None and base.latency.decode is not None
    slower = dataclasses.replace(base.latency, decode=dataclasses.replace(base.latency.decode, ms_p50=3.0))
    elsewhere = dataclasses.replace(slower, host="Another, 8 cores")
    found = figure(made(OLD, 10), made(OLD, 10, latency=slower), "decode")
    assert (found.old, found.new, found.delta, found.why) == (2.5, 3.0, 0.5, "")
    moved = figure(made(OLD, 10), made(OLD, 10, latency=elsewhere), "decode")
    assert (moved.new, moved.delta) == (3.0, None) and "Another, 8 cores" in moved.why
    absent = figure(made(OLD, 10), made(OLD, 10, latency=None), "decode")
    assert (absent.new, absent.delta) == (None, None) and "--no-bench" in absent.why
    longer = made(OLD, 10)
    longer = dataclasses.replace(longer, options={**longer.options, "context": 64})
    assert "contexts differ" in figure(made(OLD, 10), longer, "kl").why
    assert figure(made(OLD, 10), longer, "decode").delta == 0


def test_text_and_markdown_say_the_same() -> None:
    found = difference(("old", made(OLD, 1000)), ("new|x", made({**NEW, "long" * 9: ("norms", (4,))}, 1200)))
    text = render_difference(found, "text", width=100)
    assert max(map(len, text.splitlines())) <= 100
    told = " ".join(text.split())
    assert "old onnx fp32 → new|x onnx fp32" in text
    assert "size 1.49 kB → 2.16 kB (+674 B, +45.2 %)" in told
    assert "mixing - 500 +500 B 74 %" in told and "q routing 1 200 260 +60 B" in told
    page = render_difference(found, "markdown")
    assert page.startswith("## old onnx fp32 → new\\|x onnx fp32\n")
    assert "| mixing | - | 500 | +500 B | 74 % |" in page and "| k | routing | 0-1 | 100 | 40 | -60 B |" in page


def test_many_rows_are_cut_and_json_has_all() -> None:
    many = {f"t{i:03}": ("routing", (i + 1,)) for i in range(50)}
    found = difference(("a", made({}, 10)), ("b", made(many, 10)))
    text = render_difference(found, "text")
    assert "30 more tensors: see --json" in text and "t049" in text and "t000" not in text
    assert len(json.loads(render_difference(found, "json"))["artifacts"][0]["tensors"]) == 50


def test_json_is_documented() -> None:
    raw = json.loads(render_difference(difference(("a", made(OLD, 1)), ("b", made(NEW, 1))), "json"))
    assert set(raw) == {field.name for field in dataclasses.fields(Difference)}
    section = DOC.split("\n## diff --json\n")[1].split("\n## ")[0]
    for cls in (Difference, ArtifactDifference, Change, TensorChange, FigureChange, Setting):
        for field in dataclasses.fields(cls):
            assert f"`{field.name}`" in section, (cls.__name__, field.name)
