"""A TFLite build tells what was proven, in which runtimes, and is what it says."""

from __future__ import annotations

import json
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from needle_export import pipeline
from needle_export.checkpoint.adapter import merge_lora, read_adapter
from needle_export.checkpoint.checkpoint import Checkpoint, read_checkpoint
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import BadInput, UsageError, VerificationFailed
from needle_export.measure import parity
from needle_export.model.network import Needle
from needle_export.report.schema import dump_report, load_report
from needle_export.report.text import render_text
from needle_export.targets.ports import CONTRACT_KEY
from needle_export.targets.tflite import halves, legacy
from needle_export.targets.tflite.analysis import count_ops, metadata, read_graph
from needle_export.targets.tflite.blocks import Packed
from needle_export.targets.tflite.target import TfliteTarget
from needle_export.weights.forms import Form
from needle_export.weights.int8 import quantize_rows
from tests.support.containers import container_bytes
from tests.support.forged import redescribe
from tests.support.tflite_builds import BUCKETS, CONTEXT, GEOMETRY, QUIET, options

pytest.importorskip("litert_torch")
pytest.importorskip("ai_edge_litert")

SCHEMES = ("fp32", "fp16", "int8", "int4")
INTEGERS = ("int8", "int4")
COND = "stack/layers/block/hadamard_mlp"
SIGNATURES = {"decode", "prefill_8", "prefill_16"}


def logits(checkpoint: Checkpoint, ids: np.ndarray) -> np.ndarray:
    net = Needle(checkpoint.geometry, checkpoint.tensors, checkpoint.permutations)
    with torch.inference_mode():
        found: np.ndarray = net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()
    return found


def some_ids(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, GEOMETRY.vocab_size, count)


@pytest.mark.parametrize("weights", SCHEMES)
def test_the_report_tells_what_was_proven(weights, builds):
    out, report = builds[weights]
    assert load_report(out) == report
    (artifact,) = report.artifacts
    assert artifact.status == "verified-on-runtime" and artifact.target == "tflite" and artifact.weights == weights
    beside = {"reference.npz", "report.json", "manifest.json", "loop.py", "decoder.py"}
    assert {p.name for p in out.iterdir()} == {"model.tflite", *beside}
    assert [f.name for f in artifact.files] == ["model.tflite"]
    assert artifact.size.total_bytes == (out / "model.tflite").stat().st_size
    measured = artifact.parity
    assert measured["steps"] > 0 and measured["prompts"] == [5, 24]
    assert measured["distinct_predictions"] > measured["positions"] // 5
    assert measured["max_abs"] <= measured["tolerance"]["logits"]
    assert measured["state_max_abs"] <= measured["tolerance"]["state"]
    if weights not in INTEGERS:
        assert measured["steps"] == measured["argmax_equal"] == measured["top5_equal"]
        assert measured["max_abs"] < 1e-5 and measured["state_max_abs"] < 1e-5 and measured["sqnr_db"] > 100
        assert measured["sensitivity"] is None and measured["tolerance"]["ties"] == 0
    for name, fusion in artifact.fusion.items():
        assert fusion.fused == fusion.expected, name
    assert set(artifact.versions) >= {"ai-edge-litert", "litert-converter", "litert-torch", "torch"}
    assert bool(artifact.kept_float) == (weights != "fp32") and all(k.reason for k in artifact.kept_float)
    word = {"int4": "4-bit"}.get(weights, weights)
    assert any(word in note for note in artifact.notes) == (weights != "fp32")


