"""Better levels and scales than rounding to nearest finds: less error, the same proof."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from needle_export import pipeline
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, UsageError
from needle_export.model import rows
from needle_export.model.network import Needle
from needle_export.model.step import Step
from needle_export.targets import find_target
from needle_export.weights.forms import Form

QUIET = NullProgress()
RUNTIMES = {"onnx": "onnxruntime", "tflite": "ai_edge_litert", "coreml": "coremltools"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("rounding") / "model.safetensors"
    write_sample(path, SMALL, 5)
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    drawn = np.random.default_rng(0).integers(1, SMALL.vocab_size, (3, 20))
    path.write_text("".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in drawn))
    return path


def build(checkpoint, out, target="onnx", **changes):
    options = {"weights": "int4", "context": 24, "bench": False, **changes}
    if target != "onnx":
        options["buckets"] = (8,)
    return pipeline.build(BuildOptions(str(checkpoint), out, target=target, **options), QUIET)


def blocks(checkpoint, target, folder):
    """Of every matrix in integer blocks: its name, form, squared errors as stored and as rounded to nearest.

    And whether its parts are matrices of blocks by themselves: the search sees them one by one, and leaves those that a
    target stores as blocks only because they lie beside others.
    """
    read = read_checkpoint(checkpoint)
    step = Step(Needle(read.geometry, read.tensors, read.permutations), 24)
    originals = rows.matrices(step, set(), {})
    for stored in find_target(target).read_matrices(folder):
        form = Form.parse(stored.form)
        if form is None or form.kind != "int" or stored.folded:
            continue
        loaded = [originals[p, stored.claim.site].load() for p in stored.claim.parameters]
        whole = np.concatenate([v for v, _ in loaded])[stored.claim.start : stored.claim.stop]
        # Where they stand behind the op, scales are the matrix' own.
        behind = stored.behind is not None
        factors = np.concatenate([np.ones(len(v), np.float32) if behind or f is None else f for v, f in loaded])
        form = Form("int", form.bits, form.size, target == "tflite")
        nearest = form.rounded(torch.from_numpy(np.ascontiguousarray(whole))).numpy()
        numbers = stored.values * np.repeat(stored.scales, form.size, axis=1)
        factors = factors[stored.claim.start : stored.claim.stop, None]
        errors = [float(np.square(m - whole).sum()) for m in (numbers / factors, nearest)]
        alone = all(find_target(target).blocks("int4", *v.shape) is not None for v, _ in loaded)
        yield str(stored.claim), form, errors, alone


@pytest.mark.parametrize("target", ["onnx", "tflite", "coreml"])
def test_search_lowers_the_error_of_every_matrix(checkpoint, target, tmp_path):
    pytest.importorskip(RUNTIMES[target])
    report = build(checkpoint, tmp_path / "out", target, rounding="search")
    (artifact,) = report.artifacts
    found = list(blocks(checkpoint, target, tmp_path / "out"))
    assert sum(form.bits == 4 and alone for _, form, _, alone in found) >= 5
    for name, form, (stored, nearest), alone in found:
        assert stored < nearest if form.bits == 4 and alone else stored <= nearest * (1 + 1e-5), (name, form.name)
    told = artifact.parity
    assert told["weights"]["matrices"] >= len(found) and told["max_abs"] <= told["tolerance"]["logits"]
    assert report.options["rounding"] == "search" and report.options["prompts"] is None
    assert pipeline.verify(tmp_path / "out", checkpoint=str(checkpoint), progress=QUIET)


def test_a_calibrated_build_names_its_prompts_and_verifies_without_the_checkpoint(checkpoint, prompts, tmp_path):
    pytest.importorskip("onnxruntime")
    report = build(checkpoint, tmp_path / "out", calibrate=str(prompts))
    (artifact,) = report.artifacts
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert report.options["rounding"] == "calibrated"
    assert report.options["prompts"] == {"name": "prompts.jsonl", "sha256": digest}
    told = artifact.parity
    assert told["weights"]["matrices"] and told["max_abs"] <= told["tolerance"]["logits"]
    assert any(stored != nearest for _, _, (stored, nearest), _ in blocks(checkpoint, "onnx", tmp_path / "out"))
    assert pipeline.verify(tmp_path / "out", checkpoint=None, progress=QUIET)
    with pytest.raises(UsageError, match="--checkpoint: the build was calibrated with prompts; verify without"):
        pipeline.verify(tmp_path / "out", checkpoint=str(checkpoint), progress=QUIET)


@pytest.mark.parametrize(("line", "sentence"), [
    ('{"tokens": [1, 2', "it isn't JSON"),
    ('{"text": "hello"}', "it has text, but the checkpoint has no tokenizer"),
    (f'{{"tokens": [1, {SMALL.vocab_size}]}}', str(SMALL.vocab_size)),
])
def test_broken_prompts_name_their_line_and_publish_nothing(checkpoint, prompts, tmp_path, line, sentence):
    prompts.write_text(prompts.read_text() + line + "\n")
    with pytest.raises(BadInput) as caught:
        build(checkpoint, tmp_path / "out", calibrate=str(prompts))
    assert "line 4" in str(caught.value) and "prompts.jsonl" in str(caught.value) and sentence in str(caught.value)
    assert list(tmp_path.iterdir()) == [prompts]


def test_prompts_that_are_not_there_are_named(checkpoint, tmp_path):
    with pytest.raises(BadInput, match=r"none\.jsonl"):
        build(checkpoint, tmp_path / "out", calibrate=str(tmp_path / "none.jsonl"))
