"""What an ONNX graph computes on weights alone: done when the model is loaded, and by no step."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.config.rules import Rules
from needle_export.graph.program import Part, Weight
from needle_export.targets.onnx import integers
from needle_export.targets.onnx.builder import Builder, features
from needle_export.targets.onnx.load_time import computed, taps_kernel
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.targets.onnx.store import Weights
from needle_export.weights.forms import Form
from tests.support.programs import compile_onnx, needle, sample_checkpoint, tokens, traced
from tests.targets.test_onnx_integers import normal, run, weight_of


def constant_nodes(model):
    """Nodes of a model whose inputs are all constant."""
    known = {"", *(i.name for i in model.graph.initializer)}
    found = []
    for node in model.graph.node:
        if known.issuperset(node.input):
            found.append(node.op_type)
            known.update(node.output)
    return found


@pytest.mark.parametrize(("weights", "opset"), [("int4", 24), ("int2", 24), ("fp16", 24), ("fp16", 21)])
def test_a_step_runs_no_arithmetic_on_weights_alone(weights, opset, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    _, compiled = compile_onnx(sample_checkpoint(tmp_path, SMALL), folder, 60, weights=weights, opset=opset)
    count = len(constant_nodes(onnx.load(folder / "decode.onnx", load_external_data=False)))
    assert any(note.startswith(f"{count} nodes of the decode graph depend on weights alone") for note in compiled.notes)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "loaded.onnx")
    ort.InferenceSession(folder / "decode.onnx", options, providers=["CPUExecutionProvider"])
    left = constant_nodes(onnx.load(folder / "loaded.onnx", load_external_data=False))
    assert count > 5 and not left


def test_a_runner_can_let_go_of_its_prefill(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    compile_onnx(sample_checkpoint(tmp_path, SMALL), folder, 60, weights="int4")
    runner, other, ids = OnnxRunner(folder), OnnxRunner(folder), tokens(SMALL, 12)
    assert np.array_equal(runner.feed(ids[:8]), other.feed(ids[:8]))
    held = weakref.ref(runner.sessions["prefill"])
    runner.release_prefill()
    gc.collect()
    assert held() is None
    # One token needs no prefill, three open it again; nothing of the sequence is lost.
    for piece in (ids[8:9], ids[9:]):
        assert np.array_equal(runner.feed(piece), other.feed(piece))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("shape", "turned"), [((96, 48), False), ((8, 768), True)])
def test_a_widened_matrix_is_its_integers(bits, shape, turned, tmp_path):
    data = normal(*shape)
    weight = weight_of(data)
    form = Form("int", bits, 32 if not turned else 128, widened=True, turned=turned)
    assert Form.parse(form.name) == form

    def make(b, index):
        assert integers.widened_form(b, weight) == form
        return b.op("Gather", integers.widened(b, weight, form), index, axis=0)

    index = np.arange(shape[0])
    found, stored = run(tmp_path, f"int{bits}", ("index", index), make)
    rounded = form.rounded(torch.from_numpy(data).t()).t().numpy()
    assert np.array_equal(found, rounded) and not np.array_equal(found, data)
    assert [s.length for s in stored] == [data.size * bits // 8, data.size // form.size * 4]


def test_matrices_without_blocks_and_small_ones_are_not_widened_from_integers():
    b = Builder(traced(needle(SMALL), 16, 1), Weights(None), features(24), Rules("int4"), "weights.bin")
    for shape in ((120, 40), (8, 256)):
        assert integers.widened_form(b, weight_of(normal(*shape))) is None
    assert integers.widened_form(b, Weight("w", torch.ones(96, 96), (), True)) is None


@pytest.mark.parametrize("scheme", ["fp32", "int4"])
@pytest.mark.parametrize("dilation", [1, 3])
def test_a_kernel_has_its_taps_in_their_places(dilation, scheme, tmp_path):
    taps = normal(4, 600).astype(np.float16).astype(np.float32)
    found, _ = run(
        tmp_path,
        scheme,
        ("index", np.arange(600)),
        lambda b, i: b.op("Gather", taps_kernel(b, weight_of(taps), dilation), i, axis=0),
    )
    wanted = np.zeros((600, 1, 3 * dilation + 1), np.float32)
    wanted[:, 0, 3 * dilation :: -dilation] = taps.T
    assert np.array_equal(found, wanted)


def test_a_vector_of_ones_takes_no_bytes(tmp_path):
    ones = Weight("net.ones", torch.ones(768), (Part("ones", "constant", -1, 768),))
    found, stored = run(
        tmp_path, "int4", ("index", np.arange(768)), lambda b, i: b.op("Gather", computed(b, ones, (768,)), i, axis=0)
    )
    assert np.array_equal(found, ones.value.numpy()) and not stored
