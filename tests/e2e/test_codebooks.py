"""Builds in which matrices lie in codebook form: a container's own codes, and those that are made from floats."""

from __future__ import annotations

import json

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.safetensors_file import write_tensors
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rule
from needle_export.errors import UsageError
from tests.support.containers import TERNARY, container_bytes

pytest.importorskip("onnxruntime")
pytest.importorskip("coremltools")

QUIET = NullProgress()
GEOMETRY = SMALL.with_layers(4)
Q_PROJ = "stack/layers/block/self_attn/q_proj/kernel"
WIDTHS = {"q_proj": TERNARY, "k_proj": 3, "v_proj": 1, "gate_proj": 2, "key_proj": 2, "value_proj": 3}


def _mixed(slot):
    """Every width of the format somewhere; projections of the first block are of one."""
    if slot.tensor.endswith("/embedding"):
        return 2 if slot.tensor.startswith("engrams") else 3
    if slot.tensor.endswith("phi_pre"):
        return 2
    return WIDTHS.get(slot.tensor.rpartition("/")[0].rpartition("/")[2], 4) if slot.layer != 0 else 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("containers")
    tensors = make_sample(GEOMETRY, 1)
    (made / "mixed.cact").write_bytes(container_bytes(GEOMETRY, tensors, bits=_mixed, group=8))
    small = make_sample(SMALL, 2)
    (made / "small.cact").write_bytes(container_bytes(SMALL, small, group=8))
    (made / "wide.cact").write_bytes(container_bytes(SMALL, small, group=128))
    write_sample(made / "small.safetensors", SMALL, 2)
    return made


def build(path, out, target="onnx", rules=(), **changes):
    parsed = tuple(Rule.parse(r) for r in rules)
    more = {"buckets": (8,)} if target == "coreml" else {}
    options = {**more, "weights": "codebook", "context": 24, "bench": False, **changes}
    report = pipeline.build(BuildOptions(str(path), out, target=target, rules=parsed, **options), QUIET)
    (artifact,) = report.artifacts
    told = artifact.parity
    assert told["weights"]["matrices"] and told["max_abs"] <= told["tolerance"]["logits"]
    return artifact


def forms(artifact):
    """Of every (tensor, layer) in codebook form or blocks."""
    return {(source, layer): form for source, layer, form in artifact.parity["scheme"]["forms"]}


def kept(artifact, name):
    """Why a weight is a float; of several, as of tables that several functions cut, the first."""
    reasons = {k.name: k.reason for k in artifact.kept_float}
    assert name in reasons, sorted(reasons)
    return reasons[name]


@pytest.mark.parametrize("target", ["onnx", "coreml"])
def test_every_width_of_a_rung_is_imported(folder, target, tmp_path):
    artifact = build(folder / "mixed.cact", tmp_path / "out", target, layers=3)
    found = forms(artifact)
    assert set(found.values()) == {f"codebook{bits}x8" for bits in (1, 2, 3, 4, 5)}
    assert found["embedding/embedding", -1] == "codebook3x8"
    attention = [found[Q_PROJ.replace("q_proj", name), 1] for name in ("q_proj", "k_proj", "v_proj", "gate_proj")]
    assert attention == ["codebook5x8", "codebook3x8", "codebook1x8", "codebook2x8"]
    fusion = artifact.fusion["merge_projections"]
    assert fusion.fused == fusion.expected == 1  # of the first block
    assert pipeline.verify(tmp_path / "out", checkpoint=str(folder / "mixed.cact"), progress=QUIET)


@pytest.mark.parametrize(("target", "rules", "changes"), [
    ("onnx", ("vocabulary=cq4", "lanes=cq4"), {"weights": "cq2"}),
    ("coreml", ("vocabulary=cq4", "lanes=cq4"), {"weights": "cq2"}),
    ("onnx", (), {"weights": "cq4", "opset": 21}),
])
def test_codes_are_made_from_floats(folder, target, rules, changes, tmp_path):
    artifact = build(folder / "small.safetensors", tmp_path / "out", target, rules, **changes)
    found, base = forms(artifact), changes["weights"]
    assert found["embedding/embedding", -1] == "cq4x32" and found["stack/mhc_phi_pre", 0] == "cq4x128"
    assert found[Q_PROJ, 1] == f"{base}x32" and found["engrams/embedding", -1] == f"{base}x8"
    assert artifact.parity["scheme_loss"]["max_abs"] > 0
    assert pipeline.verify(tmp_path / "out", checkpoint=str(folder / "small.safetensors"), progress=QUIET)


@pytest.mark.parametrize("base", ["fp32", "int4"])
def test_one_role_in_codes_lies_beside_others(folder, base, tmp_path):
    artifact = build(folder / "small.cact", tmp_path / "out", rules=("vocabulary=codebook",), weights=base)
    found = forms(artifact)
    assert found.pop(("embedding/embedding", -1)) == "codebook4x8"
    assert {form[:4] for form in found.values()} == ({"int4"} if base == "int4" else set())
    if base == "fp32":
        # Codes are the checkpoint's own numbers: nothing was rounded.
        assert artifact.parity["scheme_loss"]["max_abs"] < 1e-5
    assert pipeline.verify(tmp_path / "out", checkpoint=str(folder / "small.cact"), progress=QUIET)


@pytest.mark.parametrize("target", ["onnx", "coreml"])
def test_rows_that_are_no_whole_groups_stay_floats_and_are_said_to(folder, target, tmp_path):
    artifact = build(folder / "wide.cact", tmp_path / "out", target)
    # 96 columns are padded to a group of 128; those of the output projection and of the lanes are whole ones.
    assert {source for source, _ in forms(artifact)} == {
        Q_PROJ.replace("q_proj", "out_proj"), *(f"stack/mhc_phi_{part}" for part in ("pre", "post", "res"))
    }
    assert "its rows aren't whole groups of 128 columns" in kept(artifact, "embedding")
    assert "128 columns" in kept(artifact, "layers.2.attention.q_proj+k_proj+v_proj+gate_proj")


def test_what_an_adapter_changed_is_no_codes_any_more(folder, tmp_path):
    random = np.random.default_rng(1)
    pairs = {f"lora/{Q_PROJ}/A": random.standard_normal((3, 96, 4), np.float32),
             f"lora/{Q_PROJ}/B": random.standard_normal((3, 4, 192), np.float32)}
    meta = {"scale": 0.5, "rank": 4, "base": "small", "seed": 0, "pieces": None, "languages": None}
    adapter = tmp_path / "lora.safetensors"
    write_tensors(adapter, pairs, {key: json.dumps(value) for key, value in meta.items()}, dtype="float32")
    artifact = build(folder / "small.cact", tmp_path / "out", lora=str(adapter))
    found = forms(artifact)
    assert (Q_PROJ, 1) not in found and found[Q_PROJ.replace("q_proj", "k_proj"), 1] == "codebook4x8"
    assert "an adapter was merged into it" in kept(artifact, "layers.1.attention.q_proj")
    fusion = artifact.fusion["merge_projections"]
    assert fusion.fused == fusion.expected


def test_floats_have_no_codes_to_import(folder, tmp_path):
    with pytest.raises(UsageError) as caught:
        build(folder / "small.safetensors", tmp_path / "out")
    assert "this checkpoint holds no codebooks to import" in str(caught.value)
    assert "cq4, cq2" in caught.value.fix and list(tmp_path.iterdir()) == []
