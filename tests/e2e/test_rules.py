"""Builds in which weights of several roles have several schemes: each lies as its rule says, and all of it verifies."""

from __future__ import annotations

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL, role_of
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rule
from needle_export.errors import UsageError

MIXES = [
    ("onnx", "int4", ("content=int8", "engrams/*_proj/*=int2"), {"content": "int8", "routing": "int4"}),
    # Every projection by itself: nothing is left to merge.
    ("onnx", "fp32", ("*/q_proj/*=int8", "*/k_proj/*=int4", "*/v_proj/*=fp16"), {"vocabulary": "", "memory": ""}),
    ("coreml", "int4", ("content=int8", "memory=palette4"), {"content": "int8", "memory": "palette4"}),
    ("coreml", "fp32", ("content=int8", "vocabulary=int4"), {"content": "int8", "vocabulary": "int4", "memory": ""}),
    ("tflite", "fp16", ("content=int8",), {"content": "int8", "memory": "float16"}),
    ("tflite", "int4", ("content=int8", "memory=fp16"), {"content": "int8", "memory": "float16", "routing": "int4"}),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "model.safetensors"
    write_sample(path, SMALL, 0)
    return path


def options(checkpoint, out, target, base, rules, **more):
    parsed = tuple(Rule.parse(r) for r in rules)
    more |= {"context": 64, "bench": False}
    return BuildOptions(str(checkpoint), out, target=target, weights=base, rules=parsed, **more)


def stored(report):
    """(tensor, role, form) of every weight that isn't float32."""
    scheme = report.artifacts[0].parity["scheme"]
    pairs = [(s, form) for s, _, form in scheme["forms"]]
    pairs += [(s, "int8") for s, _ in scheme["int8"]] + [(s, "float16") for s, _ in scheme["halves"]]
    return [(s, role_of(s.replace("engrams/", "engrams_0/")), form) for s, form in pairs]


@pytest.mark.parametrize(("target", "base", "rules", "expected"), MIXES)
def test_a_mix_is_stored_as_its_rules_say(checkpoint, tmp_path, target, base, rules, expected):
    report = pipeline.build(options(checkpoint, tmp_path / "out", target, base, rules), NullProgress())
    artifact = report.artifacts[0]
    assert artifact.weights == ", ".join([base, *rules])
    assert report.options["rules"] == [r.split("=") for r in rules]
    found = stored(report)
    for role, form in expected.items():
        kernels = [f for s, r, f in found if r == role and s.endswith(("kernel", "embedding", "phi_pre"))]
        assert all(f.startswith(form) for f in kernels) and bool(kernels) == bool(form), role
    for rule in rules:
        pattern, scheme = rule.split("=")
        if "/" in pattern:
            forms = {f for s, _, f in found if Rule(pattern, scheme).matches(s, "")}
            assert forms and all(f.startswith({"fp16": "float16"}.get(scheme, scheme)) for f in forms), rule
    merged = artifact.fusion.get("merge_projections")
    assert merged is None or merged.fused == merged.expected
    if (target, base) == ("onnx", "int4"):
        assert artifact.nodes.by_op["Concat"] and pipeline.verify(
            tmp_path / "out", checkpoint=str(checkpoint), progress=NullProgress()
        )


@pytest.mark.parametrize(("rules", "sentence"), [
    (("contnt=int8",), "no weight of this checkpoint is 'contnt'"),
    (("stack/mhc_phi_pre=int8",), "these are stored as one matrix and have several schemes"),
])
def test_rules_that_mean_nothing_publish_nothing(checkpoint, tmp_path, rules, sentence):
    with pytest.raises(UsageError, match=sentence):
        pipeline.build(options(checkpoint, tmp_path / "out", "onnx", "int4", rules), NullProgress())
    assert not (tmp_path / "out").exists()


def test_a_rule_is_held_to_its_target(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="--rule: the onnx target has no palette4"):
        options(checkpoint, tmp_path, "onnx", "int4", ("content=palette4",))
    with pytest.raises(UsageError, match="--opset: int8 needs ONNX Runtime's own ops"):
        options(checkpoint, tmp_path, "onnx", "fp32", ("content=int8",), opset=21)
    with pytest.raises(UsageError, match="--rule: int4 needs iOS 18"):
        options(checkpoint, tmp_path, "coreml", "fp16", ("content=int4",), os="ios17")
