"""Builds from a container, with an adapter, and from weights that can't be right."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from needle_export import pipeline
from needle_export.checkpoint.adapter import merge_lora, read_adapter
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, Unsupported, VerificationFailed
from needle_export.measure import parity
from needle_export.model.network import Needle
from needle_export.targets.onnx.store import WeightFile
from tests.support.containers import container_bytes

GEOMETRY = SMALL.with_layers(4)
QUIET = NullProgress()


def logits(checkpoint, ids):
    net = Needle(checkpoint.geometry, checkpoint.tensors, checkpoint.permutations)
    with torch.inference_mode():
        return net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()


def build(path, out, **changes):
    return pipeline.build(BuildOptions(str(path), out, **{"context": 24, "bench": False, **changes}), QUIET)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_a_container(weights, tmp_path):
    path = tmp_path / "model.cact"
    path.write_bytes(container_bytes(GEOMETRY, make_sample(GEOMETRY, 0)))
    report = build(path, tmp_path / "dist", weights=weights, layers=3)
    assert report.checkpoint.format == "cact" and report.checkpoint.layers == 3
    ids = np.random.default_rng(0).integers(1, GEOMETRY.vocab_size, 24)
    expected = logits(slice_ladder(read_checkpoint(path), 3), ids)
    got = pipeline.logits(tmp_path / "dist", ids, QUIET)
    loss = report.artifacts[0].parity["scheme_loss"]
    if weights == "fp32":
        assert loss is None
        assert np.abs(got - expected).max() < 1e-5
    else:
        # Codebook values are no halves: the rounding is the scheme's loss, and is reported as such.
        assert 1e-5 < np.abs(got - expected).max() < 3 * loss["max_abs"]


def test_an_adapter_and_a_rung(tmp_path):
    path, adapter = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    write_sample(path, GEOMETRY, 0)
    rng = np.random.default_rng(0)
    target = "stack/layers/block/self_attn/q_proj/kernel"
    layers, inner, outer = read_checkpoint(path).tensors[target].shape
    halves = {
        f"lora/{target}/A": rng.normal(0, 0.3, (layers, inner, 4)).astype(np.float32),
        f"lora/{target}/B": rng.normal(0, 0.3, (layers, 4, outer)).astype(np.float32),
    }
    save_file(halves, adapter, metadata={"scale": "0.7", "rank": "4", "base": json.dumps("base.safetensors")})
    report = build(path, tmp_path / "dist", lora=str(adapter), layers=2)
    assert [a.path_name for a in report.checkpoint.lora] == ["lora.safetensors"]
    assert report.checkpoint.dropped_heads == ("confidence",)
    assert any("dropped" in note for note in report.artifacts[0].notes)
    ids = np.random.default_rng(0).integers(1, GEOMETRY.vocab_size, 24)
    base = read_checkpoint(path)
    expected = logits(slice_ladder(merge_lora(base, read_adapter(adapter)), 2), ids)
    got = pipeline.logits(tmp_path / "dist", ids, QUIET)
    assert np.abs(got - expected).max() < 1e-5
    assert np.abs(got - logits(slice_ladder(base, 2), ids)).max() > 1e-2


def test_weights_that_are_not_finite_are_the_checkpoints_fault(tmp_path):
    path = tmp_path / "bad.safetensors"
    write_sample(path, GEOMETRY, 0)
    # Our writer refuses such values, so they are put into a good file.
    data = path.read_bytes()
    good = make_sample(GEOMETRY, 0)["stack/final_norm/scale"].astype(np.float16).tobytes()
    assert data.count(good) == 1
    path.write_bytes(data.replace(good, np.full(len(good) // 2, np.inf, np.float16).tobytes()))
    with pytest.raises(BadInput, match="not finite"):
        build(path, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("extra", [1, 5, 100])
def test_every_context_beyond_the_window_is_verified_past_the_wrap(extra):
    window = 16
    drawn = parity.draw(100, window + extra, 0, window)
    assert max(len(tokens) for tokens, _ in drawn) > window
    assert all(len(tokens) <= window + extra and prompt >= 2 for tokens, prompt in drawn)
    assert sum(len(tokens) - prompt for tokens, prompt in drawn) > 0


@pytest.mark.parametrize(("window", "context"), [(16, 2), (16, 3), (16, 4), (16, 17), (3, 20)])
def test_the_shortest_contexts_and_windows(window, context, tmp_path):
    path = tmp_path / "short.safetensors"
    write_sample(path, dataclasses.replace(SMALL, sliding_window=window), 0)
    parity_of = build(path, tmp_path / "dist", context=context).artifacts[0].parity
    assert parity_of["max_abs"] < 1e-5 and parity_of["steps"] == parity_of["argmax_equal"]
    assert 1 in parity_of["prompts"] or context > 3


def test_a_window_too_short_to_prefill_is_refused(tmp_path):
    path = tmp_path / "narrow.safetensors"
    write_sample(path, dataclasses.replace(SMALL, sliding_window=2), 0)
    with pytest.raises(Unsupported, match="window of 2"):
        build(path, tmp_path / "dist")


def test_a_fault_is_located_where_the_prompt_is_longer_than_a_chunk(tmp_path, monkeypatch):
    path = tmp_path / "narrow.safetensors"
    write_sample(path, dataclasses.replace(SMALL, sliding_window=3), 0)
    store = WeightFile.add

    def damaged(self, name, array, *rest):
        return store(self, name, array * np.float32(1.5) if name == "layers.1.mlp.w2b" else array, *rest)

    monkeypatch.setattr(WeightFile, "add", damaged)
    # The comparison of matrices would name the tensor before anything runs.
    monkeypatch.setattr(pipeline, "_compare_weights", lambda *_: None)
    with pytest.raises(VerificationFailed, match="in prefill, block 1"):
        build(path, tmp_path / "dist", context=40)
