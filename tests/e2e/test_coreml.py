"""A Core ML build tells what was proven and how, computes what the reference computes, and is the same every time."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from needle_export import pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.errors import BadInput, Unsupported, UsageError, VerificationFailed
from needle_export.model.network import Needle
from needle_export.report.schema import dump_report, load_report
from needle_export.report.text import render_text
from needle_export.targets.coreml.session import EvaluatorRunner
from needle_export.targets.coreml.target import HOST_FILES, CoremlTarget
from tests.support.coreml_builds import BUCKETS, CONTEXT, GEOMETRY, QUIET, options, package

pytest.importorskip("coremltools")

SCHEMES = ("fp32", "fp16", "int8", "int4", "palette4")
OLD_SCHEMES = SCHEMES[:3]
#: Every build that is looked at here, by weights and system.
BUILDS = [(w, "ios18") for w in SCHEMES] + [(w, "ios17") for w in OLD_SCHEMES]

everywhere = pytest.mark.parametrize(("weights", "system"), BUILDS)


def some_ids(count, seed=1):
    return np.random.default_rng(seed).integers(1, GEOMETRY.vocab_size, count)


@pytest.fixture(scope="module")
def net(packages):
    checkpoint = read_checkpoint(packages.checkpoint)
    return Needle(checkpoint.geometry, checkpoint.tensors, checkpoint.permutations).eval()


def logits(net, ids):
    with torch.inference_mode():
        return net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()


@everywhere
def test_the_report_tells_what_was_proven(weights, system, packages):
    out, report = packages.get(weights, os=system)
    assert load_report(out) == report and dump_report(report) == (out / "report.json").read_bytes()
    (artifact,) = report.artifacts
    assert (artifact.status, artifact.target, artifact.weights) == ("verified-by-evaluator", "coreml", weights)
    assert artifact.latency is None and artifact.memory is None and report.options["os"] == system
    names = ["model.mlpackage"]
    names += [f"model_prefill_{b}.mlpackage" for b in BUCKETS] if system == "ios17" else []
    beside = {"reference.npz", "report.json", "manifest.json", "loop.py", "decoder.py"}
    assert {p.name for p in out.iterdir()} == {*names, *HOST_FILES, *beside}
    described = {f.name for f in artifact.files}
    assert described == {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} - beside
    measured = artifact.parity
    assert measured["prompts"] == [5, 24, 24][: len(measured["prompts"])] and measured["steps"] == 48
    assert measured["steps"] == measured["argmax_equal"] == measured["top5_equal"]
    assert measured["max_abs"] < 5e-6 and measured["state_max_abs"] < 5e-6 and measured["sqnr_db"] > 110
    assert measured["tolerance"]["logits"] == 1e-4 and measured["tolerance"]["ties"] == 0
    assert measured["distinct_predictions"] > measured["positions"] // 5
    for name, fusion in artifact.fusion.items():
        assert fusion.fused == fusion.expected, name
    assert artifact.versions["coremltools"] == "9.0"


@everywhere
def test_what_rounding_costs_is_told_apart_from_the_scheme(weights, system, packages):
    measured = packages.get(weights, os=system)[1].artifacts[0].parity
    rounded, loss = measured["rounded"], measured["scheme_loss"]
    assert rounded["steps"] == 24 and rounded["argmax_equal"] >= 22
    if weights == "fp32":
        assert loss is None
        # States are halves where there are states, and nothing else is.
        assert rounded["max_abs"] < (1e-3 if system == "ios18" else 5e-6)
        assert (rounded["sqnr_db"] > 60) if system == "ios18" else (rounded["sqnr_db"] > 110)
        return
    assert 1e-4 < rounded["max_abs"] < 1e-2 and 45 < rounded["sqnr_db"] < 60
    assert 1e-9 < rounded["kl"] < 1e-6
    low, high = {"fp16": (1e-4, 1e-2), "int8": (1e-2, 0.2), "int4": (0.1, 2), "palette4": (0.1, 2)}[weights]
    assert low < loss["max_abs"] < high
    assert measured["scheme"]["half"] and bool(measured["scheme"]["forms"]) == (weights != "fp16")


@everywhere
def test_the_ledger_and_what_stayed_float(weights, system, packages):
    artifact = packages.get(weights, os=system)[1].artifacts[0]
    roles = artifact.size.by_role
    assert sum(roles.values()) + artifact.size.overhead_bytes == artifact.size.total_bytes
    assert set(roles) == {"routing", "content", "memory", "mixing", "lanes", "vocabulary", "norms"}
    g, scales = GEOMETRY, {"int8": 2, "int4": 2 * 3}.get(weights, 0)
    bits = {"fp32": 32, "fp16": 16, "int8": 8}.get(weights, 4)
    palettes = g.vocab_size // 16 * 32 if weights == "palette4" else 0
    assert roles["vocabulary"] == g.vocab_size * (g.d_model * bits // 8 + scales) + palettes
    assert bool(artifact.kept_float) == (weights not in ("fp32",)) and all(k.reason for k in artifact.kept_float)
    reasons = {k.reason for k in artifact.kept_float}
    if weights in ("int8", "int4", "palette4"):
        assert any("decompressing" in reason for reason in reasons)
    # Keys 48 and values 64 wide, in half precision or as the host keeps them.
    state = artifact.state_bytes.by_part
    rows = (g.num_layers - len(g.global_layers)) * g.sliding_window + len(g.global_layers) * CONTEXT
    assert state["values"] * 48 == state["keys"] * 64 and state["keys"] % (rows * g.num_kv_heads * 48) == 0


@everywhere
def test_functions_and_runtimes(weights, system, packages):
    out, report = packages.get(weights, os=system)
    (artifact,) = report.artifacts
    counted = package(out).describe()["functions"]
    decode = counted["decode" if system == "ios18" else "main"]
    assert artifact.nodes.decode == decode["ops"] and artifact.nodes.by_op == decode["op_types"]
    assert artifact.nodes.prefill is not None and artifact.nodes.prefill > artifact.nodes.decode
    assert artifact.io["signatures"] == ["decode", "prefill_8", "prefill_16"] and artifact.io["context"] == CONTEXT
    first, *others = artifact.runtimes
    assert (first.runtime, first.loaded, first.reproduced) == ("evaluator", True, True)
    assert first.max_abs == artifact.parity["max_abs"]
    assert all(other.reason or other.reproduced for other in others)
    assert any("no Apple device took part" in note for note in artifact.notes)
    assert any(system.replace("ios", "iOS ") in note for note in artifact.notes)
    text = " ".join(render_text(report, width=200).split())
    assert "evaluator" in text and "no Apple device took part" in text


@everywhere
def test_evaluate_gives_the_references_logits(weights, system, packages, net):
    out, report = packages.get(weights, os=system)
    ids = some_ids(CONTEXT)
    expected, got = logits(net, ids), pipeline.logits(out, ids, QUIET)
    deviation = np.abs(got - expected).max()
    if weights == "fp32":
        assert deviation < 1e-5
    else:
        # Of the checkpoint's own numbers it is off by what the scheme costs, and by that alone.
        loss = report.artifacts[0].parity["scheme_loss"]["max_abs"]
        assert loss / 3 < deviation < 3 * loss


@everywhere
def test_any_cut_of_a_sequence_gives_the_same(weights, system, packages):
    """Chunks from odd starts, with padding, over the ring's end; and decode alone."""
    runner = EvaluatorRunner(packages.get(weights, os=system)[0])
    ids, parts = some_ids(CONTEXT, 5), {}
    for cuts in ([CONTEXT], [1] * CONTEXT, [5, 8, 8, 3, 1, 1, 16, 6], [3, 1, 7, 8, 1, 20, 8], [33, 1, 1, 13], [17, 31]):
        runner.reset()
        bounds = np.cumsum([0, *cuts])
        fed = [runner.feed(ids[a:b]) for a, b in itertools.pairwise(bounds)]
        parts[tuple(cuts)] = np.concatenate(fed), runner.state()
    (first, state), *others = parts.values()
    assert len(set(first.argmax(-1).tolist())) > 15
    for found, left in others:
        assert np.abs(found - first).max() < 2e-5
        assert all(np.abs(left[name] - value).max() < 2e-5 for name, value in state.items())
    with pytest.raises(UsageError, match="49 tokens don't fit"):
        runner.feed(ids[:1])


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_verify_recognises_its_own_and_a_checkpoint(weights, packages):
    out, report = packages.get(weights, os="ios18")
    with packages.sharing():
        for checkpoint in (None, str(packages.checkpoint)):
            again = pipeline.verify(out, checkpoint=checkpoint, progress=QUIET)
            assert again.artifacts[0].parity == report.artifacts[0].parity