@pytest.mark.parametrize("weights", SCHEMES)
def test_the_ledger_shows_unpadded_widths(weights, builds):
    artifact = builds[weights][1].artifacts[0]
    roles = artifact.size.by_role
    assert sum(roles.values()) + artifact.size.overhead_bytes == artifact.size.total_bytes
    assert set(roles) == {"routing", "content", "memory", "mixing", "lanes", "vocabulary", "norms"}
    # q and k are 48 wide and v, gate and out 64. Of int8 a row has a scale beside its bytes, of int4 a half for each
    # 32 columns, and there taps are halves.
    g, element = GEOMETRY, {"fp32": 4, "fp16": 2, "int8": 1, "int4": 0.5}[weights]
    scale = {"int8": 4, "int4": 2 * g.d_model // 32}.get(weights, 0)
    outputs, taps = (g.num_heads + g.num_kv_heads) * g.qk_head_dim, 2 if weights == "int4" else 4
    assert roles["routing"] == g.num_layers * outputs * (g.d_model * element + scale + taps * g.qkv_conv_taps)
    assert roles["vocabulary"] == g.vocab_size * (g.d_model * element + scale)
    state = artifact.state_bytes.by_part
    locals_, globals_ = g.num_layers - len(g.global_layers), len(g.global_layers)
    rows = locals_ * g.sliding_window + globals_ * CONTEXT
    assert state["keys"] == 4 * rows * g.num_kv_heads * 48 and state["values"] == 4 * rows * g.num_kv_heads * 64
    assert sum(state.values()) == artifact.state_bytes.total_bytes


@pytest.mark.parametrize("weights", SCHEMES)
def test_every_signature_is_counted_and_cut(weights, builds):
    out, report = builds[weights]
    (artifact,) = report.artifacts
    graphs = {graph.name: graph for graph in read_graph(out / "model.tflite")}
    assert set(artifact.signatures) == set(graphs) == SIGNATURES == set(artifact.io["signatures"])
    assert artifact.nodes.decode == len(graphs["decode"].ops) and artifact.nodes.by_op == count_ops(graphs["decode"])
    assert artifact.nodes.prefill == max(len(graphs[name].ops) for name in ("prefill_8", "prefill_16"))
    for name, signature in artifact.signatures.items():
        assert signature.ops == len(graphs[name].ops) and signature.delegate == "XNNPACK"
        assert signature.delegated + sum(left.count for left in signature.left) == signature.ops
        # A permutation at each end of a block's MLP cuts, and nothing else does.
        cutters = {left.op: left.splits for left in signature.left if left.splits}
        assert cutters == {"GATHER": 2 * GEOMETRY.num_layers}
        assert signature.partitions == 1 + sum(cutters.values()) and signature.delegated > 0.9 * signature.ops
    described = json.loads(metadata(out / "model.tflite", CONTRACT_KEY))
    assert (described["context"], described["buckets"], described["heads"]) == (CONTEXT, list(BUCKETS), [])


@pytest.mark.parametrize("weights", SCHEMES)
def test_two_runtimes_give_the_references_results(weights, builds):
    (artifact,) = builds[weights][1].artifacts
    today, older = artifact.runtimes
    assert (today.runtime, today.version) == ("ai-edge-litert", version("ai-edge-litert"))
    assert (today.loaded, today.reproduced, today.reason) == (True, True, "")
    assert today.max_abs == artifact.parity["max_abs"]
    assert (older.runtime, older.version) == ("tflite-runtime", "2.14.0")
    if weights == "int4":
        assert (older.loaded, older.reproduced, older.max_abs) == (None, None, None)
        assert older.reason.startswith("not tried: it has no kernel for 4-bit matrices")
        return
    if legacy.find_legacy_python() is None:
        assert (older.loaded, older.reproduced, older.max_abs) == (None, None, None)
        assert older.reason.startswith("not tried: no Python with it")
        pytest.skip("no Python with tflite-runtime 2.14; the report says so")
    assert (older.loaded, older.reproduced, older.reason) == (True, True, "")
    assert older.max_abs <= (artifact.parity["tolerance"]["logits"] if weights == "int8" else 1e-5)


def test_without_the_older_runtime_the_report_says_so(builds, monkeypatch):
    monkeypatch.setattr(legacy, "find_legacy_python", lambda: None)
    (other,) = TfliteTarget().other_runtimes(builds["fp32"][0])
    assert (other.name, other.open) == ("tflite-runtime", None)
    assert other.reason.startswith("not tried: no Python with it was found (NEEDLE_EXPORT_TFLITE_PYTHON")


@pytest.mark.parametrize("weights", SCHEMES)
def test_the_gpu_lint_is_no_result(weights, builds):
    report = builds[weights][1]
    lint = report.artifacts[0].gpu_lint
    assert lint and all(note.why and note.source and note.count > 0 for note in lint)
    assert len({(note.rule, note.op) for note in lint}) == len(lint)
    # An op that no list of the delegate's names has, and that every graph of ours has.
    assert any((note.rule, note.op) == ("unsupported op", "EMBEDDING_LOOKUP") for note in lint)
    assert "GPU delegate: a lint from public sources, not a result" in render_text(report)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_the_same_input_gives_the_same_bytes(weights, builds, tmp_path):
    out, _ = builds[weights]
    again = tmp_path / "again"
    pipeline.build(options(builds.checkpoint, again, weights=weights), QUIET)
    names = sorted(p.name for p in out.iterdir())
    assert names == sorted(p.name for p in again.iterdir())
    for name in names:
        assert (out / name).read_bytes() == (again / name).read_bytes(), name


@pytest.mark.parametrize("weights", SCHEMES)
def test_verify_recognises_its_own_and_a_checkpoint(weights, builds):
    out, report = builds[weights]
    assert pipeline.verify(out, checkpoint=None, progress=QUIET) == report
    assert pipeline.verify(out, checkpoint=str(builds.checkpoint), progress=QUIET) == report


def test_verify_refuses_another_checkpoint(builds, tmp_path):
    other = tmp_path / "other.safetensors"
    write_sample(other, GEOMETRY, 4)
    with pytest.raises(BadInput, match="not the checkpoint"):
        pipeline.verify(builds["fp32"][0], checkpoint=str(other), progress=QUIET)


@pytest.mark.parametrize("name", ["model.tflite", "reference.npz"])
def test_verify_notices_one_flipped_bit(name, builds, tmp_path):
    copy = builds.copy("fp32", tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(VerificationFailed, match=name):
        pipeline.verify(copy, checkpoint=None, progress=QUIET)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_verify_runs_the_artifact_and_trusts_no_hash(weights, builds, tmp_path):
    # Damage the weights and forge the report: only running it can tell.
    copy = builds.copy(weights, tmp_path / "copy")
    path = copy / "model.tflite"
    table = read_checkpoint(builds.checkpoint).tensors["embedding/embedding"].astype(np.float32)
    held = table if weights == "fp32" else quantize_rows(torch.from_numpy(table))[0].numpy()
    data = path.read_bytes()
    assert data.count(held.tobytes()) == 1
    path.write_bytes(data.replace(held.tobytes(), np.roll(held, 1, axis=1).tobytes()))
    redescribe(copy)
    for checkpoint in (None, str(builds.checkpoint)):
        with pytest.raises(VerificationFailed, match="differ"):
            pipeline.verify(copy, checkpoint=checkpoint, progress=QUIET)


def test_evaluate_gives_the_references_logits(builds):
    ids = some_ids(CONTEXT)
    expected = logits(read_checkpoint(builds.checkpoint), ids)
    got = pipeline.logits(builds["fp32"][0], ids, QUIET)
    assert got.shape == expected.shape and np.abs(got - expected).max() < 1e-5
    # Halves of a checkpoint of halves are its own values; int8 are others.
    assert np.abs(pipeline.logits(builds["fp16"][0], ids, QUIET) - expected).max() < 1e-5
    loss = builds["int8"][1].artifacts[0].parity["scheme_loss"]["max_abs"]
    assert 1e-3 < np.abs(pipeline.logits(builds["int8"][0], ids, QUIET) - expected).max() < 3 * loss


def test_bench_measures_and_says_how(builds):
    out, report = builds["fp32"]
    assert report.artifacts[0].latency is None and report.artifacts[0].memory is None
    measured = pipeline.bench(out, threads=1, steps=8, prompt=(5, 40), progress=QUIET).artifacts[0]
    fresh, memory = measured.latency, measured.memory
    assert fresh is not None and fresh.kind == "measured" and fresh.threads == 1
    assert [p.tokens for p in fresh.prefill] == [5, 40]
    assert fresh.decode is not None and fresh.decode.ms_p50 > 0 and fresh.load_ms and fresh.peak_rss_bytes
    assert "--steps 8 --prompt 5,40" in fresh.command and fresh.host
    assert 5e6 < memory.decode.baseline_bytes < memory.decode.rss_bytes <= memory.decode.peak_bytes
    assert memory.all.rss_bytes > memory.decode.baseline_bytes and memory.prompt_tokens == 47
    with pytest.raises(UsageError, match="context of 48"):
        pipeline.bench(out, threads=1, steps=8, prompt=(49,), progress=QUIET)


def test_an_adapter_and_a_rung(builds, tmp_path):
    base, adapter = read_checkpoint(builds.checkpoint), tmp_path / "lora.safetensors"
    rng = np.random.default_rng(0)
    target = "stack/layers/block/self_attn/q_proj/kernel"
    layers, inner, outer = base.tensors[target].shape
    halves = {
        f"lora/{target}/A": rng.normal(0, 0.3, (layers, inner, 4)).astype(np.float32),
        f"lora/{target}/B": rng.normal(0, 0.3, (layers, 4, outer)).astype(np.float32),
    }
    save_file(halves, adapter, metadata={"scale": "0.7", "rank": "4", "base": json.dumps("five.safetensors")})
    out = tmp_path / "dist"
    report = pipeline.build(options(builds.checkpoint, out, lora=str(adapter), layers=3, buckets=(16,)), QUIET)
    assert (report.checkpoint.layers, report.checkpoint.parent_layers) == (3, 5)
    assert [a.path_name for a in report.checkpoint.lora] == ["lora.safetensors"]
    assert report.checkpoint.dropped_heads == ("confidence",)
    assert any("dropped" in note for note in report.artifacts[0].notes)
    ids = some_ids(CONTEXT)
    expected = logits(slice_ladder(merge_lora(base, read_adapter(adapter)), 3), ids)
    got = pipeline.logits(out, ids, QUIET)
    assert np.abs(got - expected).max() < 1e-5
    assert np.abs(got - logits(slice_ladder(base, 3), ids)).max() > 1e-2
    with pytest.raises(UsageError, match="adapter"):
        pipeline.verify(out, checkpoint=str(builds.checkpoint), progress=QUIET)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_container(weights, tmp_path):
    path = tmp_path / "model.cact"
    path.write_bytes(container_bytes(GEOMETRY, make_sample(GEOMETRY, 0)))
    out = tmp_path / "dist"
    report = pipeline.build(options(path, out, weights=weights, layers=3, buckets=(16,)), QUIET)
    assert report.checkpoint.format == "cact" and report.checkpoint.layers == 3
    ids = some_ids(24)
    expected = logits(slice_ladder(read_checkpoint(path), 3), ids)
    deviation = np.abs(pipeline.logits(out, ids, QUIET) - expected).max()
    loss = report.artifacts[0].parity["scheme_loss"]
    if weights == "fp32":
        assert loss is None and deviation < 1e-5
    else:
        assert 1e-3 < deviation < 3 * loss["max_abs"]


def test_the_usual_buckets_are_those_that_fit(builds, tmp_path):
    # The ring of 16 is shorter than the usual prefills, so the longest that it takes is made.
    report = pipeline.build(options(builds.checkpoint, tmp_path / "dist", layers=2, buckets=None), QUIET)
    assert report.artifacts[0].io["buckets"] == [16] and report.options["buckets"] is None
    assert set(report.artifacts[0].signatures) == {"decode", "prefill_16"}


@pytest.mark.parametrize(
    ("context", "ring", "expected"),
    [(48, 16, (16,)), (48, 0, (48,)), (64, 0, (64,)), (1024, 1024, (64, 128)), (1024, 100, (64,)), (100, 0, (64,))],
)
def test_the_usual_buckets(context, ring, expected, builds, tmp_path):
    asked = options(builds.checkpoint, tmp_path, context=context, buckets=None)
    assert pipeline._buckets(asked, SimpleNamespace(ring_rows=ring), 1) == expected


def test_without_a_prefill_prompts_go_through_decode(builds, tmp_path):
    report = pipeline.build(options(builds.checkpoint, tmp_path / "dist", layers=2, buckets=()), QUIET)
    (artifact,) = report.artifacts
    assert set(artifact.signatures) == {"decode"} and artifact.nodes.prefill is None
    assert artifact.parity["max_abs"] < 1e-5


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"buckets": (49,)}, "--buckets: 49 tokens don't fit in the context of 48"),
        ({"buckets": (8, 17)}, "--buckets: 17 tokens are more than the window of 16"),
        ({"buckets": (1,)}, "--buckets: 1 is below 2"),
        ({"opset": 24}, "--opset: the tflite target has no opset"),
        ({"target": "onnx", "buckets": None, "weights": "palette4"}, "--weights: the onnx target has no palette4"),
        ({"target": "onnx"}, "--buckets: prefill is of variable length in ONNX"),
        ({"target": "onnx", "buckets": None, "heads": ("confidence",)}, "--heads: probe heads aren't part of"),
        ({"heads": ("compass",)}, "compass"),
        ({"heads": ("router",)}, "router"),
        ({"layers": 9}, "layers"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, word, builds, tmp_path):
    with pytest.raises(UsageError) as refusal:
        pipeline.build(options(builds.checkpoint, tmp_path / "dist", **changes), QUIET)
    assert word in str(refusal.value) and refusal.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weights", INTEGERS)
