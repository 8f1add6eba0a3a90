"""The published 20-layer geometry as a Core ML package: the sizes, counts and limits that this project promises.

Times live in the benchmark; here stands what doesn't depend on the machine.
"""

from __future__ import annotations

import pytest

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.targets.base import LoweringOptions
from needle_export.targets.coreml.evaluate import load_package
from needle_export.targets.coreml.target import CoremlTarget
from tests.e2e.test_published import build, checkpoint
from tests.targets.coreml.packages import SPEC, WEIGHTS

pytestmark = [pytest.mark.published, pytest.mark.slow]
pytest.importorskip("coremltools")

assert checkpoint  # the fixture

CONTEXT, BUCKETS = 1024, (64, 128)


def weight_bytes(folder):
    return (folder / "model.mlpackage" / WEIGHTS).stat().st_size


@pytest.mark.parametrize("weights", ["fp16", "fp32"])
def test_a_coreml_build_keeps_its_promises(weights, checkpoint, tmp_path):
    out, width = tmp_path / "dist", {"fp16": 2, "fp32": 4}[weights]
    artifact, parameters, peak = build(checkpoint, out, "coreml", weights, CONTEXT, BUCKETS)
    parity, rounded = artifact["parity"], artifact["parity"]["rounded"]
    assert artifact["status"] == "verified-by-evaluator" and artifact["latency"] is None
    # The evaluator in float32 through prefills and decode steps; an overflow would have failed the build.
    assert parity["max_abs"] <= 2e-5 and parity["state_max_abs"] <= 2e-5
    assert parity["steps"] == parity["argmax_equal"] >= 3 * 64 and parity["prompts"] == [5, 37, 150]
    assert rounded["steps"] == 24 and rounded["argmax_equal"] >= (22 if weights == "fp16" else 24)
    assert rounded["sqnr_db"] > (35 if weights == "fp16" else 55)
    assert artifact["nodes"]["decode"] <= 3900
    assert artifact["size"]["total_bytes"] <= 1.01 * width * parameters
    parts = artifact["state_bytes"]["by_part"]
    assert parts["keys"] * 64 == parts["values"] * 48 and parts["keys"] % (20 * 1024 * 2 * 48) == 0
    described = load_package(out / "model.mlpackage").describe()
    assert set(described["functions"]) == {"decode", "prefill_64", "prefill_128"}
    for function in described["functions"].values():
        kinds = function["op_types"]
        assert kinds["scaled_dot_product_attention"] == 20 and kinds["layer_norm"] == 39 * 19
        assert kinds["write_state"] == len(described["states"]) == 42
    assert all(state["shape"][-1] % 32 == 0 for state in described["states"].values())
    assert described["constants"]["shared"] > 0.99 and peak < 8e9


def test_functions_share_their_weights(checkpoint, tmp_path):
    """Lowered alone, decode takes as many bytes as with two prefills beside it, within a hundredth."""
    source, sizes = read_checkpoint(checkpoint), {}
    for buckets in ((), BUCKETS):
        compiler, target = Compiler(source, CONTEXT, NullProgress()), CoremlTarget()
        folder = tmp_path / str(len(buckets))
        folder.mkdir()
        lowering = LoweringOptions(Rules("fp16"), CONTEXT, None, compiler.max_chunk, {}, buckets, (), "ios18")
        target.compile(compiler, compiler.states, PUBLISHED.head_vocab, folder, lowering)
        sizes[buckets] = weight_bytes(folder)
        if not buckets:
            total = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            assert total <= 1.01 * 2 * 121_019_861
    assert 1 < sizes[BUCKETS] / sizes[()] <= 1.01


@pytest.mark.parametrize(("weights", "most"), [("int8", 1.035), ("int4", 0.59), ("palette4", 0.54)])
def test_a_compressed_build(weights, most, checkpoint, tmp_path):
    artifact, parameters, _ = build(checkpoint, tmp_path / "dist", "coreml", weights, 256, (64,))
    parity = artifact["parity"]
    assert artifact["size"]["total_bytes"] <= most * parameters
    # What the file adds is next to nothing beside what the scheme costs.
    assert parity["max_abs"] <= 2e-5 and parity["steps"] == parity["argmax_equal"]
    assert parity["scheme_loss"]["max_abs"] > 100 * parity["max_abs"]
    assert parity["rounded"]["argmax_equal"] >= 20


def test_the_published_mix_of_codes_takes_37_megabytes(checkpoint, tmp_path):
    """Two bits, four for vocabulary and lanes, with both prefills: all files, of which 1.6 MB are graphs."""
    out = tmp_path / "dist"
    artifact, _, _ = build(checkpoint, out, "coreml", "cq2", CONTEXT, BUCKETS, ("vocabulary=cq4", "lanes=cq4"))
    parity = artifact["parity"]
    assert parity["max_abs"] <= 2e-5 and parity["steps"] == parity["argmax_equal"]
    assert parity["rounded"]["argmax_equal"] >= 20
    assert artifact["size"]["total_bytes"] <= 37_000_000
    assert (out / "model.mlpackage" / SPEC).stat().st_size <= 1_600_000
    assert artifact["nodes"]["decode"] <= 3650 and artifact["nodes"]["prefill"] <= 3900  # were 3,866 and 4,115