@pytest.mark.parametrize("name", ["weights/weight.bin", "model.mlmodel", "reference.npz", "host.py"])
def test_verify_notices_one_flipped_bit(name, packages, tmp_path):
    copy = packages.copy(tmp_path / "copy", os="ios18")
    (path,) = (p for p in copy.rglob("*") if p.as_posix().endswith(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerificationFailed, match=path.name):
        pipeline.verify(copy, checkpoint=None, progress=QUIET)


def test_an_evaluators_times_are_not_measured(packages):
    out, _ = packages.get("fp16", os="ios18")
    if not CoremlTarget().other_runtimes(out) or CoremlTarget().other_runtimes(out)[0].open is None:
        with pytest.raises(Unsupported) as refusal:
            pipeline.bench(out, threads=1, steps=4, prompt=None, progress=QUIET)
        assert refusal.value.exit_code == 5
    # A build that is asked to measure leaves it out, and says nothing that wasn't measured.
    assert "latency" in json.loads((out / "report.json").read_text())["artifacts"][0]


@pytest.mark.parametrize("weights", ["fp16", "palette4"])
def test_the_same_input_gives_the_same_bytes_over_an_earlier_build(weights, packages, tmp_path, monkeypatch):
    """Traced anew, so that sharing programs between builds is shown to change nothing either."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    out, _ = packages.get(weights, os="ios18")
    again = packages.copy(tmp_path / "again", "fp32", os="ios17")

    def never(*arguments):
        raise AssertionError("it rewrites palettes with scales into palettes by block")

    monkeypatch.setattr(PASS_REGISTRY["common::canonicalize_quantized_lut_pattern"], "__call__", never)
    monkeypatch.setattr(PASS_REGISTRY["common::canonicalize_quantized_lut_pattern"], "apply", never)
    pipeline.build(options(packages.checkpoint, again, weights=weights, os="ios18"), QUIET)
    files = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for name in files:
        assert (out / name).read_bytes() == (again / name).read_bytes(), name
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


@pytest.mark.parametrize(
    ("context", "buckets", "weights", "system", "made"),
    [
        (2, None, "fp32", "ios18", [2]),
        (3, None, "fp16", "ios18", [2]),
        (3, (), "fp32", "ios17", []),
        (5, None, "fp32", "ios17", [5]),
        (5, None, "fp32", "ios18", [4]),
        (41, None, "fp32", "ios18", [16]),
        (41, (), "int4", "ios18", []),
        (41, (6,), "fp32", "ios26", [6]),
    ],
)
def test_odd_and_tiny_contexts(context, buckets, weights, system, made, packages, tmp_path, net):
    report = packages.build(tmp_path / "dist", context=context, buckets=buckets, weights=weights, os=system)
    (artifact,) = report.artifacts
    assert artifact.io["buckets"] == made and artifact.parity["max_abs"] < 5e-6
    assert artifact.parity["positions"] >= context and artifact.parity["steps"] > 0
    assert (artifact.nodes.prefill is None) == (not made)
    runner, ids = EvaluatorRunner(tmp_path / "dist"), some_ids(context, 7)
    # From an odd start, and filling the context to its last row.
    found = np.concatenate([runner.feed(ids[:1]), runner.feed(ids[1:])])
    bound = 1e-5 if weights == "fp32" else 3 * artifact.parity["scheme_loss"]["max_abs"]
    assert np.abs(found - logits(net, ids)).max() < bound
    with pytest.raises(UsageError, match=f"{context + 1} tokens don't fit in a context of {context}"):
        runner.feed(ids[:1])
    if system == "ios26":
        assert package(tmp_path / "dist").specification == 10


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target": "tflite", "os": "ios18"}, "--os: the tflite target isn't made for an operating system"),
        ({"target": "onnx", "os": "ios18", "buckets": None}, "--os: the onnx target isn't made for"),
        ({"os": "ios16"}, "--os: there is no 'ios16'"),
        ({"os": "ios17", "weights": "int4"}, "--weights: int4 needs iOS 18"),
        ({"os": "ios17", "weights": "palette4"}, "--weights: palette4 needs iOS 18"),
        ({"buckets": (7,)}, "--buckets: a prefill of 7 tokens can't be written at once; choose a multiple of 2"),
        ({"buckets": (18,)}, "--buckets: 18 tokens are more than the window of 16"),
        ({"buckets": (50,)}, "--buckets: 50 tokens don't fit in the context of 48"),
        ({"heads": ("confidence",)}, "--heads: probe heads aren't part of a Core ML package"),
        ({"opset": 24}, "--opset: the coreml target has no opset"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, word, packages, tmp_path):
    with pytest.raises(UsageError) as refusal:
        pipeline.build(options(packages.checkpoint, tmp_path / "dist", **changes), QUIET)
    assert word in str(refusal.value) and refusal.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_its_package(packages, tmp_path):
    copy = packages.copy(tmp_path / "copy", os="ios18")
    (copy / "model.mlpackage").rename(copy / "elsewhere.mlpackage")
    with pytest.raises(BadInput, match="missing"):
        EvaluatorRunner(copy)