def test_integers_tell_the_schemes_loss_from_the_exports(weights, builds):
    measured = builds[weights][1].artifacts[0].parity
    moved, tolerance, loss = measured["sensitivity"], measured["tolerance"], measured["scheme_loss"]
    floor = parity.tolerance_of("fp32", None)
    assert tolerance["logits"] == max(2 * moved["logits"], floor.logits) > 10 * floor.logits
    assert tolerance["state"] == max(2 * moved["state"], floor.state) and tolerance["ties"] == 4 * moved["logits"]
    # What rounding to integers costs is far more than what the file adds to it, and both are told.
    assert loss["max_abs"] > 2 * measured["max_abs"] > 0 and loss["kl"] > 5 * measured["kl"]
    scheme = measured["scheme"]
    assert scheme["activations"] == "asymmetric" and scheme["halves"] == []
    pairs = [*map(tuple, scheme["int8"]), *((source, layer) for source, layer, _ in scheme["forms"])]
    assert {("embedding/embedding", -1), ("engrams/embedding", -1)} < set(pairs) and len(set(pairs)) == len(pairs)
    assert [layer for source, layer in pairs if source.endswith("q_proj/kernel")] == [0, 1, 2, 3, 4]
    if weights == "int4":
        assert {form for *_, form in scheme["forms"]} == {"int4x32bf16"}
        # Rows of 16 and of 8 columns, which no block divides; nothing is folded, and no matrix stays float.
        assert {source.rpartition("/")[0] for source, _ in scheme["int8"]} == {"engrams", COND}
        assert measured["weights"]["folded"] == 0


