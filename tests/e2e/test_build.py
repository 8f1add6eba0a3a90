"""A build verifies before it publishes, says where it goes wrong, and leaves earlier builds alone."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import onnx
import pytest
import torch

from needle_export import pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, FusionFailed, UsageError, VerificationFailed
from needle_export.graph import ops, reference
from needle_export.measure.packing import packed_size
from needle_export.model import block
from needle_export.model.network import Needle
from needle_export.report.schema import load_report
from needle_export.targets.onnx import fused
from needle_export.targets.onnx.builder import Builder
from needle_export.targets.onnx.store import WeightFile
from tests.support.forged import redescribe

GEOMETRY = SMALL.with_layers(5)
QUIET = NullProgress()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("e2e") / "five.safetensors"
    write_sample(path, GEOMETRY, 3)
    return path


def options(checkpoint, out, **changes):
    return BuildOptions(str(checkpoint), out, **{"context": 48, "bench": False, **changes})


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("published") / "dist"
    return out, pipeline.build(options(checkpoint, out), QUIET)


def test_the_report_tells_what_was_proven(published):
    out, report = published
    assert load_report(out) == report
    (artifact,) = report.artifacts
    assert artifact.status == "verified-on-runtime"
    assert report.checkpoint.random and report.checkpoint.parameters > 0
    parity = artifact.parity
    assert parity["steps"] == parity["argmax_equal"] == parity["top5_equal"] > 0
    assert parity["max_abs"] < 1e-5 and parity["sqnr_db"] > 100
    assert parity["distinct_predictions"] > parity["positions"] // 5
    for name, fusion in artifact.fusion.items():
        assert fusion.fused == fusion.expected, name
    graph = onnx.load(out / "decode.onnx", load_external_data=False).graph
    assert artifact.nodes.decode == len(graph.node)
    assert artifact.size.total_bytes == sum((out / f.name).stat().st_size for f in artifact.files)
    roles = artifact.size.by_role
    assert sum(roles.values()) + artifact.size.overhead_bytes == artifact.size.total_bytes
    assert {"routing", "content", "memory", "mixing", "lanes", "vocabulary", "norms"} == set(roles)
    # q and k are 48 wide and v, gate and out 64: the ledger must show these widths, not padded ones.
    g = GEOMETRY
    routing = g.num_layers * (g.d_model + g.qkv_conv_taps) * (g.num_heads + g.num_kv_heads) * g.qk_head_dim
    assert roles["routing"] == 4 * routing
    (queries,) = [tensor for tensor in artifact.size.tensors if tensor.name.endswith("q_proj/kernel")]
    assert queries.by_layer == (4 * g.d_model * g.num_heads * g.qk_head_dim,) * g.num_layers
    assert artifact.size.compressed_bytes == sum(packed_size(out / f.name) for f in artifact.files)
    state = artifact.state_bytes.by_part
    locals_, globals_ = g.num_layers - len(g.global_layers), len(g.global_layers)
    rows = locals_ * g.sliding_window + globals_ * 48
    assert state["keys"] == 4 * rows * g.num_kv_heads * 48
    assert state["values"] == 4 * rows * g.num_kv_heads * 64


def test_the_same_input_gives_the_same_bytes(checkpoint, published, tmp_path):
    out, _ = published
    again = tmp_path / "again"
    pipeline.build(options(checkpoint, again), QUIET)
    names = sorted(p.name for p in out.iterdir())
    assert names == sorted(p.name for p in again.iterdir())
    for name in names:
        assert (out / name).read_bytes() == (again / name).read_bytes(), name


def test_verify_recognises_its_own_and_a_checkpoint(checkpoint, published):
    out, report = published
    assert pipeline.verify(out, checkpoint=None, progress=QUIET) == report
    assert pipeline.verify(out, checkpoint=str(checkpoint), progress=QUIET) == report


def test_verify_refuses_another_checkpoint(published, tmp_path):
    other = tmp_path / "other.safetensors"
    write_sample(other, GEOMETRY, 4)
    with pytest.raises(BadInput, match="not the checkpoint"):
        pipeline.verify(published[0], checkpoint=str(other), progress=QUIET)


@pytest.mark.parametrize("name", ["decode.onnx", "prefill.onnx", "weights.bin", "reference.npz"])
def test_verify_notices_one_flipped_bit(name, published, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(published[0], copy)
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(VerificationFailed, match=name):
        pipeline.verify(copy, checkpoint=None, progress=QUIET)


def test_verify_runs_the_artifact_and_trusts_no_hash(published, tmp_path):
    # Damage the weights and forge the report: only running it can tell.
    copy = tmp_path / "copy"
    shutil.copytree(published[0], copy)
    weights = copy / "weights.bin"
    values = np.fromfile(weights, np.float32)
    values[len(values) // 3 : len(values) // 3 + 2000] *= 1.5
    values.tofile(weights)
    redescribe(copy)
    with pytest.raises(VerificationFailed, match="differ"):
        pipeline.verify(copy, checkpoint=None, progress=QUIET)


@pytest.mark.parametrize(
    ("weight", "spot", "compared"),
    [
        ("layers.2.attention.out_proj", "block 2", True),
        ("embedding", "embedding/embedding (vocabulary)", True),
        # What the comparison of matrices doesn't see, logits tell.
        ("layers.0.mlp.w2b", "in prefill, block 0", False),
        ("layers.3.attention.q_proj+k_proj+v_proj+gate_proj", "in prefill, block 3", False),
        ("embedding", "in prefill, block 0", False),
    ],
)
def test_a_wrong_weight_is_found_and_its_block_named(weight, spot, compared, checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "dist"
    store = WeightFile.add

    def damaged(self, name, array, *rest):
        if name == weight:
            # Not a common factor: the norm behind a projection would take it out again.
            array = array * (1 + 0.02 * (np.arange(len(array)) % 2)).astype(np.float32)[:, None]
        return store(self, name, array, *rest)

    monkeypatch.setattr(WeightFile, "add", damaged)
    if not compared:
        monkeypatch.setattr(pipeline, "_compare_weights", lambda *_: None)
    with pytest.raises(VerificationFailed) as failure:
        pipeline.build(options(checkpoint, out), QUIET)
    assert spot in str(failure.value) and failure.value.exit_code == 4
    assert not out.exists() and list(tmp_path.iterdir()) == []


def test_a_missed_fusion_fails_the_build_by_block(checkpoint, tmp_path, monkeypatch):
    original, calls = reference.sinkhorn, itertools.count()

    def shorter_in_one_block(logits, iterations):
        return original(logits, iterations - (next(calls) % GEOMETRY.num_layers == 3))

    monkeypatch.setattr(block.ref, "sinkhorn", shorter_in_one_block)
    with pytest.raises(FusionFailed, match="sinkhorn was promised 5 times and fired 4: in block 3") as failure:
        pipeline.build(options(checkpoint, tmp_path / "dist"), QUIET)
    assert failure.value.exit_code == 4 and list(tmp_path.iterdir()) == []


def test_a_dropped_state_write_is_found(checkpoint, tmp_path, monkeypatch):
    lower = fused.causal_taps

    def forgetful(b: Builder, n):
        lower(b, n)
        rows, _ = b.env[n]
        b.env[n] = (rows, b.ref(n.args[1]))

    from needle_export.targets.onnx import lower as module

    monkeypatch.setitem(module._LOWERINGS, ops.op("causal_taps"), forgetful)
    with pytest.raises(VerificationFailed):
        pipeline.build(options(checkpoint, tmp_path / "dist"), QUIET)


def test_a_failed_build_leaves_the_earlier_one(checkpoint, published, tmp_path, monkeypatch):
    out = tmp_path / "dist"
    shutil.copytree(published[0], out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    store = WeightFile.add
    monkeypatch.setattr(
        WeightFile,
        "add",
        lambda self, name, array, *rest: store(
            self, name, array * np.float32(3) if "cond_u" in name else array, *rest
        ),
    )
    with pytest.raises(VerificationFailed):
        pipeline.build(options(checkpoint, out), QUIET)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    monkeypatch.undo()
    assert pipeline.verify(out, checkpoint=None, progress=QUIET)


def test_evaluate_gives_the_references_logits(checkpoint, published):
    source = read_checkpoint(checkpoint)
    net = Needle(source.geometry, source.tensors, source.permutations)
    ids = np.random.default_rng(1).integers(1, GEOMETRY.vocab_size, 48)
    with torch.inference_mode():
        expected = net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()
    got = pipeline.logits(published[0], ids, QUIET)
    assert got.shape == expected.shape and np.abs(got - expected).max() < 1e-5


def test_bench_measures_and_says_how(published):
    out, report = published
    assert report.artifacts[0].latency is None and report.artifacts[0].memory is None
    measured = pipeline.bench(out, threads=1, steps=8, prompt=(5, 40), progress=QUIET).artifacts[0]
    fresh, memory = measured.latency, measured.memory
    assert fresh is not None and fresh.kind == "measured" and fresh.threads == 1
    assert [p.tokens for p in fresh.prefill] == [5, 40]
    assert fresh.decode is not None and fresh.decode.ms_p50 > 0 and fresh.load_ms and fresh.peak_rss_bytes
    assert "--steps 8 --prompt 5,40" in fresh.command and fresh.host
    assert (memory.host, memory.threads, memory.command) == (fresh.host, 1, fresh.command)
    assert 5e6 < memory.decode.baseline_bytes < memory.decode.rss_bytes <= memory.decode.peak_bytes
    assert memory.decode.mapped_bytes < memory.decode.rss_bytes
    # The session of the prefill graph is on top, and nothing of it is in the process that decodes alone.
    assert memory.all.rss_bytes > memory.decode.rss_bytes + 1e6
    assert abs(memory.all.baseline_bytes - memory.decode.baseline_bytes) < 1e6
    assert memory.prompt_tokens == 47
    with pytest.raises(UsageError, match="context of 48"):
        pipeline.bench(out, threads=1, steps=8, prompt=(49,), progress=QUIET)


def test_a_rung_is_the_sliced_model(checkpoint, tmp_path):
    report = pipeline.build(options(checkpoint, tmp_path / "dist", layers=3), QUIET)
    assert (report.checkpoint.layers, report.checkpoint.parent_layers) == (3, 5)
    sliced = slice_ladder(read_checkpoint(checkpoint), 3)
    assert report.checkpoint.geometry == sliced.geometry.as_dict()
    net = Needle(sliced.geometry, sliced.tensors, sliced.permutations)
    ids = np.random.default_rng(1).integers(1, GEOMETRY.vocab_size, 20)
    with torch.inference_mode():
        expected = net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()
    assert np.abs(pipeline.logits(tmp_path / "dist", ids, QUIET) - expected).max() < 1e-5


def test_halves_of_a_float_checkpoint_are_rounded_in_the_reference_too(tmp_path):
    path = tmp_path / "float.safetensors"
    from needle_export.checkpoint.safetensors_file import write_checkpoint
    from needle_export.checkpoint.sample import make_sample

    tensors = {k: v.astype(np.float32) for k, v in make_sample(SMALL, 0).items()}
    noise = np.random.default_rng(0)
    tensors = {k: v * (1 + noise.normal(0, 3e-4, v.shape)).astype(np.float32) for k, v in tensors.items()}
    write_checkpoint(path, SMALL, tensors, dtype="float32")
    report = pipeline.build(options(path, tmp_path / "dist", weights="fp16"), QUIET)
    parity = report.artifacts[0].parity
    assert parity["max_abs"] < 1e-5
    # What the rounding costs is told apart from what the export costs.
    assert parity["scheme_loss"]["max_abs"] > 10 * parity["max_abs"]
    assert pipeline.verify(tmp_path / "dist", checkpoint=str(path), progress=QUIET) == report
    kept = report.artifacts[0].kept_float
    assert kept and all(k.reason for k in kept)
    assert report.artifacts[0].size.total_bytes < 0.62 * 4 * report.checkpoint.parameters


def test_options_that_cannot_be_are_refused_before_any_work(checkpoint, tmp_path):
    for changes, word in (
        ({"context": 100_000}, "context"),
        ({"layers": 9}, "layers"),
        ({"target": "tvm"}, "--target"),
        ({"lora": str(tmp_path / "none.safetensors")}, "none.safetensors"),
    ):
        with pytest.raises((UsageError, BadInput), match=word):
            pipeline.build(options(checkpoint, tmp_path / "dist", **changes), QUIET)
    assert not (tmp_path / "dist").exists()


