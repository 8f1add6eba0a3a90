"""The ONNX artifact computes what the reference computes, whatever the geometry, opset and scheme."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.errors import BadInput, UsageError
from needle_export.measure import parity
from needle_export.targets.onnx.builder import Builder, features
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.targets.onnx.store import WeightFile
from needle_export.targets.onnx.target import OnnxTarget
from tests.support.geometries import VARIANTS
from tests.support.programs import compile_onnx, sample_checkpoint, tokens

CASES = [(name, 60, 24, "fp32") for name in VARIANTS if name not in ("all_heads", "no_heads")]
CASES += [
    ("small", 16, 24, "fp32"),
    ("small", 60, 23, "fp32"),
    ("small", 60, 21, "fp32"),
    ("small", 60, 24, "fp16"),
]
CASES += [("orders", 60, 21, "fp16"), ("no_taps", 60, 23, "fp32"), ("lanes", 12, 21, "fp32")]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact")
    checkpoint = sample_checkpoint(tmp_path_factory.mktemp("checkpoint"), SMALL)
    compiler, compiled = compile_onnx(checkpoint, folder, 60)
    return folder, compiler, compiled


@pytest.mark.parametrize(("name", "context", "opset", "weights"), CASES)
def test_artifact_equals_reference(name, context, opset, weights, tmp_path):
    checkpoint = sample_checkpoint(tmp_path, VARIANTS[name])
    folder = tmp_path / "out"
    folder.mkdir()
    compiler, compiled = compile_onnx(checkpoint, folder, context, opset=opset, weights=weights)
    compiler.use_stored_weights(compiled.weights, None)
    runner = OnnxRunner(folder)
    measured = parity.compare(runner, compiler.reference(0), None, lambda _: None)
    assert parity.judge(measured, parity.tolerance_of(weights, None)) is None
    assert measured.max_abs < 2e-5
    assert measured.steps == measured.top5_equal
    assert len(measured.distinct) > measured.positions // 5
    for phase in ("decode", "prefill"):
        model = onnx.load(folder / f"{phase}.onnx", load_external_data=False)
        assert {o.version for o in model.opset_import if o.domain == ""} == {opset}
        domains = {n.domain for n in model.graph.node}
        assert domains == ({"", "com.microsoft"} if opset == 24 else {""})


@pytest.mark.parametrize(("name", "missed"), [("odd_width", {"trim_kronecker": 6}), ("no_engram", {})])
def test_the_report_counts_each_refusal_once(name, missed, tmp_path):
    checkpoint = sample_checkpoint(tmp_path, VARIANTS[name])
    compiler, _ = compile_onnx(checkpoint, tmp_path, 60)
    table = compiler.fusions()
    found = {name: f.expected - f.fused for name, f in table.items() if f.expected != f.fused}
    assert found == missed
    # At each end of the MLP of three blocks; a reason for every one, though two phases met it.
    assert [len(table[name].left) for name in missed] == list(missed.values())
    assert all("not a multiple" in left.reason for name in missed for left in table[name].left)


def test_a_square_weight_has_two_layouts(tmp_path):
    checkpoint = sample_checkpoint(tmp_path, VARIANTS["split"])
    compiler = Compiler(checkpoint, 60, NullProgress())
    program = compiler.program(1)
    with WeightFile(tmp_path / "weights.bin") as store:
        b = Builder(program, store, features(24), Rules("fp32"), "weights.bin")
        square = next(n for n in program.graph.nodes if (w := program.weight_of(n)) and w.name.endswith("w2a"))
        straight, turned = b.matrix(square), b.matrix(square, transpose=True)
        assert straight is not turned and straight is b.matrix(square)


def test_chunks_of_any_length_give_the_same(artifact):
    folder, compiler, _ = artifact
    ids = tokens(SMALL, 60)
    with torch.inference_mode():
        expected = compiler.net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()
    runner = OnnxRunner(folder)
    for lengths in ([16, 16, 16, 12], [1] * 60, [2, 1, 3, 1, 16, 1, 1, 15, 7, 13], [40, 20]):
        runner.reset()
        parts, start = [], 0
        for length in lengths:
            parts.append(runner.feed(ids[start : start + length]))
            start += length
        got = np.concatenate(parts)
        assert np.abs(got - expected).max() < 1e-5, lengths
        assert (got.argmax(-1) == expected.argmax(-1)).all()


def test_caches_are_written_in_place_and_only_where_they_must(artifact):
    folder, _, _ = artifact
    runner = OnnxRunner(folder)
    ids = tokens(SMALL, 24)
    runner.feed(ids[:20])
    before = {k: v.copy() for k, v in runner.caches.items()}
    addresses = {k: v.ctypes.data for k, v in runner.caches.items()}
    runner.feed(ids[20:21])
    for spec in runner.layout:
        if spec["cache"]:
            name = spec["name"]
            changed = np.nonzero((before[name] != runner.caches[name]).any(axis=(1, 2)))[0]
            assert list(changed) == [20 % spec["rows"]]
            assert addresses[name] == runner.caches[name].ctypes.data


def test_rows_past_the_position_are_never_read(artifact):
    folder, _, _ = artifact
    ids = tokens(SMALL, 12)
    runner = OnnxRunner(folder)
    clean = runner.feed(ids)
    runner.reset()
    for cache in runner.caches.values():
        cache[...] = 1e6
    assert np.array_equal(runner.feed(ids), clean)


def test_the_whole_context_can_be_used_and_no_more(artifact):
    folder, _, _ = artifact
    runner = OnnxRunner(folder)
    runner.feed(tokens(SMALL, 60))
    with pytest.raises(UsageError, match="context of 60"):
        runner.feed(tokens(SMALL, 1))


def test_weights_are_stored_once(artifact):
    folder, _, compiled = artifact
    stored = sum(w.bytes for w in compiled.weights)
    shares = {s.source for w in compiled.weights for s in w.shares}
    assert "embedding/embedding" in shares and "engrams/embedding" in shares
    embedding = [w for w in compiled.weights if any(s.source == "embedding/embedding" for s in w.shares)]
    assert len(embedding) == 1
    assert stored <= (folder / "weights.bin").stat().st_size < 1.05 * stored
    used = []
    for phase in ("decode", "prefill"):
        model = onnx.load(folder / f"{phase}.onnx", load_external_data=False)
        used.append(
            {
                next(e.value for e in t.external_data if e.key == "offset")
                for t in model.graph.initializer
                if t.external_data
            }
        )
    matrices = {str(int(o)) for o in used[0]} & {str(int(o)) for o in used[1]}
    assert len(matrices) > 0.9 * min(len(u) for u in used)


def test_names_and_metadata_are_documented(artifact):
    folder, compiler, compiled = artifact
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    meta = {p.key: p.value for p in model.metadata_props}
    layout = json.loads(meta["needle.state"])
    assert [s["name"] for s in layout] == [s.name for s in compiler.states]
    assert [i.name for i in model.graph.input] == ["tokens", "position", *(s["name"] for s in layout)]
    assert [o.name for o in model.graph.output] == ["logits", *(f"{s['name']}_next" for s in layout)]
    assert all(v.doc_string for v in (*model.graph.input, *model.graph.output))
    assert [p["name"] for p in compiled.io["inputs"]] == [i.name for i in model.graph.input]


@pytest.mark.parametrize("opset", [24, 23, 21])
def test_loads_and_runs_without_a_warning(opset, tmp_path):
    checkpoint = sample_checkpoint(tmp_path, SMALL)
    compile_onnx(checkpoint, tmp_path, 60, opset=opset)
    # Warnings go to the process's standard error, whatever Python captures.
    code = f"""
