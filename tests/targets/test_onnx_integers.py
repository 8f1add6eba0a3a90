"""Integer weights in ONNX: ONNX Runtime computes with them what the reference does, and they lie in the file once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.errors import Unsupported, UsageError, VerificationFailed
from needle_export.graph.program import Part, Weight
from needle_export.measure import parity
from needle_export.targets.constants import digest
from needle_export.targets.onnx import integers
from needle_export.targets.onnx.builder import MATRIX, Builder, features
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.targets.onnx.store import WeightFile
from needle_export.targets.onnx.target import OnnxTarget
from needle_export.weights.forms import Form
from needle_export.weights.linear import dynamic_blocks
from tests.support.geometries import VARIANTS
from tests.support.programs import compile_onnx, needle, sample_checkpoint, traced

SCHEMES = ("int8", "int4")
#: Parts of one op's graph.
INPUTS = {"x": (ir.DataType.FLOAT, (None, 192)), "index": (ir.DataType.INT64, (None,))}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(folder, scheme, given, make):
    """Results of the op that ``make`` appends to a builder, on ``given``."""
    program = traced(needle(SMALL), 16, 1)
    with WeightFile(folder / "weights.bin") as store:
        b = Builder(program, store, features(24), Rules(scheme), "weights.bin")
        kind, shape = INPUTS[given[0]]
        x = ir.Value(name=given[0], shape=ir.Shape(shape), type=ir.TensorType(kind))
        y = make(b, x)
        y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": 24, "com.microsoft": 1}
    held = list(b.initializers.values())
    graph = ir.Graph([x], [y], nodes=b.nodes, initializers=held, opset_imports=imports, name="g")
    ir.save(ir.Model(graph, ir_version=10), folder / "op.onnx")
    session = ort.InferenceSession(folder / "op.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {given[0]: given[1]})[0], store.stored


def weight_of(data):
    return Weight("net.w", torch.from_numpy(data), (Part("w", "content", 0, data.size),))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("rows", "block"), [(1, 64), (7, 64), (64, 32), (5, 16)])
def test_a_product_is_the_references(bits, rows, block, tmp_path):
    if bits == 2 and block < 32:
        block = 32
    data, x, factor, bias = normal(40, 192), normal(rows, 192, seed=1), normal(40, seed=2), normal(40, seed=3)
    x[0, :block] = 0
    form = Form("int", bits, block)

    def make(b, value):
        addend = b.small(weight_of(bias))
        return integers.product(b, value, weight_of(data), data, form, factor, addend)

    found, _ = run(tmp_path, f"int{bits}", ("x", x), make)
    values, scales = form.quantize(torch.from_numpy(data))
    wanted = dynamic_blocks(torch.from_numpy(x), values, scales).numpy() * factor + bias
    weight = form.dequantize(values, scales).numpy()
    size = np.abs(x) @ np.abs(weight).T * np.abs(factor) + np.abs(bias)
    assert (np.abs(found - wanted) <= 5e-7 * size).all()
    # Which tells the two apart by three orders of magnitude.
    assert (np.abs(found - (x @ weight.T * factor + bias)) / size).max() > 2e-4


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rows_of_a_table_are_exact(bits, tmp_path):
    data, form, index = normal(50, 192), Form("int", bits, 64), np.array([0, 49, 7, 7], np.int64)
    found, stored = run(
        tmp_path, f"int{bits}", ("index", index), lambda b, i: integers.lookup(b, i, weight_of(data), data, form)
    )
    assert np.array_equal(found, form.rounded(torch.from_numpy(data)).numpy()[index])
    assert [(s.dtype, s.length) for s in stored] == [(form.name, 50 * 192 * bits // 8), ("float32", 50 * 3 * 4)]


@pytest.mark.parametrize("name", ["small", "orders", "split", "no_engram"])
@pytest.mark.parametrize("weights", SCHEMES)
def test_artifact_equals_the_reference_that_rounds_as_it_does(name, weights, tmp_path):
    folder, target = tmp_path / "out", OnnxTarget()
    folder.mkdir()
    compiler, compiled = compile_onnx(sample_checkpoint(tmp_path, VARIANTS[name]), folder, 60, weights=weights)
    compiler.use_stored_weights(compiled.weights, target.activations(Rules(weights)))
    cases = compiler.reference(0)
    measured = parity.compare(OnnxRunner(folder), cases, None, lambda _: None)
    assert parity.judge(measured, parity.tolerance_of(weights, compiler.sensitivity, True)) is None
    # Nearer to the reference that rounds as it does than to the model: that is what the scheme costs.
    assert measured.kl / measured.positions < 0.1 * compiler.scheme_loss["kl"]
    kinds = Counter(n.op_type for n in onnx.load(folder / "decode.onnx", load_external_data=False).graph.node)
    # Rows of 24 have no block that the op takes.
    geometry = VARIANTS[name]
    tables = 1 + (bool(geometry.engram_layers) and geometry.engram_sub_dim % 16 == 0)
    assert kinds["GatherBlockQuantized"] == tables and kinds["MatMulNBits"] >= 3 * geometry.num_layers


def test_a_tied_embedding_lies_in_the_file_once(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    _, compiled = compile_onnx(sample_checkpoint(tmp_path, SMALL), folder, 60, weights="int4")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    places = {i.name: {e.key: e.value for e in i.external_data}.get("offset") for i in model.graph.initializer}
    lookup, head = (
        next(n for n in nodes if "embedding" in n.input[at])
        for nodes, at in (
            ([n for n in model.graph.node if n.op_type == "GatherBlockQuantized"], 0),
            ([n for n in model.graph.node if n.op_type == "MatMulNBits"], 1),
        )
    )
    assert places[lookup.input[0]] == places[head.input[1]] and places[lookup.input[2]] == places[head.input[2]]
    assert [w.dtype for w in compiled.weights if w.name == "embedding"] == ["int4x32"]


def test_what_stays_a_float_is_told(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    _, compiled = compile_onnx(sample_checkpoint(tmp_path, SMALL), folder, 60, weights="int4")
    own = [w for w in compiled.weights if w.shares and any(s.role != "constant" for s in w.shares)]
    floats = [w for w in own if w.dtype in ("float32", "float16") and not w.name.endswith(".scales")]
    assert floats and all(w.kept_float for w in floats)
    # Of the larger ones, rows of 24 have no block that the op takes.
    large = [w.name for w in floats if sum(s.elements for s in w.shares) >= MATRIX]
    assert large == ["engram.tables"]
    assert next(w for w in floats if w.name in large).kept_float.endswith("blocks of 16 or more columns")
    assert not any(w.kept_float for w in own if w.dtype.startswith("int"))


def test_an_older_opset_has_none():
    with pytest.raises(UsageError, match="int4 needs ONNX Runtime's own ops"):
        BuildOptions("c", "out", weights="int4", opset=23)
    assert BuildOptions("c", "out", weights="int4").opset == 24


FAULTS = {
    "nibbles exchanged": lambda levels, scales: (levels << 4 | levels >> 4, scales),
    "levels off by one": lambda levels, scales: (levels + 1, scales),
    "scales of the next block": lambda levels, scales: (levels, np.roll(scales, 1, axis=1)),
    "scales a tenth too large": lambda levels, scales: (levels, scales * np.float32(1.1)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "orders.safetensors"
    write_sample(path, VARIANTS["orders"], 0)
    return path


@pytest.mark.parametrize("fault", FAULTS)
def test_a_build_with_a_fault_is_not_published(fault, checkpoint, tmp_path, monkeypatch):
    stored = integers._stored

    def faulty(b, weight, data, form, factor):
        key = (digest(data), form.name)
        stored(b, weight, data, form, factor)
        if key not in b.store.faulty:
            b.store.faulty.add(key)
            b.store.quantized[key] = FAULTS[fault](*b.store.quantized[key])
        return stored(b, weight, data, form, factor)

    monkeypatch.setattr(WeightFile, "faulty", set(), raising=False)
    monkeypatch.setattr(integers, "_stored", faulty)
    options = BuildOptions(str(checkpoint), tmp_path / "dist", weights="int4", context=48, bench=False)
    with pytest.raises(VerificationFailed, match=r"rows differ, row \d+ first, (where|whose)"):
        pipeline.build(options, NullProgress())
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("weights", SCHEMES)
def test_it_verifies_later_with_and_without_the_checkpoint(weights, checkpoint, tmp_path):
    options = BuildOptions(str(checkpoint), tmp_path / "dist", weights=weights, context=48, bench=False)
    (artifact,) = pipeline.build(options, NullProgress()).artifacts
    assert artifact.parity["scheme"]["activations"] == "blocks" and artifact.parity["scheme"]["forms"]
    assert 0 < artifact.parity["scheme_loss"]["kl"] < 1 and artifact.parity["weights"]["matrices"]
    for given in (None, str(checkpoint)):
        (found,) = pipeline.verify(tmp_path / "dist", checkpoint=given, progress=NullProgress()).artifacts
        assert found == artifact
    again = BuildOptions(str(checkpoint), tmp_path / "again", weights=weights, context=48, bench=False)
    pipeline.build(again, NullProgress())
    for name in ("weights.bin", "decode.onnx", "prefill.onnx"):
        assert (tmp_path / "dist" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("weights", ["int4", "fp16"])
def test_a_weight_beyond_half_precision_is_refused_by_name(weights, tmp_path):
    tensors = {k: v.astype(np.float32) for k, v in make_sample(SMALL, 0).items()}
    name = "stack/layers/block/self_attn/out_proj/kernel"
    tensors[name][1] *= 1e8
    path = tmp_path / "large.safetensors"
    write_checkpoint(path, SMALL, tensors, dtype="float32")
    options = BuildOptions(str(path), tmp_path / "dist", weights=weights, context=48, bench=False)
    with pytest.raises(Unsupported, match=rf"{name}: a (scale|value) is beyond half precision"):
        pipeline.build(options, NullProgress())
    assert not (tmp_path / "dist").exists()