def test_int8_lies_in_the_file_once_and_as_int8(builds):
    out, _ = builds["int8"]
    path, checkpoint = out / "model.tflite", read_checkpoint(builds.checkpoint)
    table = GEOMETRY.vocab_size, GEOMETRY.d_model
    for graph in read_graph(path):
        assert not [t.name for t in graph.tensors if t.quantized not in ("", "per tensor")]
        readers = {
            op.name
            for op in graph.ops
            for at in op.inputs
            if at >= 0 and graph.tensors[at].dtype == "int8" and graph.tensors[at].shape == table
        }
        assert readers == {"EMBEDDING_LOOKUP", "FULLY_CONNECTED"}
        for tensor in graph.tensors:
            assert not (tensor.constant and tensor.dtype == "float32" and tensor.bytes >= 4 * 10_000), tensor
    # The same bytes, whichever of the three signatures reads them, and whichever op.
    data, out_proj = path.read_bytes(), checkpoint.tensors["stack/layers/block/self_attn/out_proj/kernel"]
    for matrix in (checkpoint.tensors["embedding/embedding"], *out_proj.transpose(0, 2, 1)):
        values, _ = quantize_rows(torch.from_numpy(np.ascontiguousarray(matrix, np.float32)))
        assert data.count(values.numpy().tobytes()) == 1