import onnxruntime as ort, numpy as np
from pathlib import Path
options = ort.SessionOptions()
options.log_severity_level = 2
for phase in ("decode", "prefill"):
    ort.InferenceSession(r"{tmp_path}/" + phase + ".onnx", options, providers=["CPUExecutionProvider"])
from needle_export.targets.onnx import session
runner = session.OnnxRunner(Path(r"{tmp_path}"))
runner.feed(np.arange(1, 20))
runner.feed(np.arange(1, 2))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_a_damaged_graph_is_refused_in_one_sentence(damage, artifact, tmp_path):
    folder, _, _ = artifact
    for name in ("decode.onnx", "prefill.onnx", "weights.bin"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "prefill.onnx"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        path.write_bytes(b"not a model")
    with pytest.raises(BadInput) as refusal:
        OnnxRunner(tmp_path)
    assert "prefill.onnx" in str(refusal.value) and "\n" not in str(refusal.value)


def test_decode_alone_opens_one_graph_and_computes_the_same(artifact):
    folder, ids = artifact[0], tokens(SMALL, 9)
    alone = OnnxTarget().open_decode(folder)
    assert set(alone.sessions) == {"decode"} and alone.max_chunk == 1
    whole = OnnxRunner(folder)
    stepped = np.concatenate([whole.feed(ids[i : i + 1]) for i in range(len(ids))])
    assert np.array_equal(alone.feed(ids), stepped)


def test_it_goes_back_exactly(artifact):
    """From behind a ring's wrap, and whatever was read since."""
    runner, ids = OnnxRunner(artifact[0]), tokens(SMALL, 60)
    for length in (1, 7, 40):
        runner.reset()
        runner.feed(ids[:length])
        saved = runner.save()
        first = np.concatenate([runner.feed(ids[length:50]), *(runner.feed(ids[i : i + 1]) for i in range(50, 60))])
        state = {name: value.copy() for name, value in runner.state().items()}
        runner.reset()
        runner.feed(ids[::-1][:59])
        runner.restore(saved)
        again = np.concatenate([runner.feed(ids[length:50]), *(runner.feed(ids[i : i + 1]) for i in range(50, 60))])
        assert np.array_equal(first, again)
        assert all(np.array_equal(runner.state()[name], value) for name, value in state.items())
