"""The published 20-layer geometry: the sizes, counts and limits that this project promises.

Times live in the benchmark; here stands what doesn't depend on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.sample import write_sample
from needle_export.measure import memory

pytestmark = pytest.mark.published

PROGRAM = """
import json, sys
from pathlib import Path
from needle_export import pipeline
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rule
from needle_export.measure import packing
from needle_export.measure.latency import peak_rss
packing.LEVEL = 0  # deflating random numbers takes as long as some builds, and no promise here is about it
changes = {"buckets": tuple(found)} if (found := json.loads(sys.argv[6])) else {}
changes["rules"] = tuple(map(Rule.parse, sys.argv[7:]))
options = BuildOptions(
    sys.argv[1], Path(sys.argv[2]), sys.argv[3], weights=sys.argv[4], context=int(sys.argv[5]), bench=False, **changes
)
pipeline.build(options, NullProgress())
print(json.dumps(peak_rss()))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "needle3.safetensors"
    write_sample(path, PUBLISHED, 0)
    return path


def build(checkpoint, out, target, weights, context, buckets=(), rules=()):
    """A build in a process of its own: artifact, parameters, and the most memory that it took."""
    asked = (str(checkpoint), str(out), target, weights, str(context), json.dumps(buckets), *rules)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    (artifact,) = report["artifacts"]
    parameters = report["checkpoint"]["parameters"]
    assert parameters == 121_019_861
    for name, fusion in artifact["fusion"].items():
        assert fusion["fused"] == fusion["expected"], name
    assert artifact["parity"]["distinct_predictions"] > 100
    return artifact, parameters, json.loads(done.stdout)


@pytest.mark.parametrize(("weights", "width"), [("fp32", 4), ("fp16", 2)])
def test_a_build_keeps_its_promises(weights, width, checkpoint, tmp_path):
    artifact, parameters, peak = build(checkpoint, tmp_path / "dist", "onnx", weights, 1024)
    assert artifact["size"]["total_bytes"] <= 1.01 * width * parameters
    parity = artifact["parity"]
    assert parity["max_abs"] <= 1e-4 and parity["steps"] == parity["argmax_equal"] >= 3 * 64
    if weights == "fp32":
        assert artifact["nodes"]["decode"] <= 2000
    # Full caches for the 1,024 positions: keys 48 and values 64 wide, two heads, twenty blocks.
    parts = artifact["state_bytes"]["by_part"]
    assert parts["keys"] == 20 * 1024 * 2 * 48 * 4 and parts["values"] == 20 * 1024 * 2 * 64 * 4
    assert peak < 5e9


def test_loading_int4_for_decoding_takes_little_more_than_its_file(checkpoint, tmp_path):
    out = tmp_path / "dist"
    artifact, _, _ = build(checkpoint, out, "onnx", "int4", 1024)
    size = artifact["size"]["total_bytes"]
    assert size < 67e6
    if memory.resident() is None:
        pytest.skip("this system doesn't tell a process's resident size")
    asked = {"threads": 1, "prompt": 0, "decode_alone": True}
    decode = memory.measure("onnx", out, PUBLISHED.head_vocab, **asked)
    assert decode["rss_bytes"] <= size + 80e6
    both = memory.measure("onnx", out, PUBLISHED.head_vocab, **{**asked, "decode_alone": False})
    # The second session packs the matrices again.
    assert both["rss_bytes"] > decode["rss_bytes"] + 20e6


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_tflite_build_keeps_its_promises(weights, checkpoint, tmp_path):
    pytest.importorskip("litert_torch")
    out = tmp_path / "dist"
    artifact, parameters, peak = build(checkpoint, out, "tflite", weights, 256, (64, 128))
    size = artifact["size"]["total_bytes"]
    assert size <= {"fp32": 1.01 * 4, "int8": 1.08}[weights] * parameters
    parity = artifact["parity"]
    assert parity["steps"] >= 3 * 64 and parity["max_abs"] <= parity["tolerance"]["logits"]
    if weights == "fp32":
        assert parity["max_abs"] <= 1e-4 and parity["steps"] == parity["argmax_equal"]
    else:
        # What the file adds is less than what the scheme costs; of random weights, predictions are close to ties.
        loss = parity["scheme_loss"]
        assert parity["max_abs"] < loss["max_abs"] / 2 and parity["kl"] < loss["kl"] / 5
        assert parity["argmax_equal"] > loss["argmax_equal"] * parity["steps"]
        # All that is int8: of each block five of attention and three of the lanes (of the last, two), two tables, two
        # matrices a site; every byte of them and of their scales. Not the MLP's two, which take constants in.
        assert parity["weights"] == {"matrices": 8 * 20 - 1 + 2 + 2 * 5, "bytes": 122_739_008, "folded": 2 * 20}
    assert artifact["nodes"]["decode"] <= 3600
    assert set(artifact["signatures"]) == {"decode", "prefill_64", "prefill_128"}
    for name, signature in artifact["signatures"].items():
        # A permutation at each end of a block's MLP cuts; where engram sites are joined, that needs no more cuts.
        cutters = {left["op"]: left["splits"] for left in signature["left"] if left["splits"]}
        assert cutters.pop("GATHER") == 40 and set(cutters) <= {"CONCATENATION"}, name
        assert signature["partitions"] == 41 and signature["delegated"] > 0.95 * signature["ops"], name
    today, older = artifact["runtimes"]
    assert today["runtime"] == "ai-edge-litert" and today["loaded"] and today["reproduced"]
    if older["loaded"] is None:
        assert older["reason"].startswith("not tried: no Python with it")
    else:
        assert older["loaded"] and older["reproduced"] and older["version"] == "2.14.0", older["reason"]
    # The windows of 1,024 hold no more than the context: keys 48 and values 64 wide, two heads, twenty blocks.
    parts = artifact["state_bytes"]["by_part"]
    assert parts["keys"] == 20 * 256 * 2 * 48 * 4 and parts["values"] == 20 * 256 * 2 * 64 * 4
    # Each prefill reads the weights that decode reads: what it adds are ops, and masks of its length.
    own = own_bytes(out / "model.tflite")
    assert own["decode"] > 0.95 * size and max(own["prefill_64"], own["prefill_128"]) < 0.01 * size
    assert peak < 5e9


def own_bytes(path):
    """Constant data of each signature that no signature before it reads; equal bytes lie in the file once."""
    from needle_export.targets.tflite import analysis

    seen, found = {(0, 0)}, {}
    with analysis.mapped(path) as (data, model):
        for graph in analysis.read_graph(path):
            spans = {analysis.span_of(data, model.Buffers(t.buffer)) for t in graph.tensors if t.constant} - seen
            seen |= spans
            found[graph.name] = sum(size for _, size in spans)
    return found