def test_int4_lies_in_the_file_once_and_as_int4(builds):
    out, report = builds["int4"]
    path, checkpoint = out / "model.tflite", read_checkpoint(builds.checkpoint)
    for graph in read_graph(path):
        table = {t for t, tensor in enumerate(graph.tensors) if tensor.shape == (GEOMETRY.vocab_size, GEOMETRY.d_model)}
        readers = {(op.name, graph.tensors[op.inputs[1]].dtype) for op in graph.ops if table & set(op.inputs[1:2])}
        assert readers == {("EMBEDDING_LOOKUP", "int4"), ("FULLY_CONNECTED", "int4")}
        assert {t.quantized for t in graph.tensors if t.dtype == "int4"} == {"blockwise"}
    data, embedding = path.read_bytes(), checkpoint.tensors["embedding/embedding"]
    values, scales = Form("int", 4, 32, brain=True).quantize(torch.from_numpy(np.asarray(embedding, np.float32)))
    packed = Packed.of(values.numpy(), scales.numpy())
    assert data.count(packed.levels.tobytes()) == data.count(packed.scales.tobytes()) == 1
    kept = report.artifacts[0].kept_float
    assert {k.reason for k in kept} == {halves.VECTOR, halves.FACTOR, halves.BIAS, halves.FOLDED}
    assert sum(k.bytes for k in kept if k.reason in (halves.BIAS, halves.FOLDED)) < 0.05 * sum(k.bytes for k in kept)
    # Nothing is left in float that isn't told: in the ledger, norms are vectors and nothing else.
    told = sum(k.bytes for k in kept if "norm" in k.name)
    assert report.artifacts[0].size.by_role["norms"] <= told < report.artifacts[0].size.by_role["norms"] * 1.5


def test_the_report_survives_its_own_file(builds):
    for weights in SCHEMES:
        out, report = builds[weights]
        assert dump_report(report) == (out / "report.json").read_bytes()
