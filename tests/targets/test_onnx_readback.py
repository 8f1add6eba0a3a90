"""Matrices are read out of an ONNX artifact through its graphs, and what was done to one is found and named."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import onnx
import pytest

from needle_export.errors import BadInput
from needle_export.targets.onnx.contract import DATA_NAME
from needle_export.targets.onnx.readback import read_matrices
from tests.support.onnx_tamper import (
    OUT_PROJ,
    QKV,
    WIDE,
    Artifacts,
    Spoiled,
    exchange_rows,
    flip,
    reader,
    setting,
)

INTEGERS = ("int8", "int4", "int2")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return Artifacts(tmp_path_factory.mktemp("onnx"))


@pytest.fixture
def fault(artifacts, tmp_path):
    def run(weights, how, opset=24):
        return artifacts.fault(weights, tmp_path / "spoiled", how, opset)

    return run


def out_proj(block):
    return f"rows(layers.{block}.attention.out_proj)"


# Good artifacts

#: Of a block's attention five, of lanes three (in the last two, as nothing mixes there), three taps and six factors;
#: two projections of two sites, the tables, their taps, the embedding.
ALL = WIDE.num_layers * (5 + 3 + 3 + 6) - 1 + 2 * 2 + 3


@pytest.mark.parametrize(
    ("weights", "opset"),
    [("fp32", 24), ("fp32", 21), ("fp16", 24), ("fp16", 21), ("int8", 24), ("int4", 24), ("int2", 24)],
)
def test_every_matrix_is_compared(weights, opset, artifacts):
    compared = artifacts.compared(weights, opset)
    assert compared.fault() is None
    folded = 0 if weights != "fp32" else 2 * WIDE.num_layers  # of lanes, the two that gate
    assert len(compared.covered) == ALL - folded
    # The MLP's two, and in float32 the gates of both, merged.
    assert compared.folded == WIDE.num_layers * (2 + (weights == "fp32"))
    _, reference = artifacts.get(weights, opset)
    # Those two as they are stored: constants meet them when the model is loaded.
    left = {key for key, wanted in reference.items() if wanted.dtype != "float32"} - set(compared.covered)
    assert {name.rpartition(".")[2] for name, _ in left} <= {"cond_u", "cond_v"}
    assert compared.bytes == sum(held(wanted) for key, wanted in reference.items() if key in compared.covered)


def held(wanted):
    """Bytes that a matrix takes by its shape and form; of a cut factor what is left of it."""
    values, scales = wanted.load()
    rows, columns = values.shape
    if wanted.tensor.endswith(("/w1a", "/w3a")):
        rows, columns = (18, 32) if wanted.tensor.endswith("w3a") else (32, 18)
    if wanted.dtype.startswith("int"):
        return rows * columns * int(wanted.dtype[3]) // 8 + scales.nbytes
    return rows * columns * values.itemsize


def test_reference_kinds(artifacts):
    """What the small model is there for: every form that a scheme has."""
    for weights, kinds in (
        ("fp16", {"float16", "float32"}),
        ("int8", {"int8x128", "int8x64", "int8x16", "int8x64w", "int8x128wt", "float16", "float32"}),
        ("int4", {"int4x128", "int4x64", "int4x16", "int4x64w", "int4x128wt", "float16", "float32"}),
    ):
        assert {wanted.dtype for wanted in artifacts.get(weights)[1].values()} == kinds


def test_equal_matrices_are_no_fault(tmp_path):
    """They lie in the file once: of two blocks, of two of a block, of two sites."""

    def same(tensors):
        q, gate = (tensors[f"stack/layers/block/self_attn/{name}_proj/kernel"] for name in ("out", "gate"))
        q[2] = q[0]
        gate[1] = gate[0]
        tensors["engrams_1/key_proj/kernel"] = tensors["engrams_0/key_proj/kernel"]
        tensors["engrams_1/value_proj/kernel"] = tensors["engrams_0/value_proj/kernel"]

    artifacts = Artifacts(tmp_path, same)
    for weights in ("fp16", "int4"):
        compared = artifacts.compared(weights)
        assert compared.fault() is None and len(compared.covered) == ALL


# One bit


@pytest.mark.parametrize("weights", INTEGERS)
def test_one_level(weights, fault):
    def change(array):
        array[77, 0, 31] ^= 1

    said = fault(weights, lambda files: files.change(out_proj(1), change))
    column = 31 * 8 // int(weights[3])
    assert said.startswith(f"{OUT_PROJ} of block 1 (content): 1 of 576 rows differ, row 77 first, where 1 of 128 val")
    assert f"(at {column}: " in said


@pytest.mark.parametrize("weights", INTEGERS)
def test_the_last_bit_of_a_scale(weights, fault):
    # Of k's rows, which lie behind q's.
    said = fault(weights, lambda files: files.change(f"layers.2.attention.{QKV}.scales", flip(96 + 5, 3)))
    name = "stack/layers/block/self_attn/k_proj/kernel of block 2 (routing)"
    assert said.startswith(f"{name}: 1 of 48 rows differ, row 5 first, whose scale of columns ")


@pytest.mark.parametrize("weights", INTEGERS)
def test_a_scale_that_a_factor_went_into(weights, fault):
    said = fault(weights, lambda files: files.change("layers.1.lanes.phi_pre+phi_post+phi_res.scales", flip(9, 0)))
    assert said.startswith("stack/mhc_phi_res of block 1 (lanes): 1 of 16 rows differ, row 1 first, whose scale of ")


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_one_bit_of_a_float(weights, fault):
    said = fault(weights, lambda files: files.change(out_proj(2), flip(31, 77)))
    assert said.startswith(f"{OUT_PROJ} of block 2 (content): 1 of 576 rows differ, row 77 first, where 1 of 128 val")
    assert "(at 31: " in said


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize(
    ("table", "tensor"), [("embedding", "embedding/embedding"), ("engram.tables", "engrams/embedding")]
)
def test_one_bit_of_a_table(weights, table, tensor, fault):
    said = fault(weights, lambda files: files.change(f"rows({table})", flip(130, 17)))
    assert said.startswith(tensor) and "1 of " in said and "rows differ, row 130 first, where 1 of" in said


@pytest.mark.parametrize(
    ("name", "at", "tensor"),
    [
        ("layers.1.attention.q_taps+k_taps+v_taps", (96, 0, 0), "stack/layers/block/self_attn/k_taps of block 1"),
        ("layers.2.mlp.w1a[:,:18]", (3, 17), "stack/layers/block/hadamard_mlp/w1a of block 2"),
        ("layers.2.mlp.w3a[:18]", (17, 3), "stack/layers/block/hadamard_mlp/w3a of block 2"),
        ("layers.0.mlp.w2b", (17, 3), "stack/layers/block/hadamard_mlp/w2b of block 0"),
        ("engram.taps", (5, 0, 3), "engrams/taps"),
    ],
)
@pytest.mark.parametrize("weights", INTEGERS)
def test_one_bit_of_what_stays_a_half(weights, name, at, tensor, fault):
    called = f"rows({name})" + (" every 3" if name == "engram.taps" else "")
    said = fault(weights, lambda files: files.change(called, flip(*at)))
    assert said.startswith(tensor) and "1 of " in said and "first, where 1 of" in said


def test_a_kernel_that_reads_between_its_taps(fault):
    said = fault("fp16", lambda files: files.change("rows(engram.taps) every 3", flip(5, 0, 4)))
    assert said.startswith("the matrix engram.taps: its kernel isn't 0 between the taps (")


def test_a_tap_that_zeros_are_put_between_at_load_time(fault):
    said = fault("int4", lambda files: files.change("rows(engram.taps) every 3", flip(5, 0, 2)))
    assert said.startswith("engrams/taps (memory): 1 of ")


# Rows and blocks in each other's place


@pytest.mark.parametrize("weights", INTEGERS)
def test_two_rows_exchanged_with_their_scales(weights, fault):
    """Rows of k and of v, which lie in one matrix behind q's."""

    def swap(files):
        name = f"layers.1.attention.{QKV}"
        for constant in (f"rows({name})", f"{name}.scales"):
            files.change(constant, exchange_rows(96 + 7, 96 + 48 + 11))

    assert fault(weights, swap).startswith(
        "stack/layers/block/self_attn/k_proj/kernel of block 1 (routing): 1 of 48 rows differ, row 7 first, "
        "which holds row 11 of stack/layers/block/self_attn/v_proj/kernel of block 1 (content)"
    )


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int4"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_two_blocks_that_read_each_others_matrices(weights, phase, fault):
    said = fault(weights, lambda files: files.exchange(out_proj(1), out_proj(2), phase))
    assert said.startswith("layers.") and f" of {phase} reads {OUT_PROJ} of block " in said


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8", "int4"])
def test_two_blocks_matrices_under_each_others_names(weights, artifacts, fault):
    """The bytes themselves, with their scales."""

    def swap(files):
        constants = [f"rows(layers.{block}.attention.{QKV})" for block in (1, 2)]
        scales = [f"layers.{block}.attention.{QKV}.scales" for block in (1, 2)]
        for pair in (constants, scales if weights in INTEGERS else ()):
            held = [files.read(name) for name in reversed(pair)]
            for name, other in zip(pair, held, strict=True):
                files.change(name, partial(np.copyto, src=other))

    said = fault(weights, swap)
    q = "stack/layers/block/self_attn/q_proj/kernel of block"
    assert said.startswith(f"{q} 1 (routing): 96 of 96 rows differ, row 0 first, which holds row 0 of {q} 2 (routing)")
    assert said.endswith("(and 7 more)")


# Ops that make something else of them


def gemm_of(name, **changes):
    def change(graph):
        for attribute, value in changes.items():
            setting(reader(graph, name), attribute).CopyFrom(onnx.helper.make_attribute(attribute, value))

    return change


def test_a_factor_of_a_product(fault):
    def widened(graph):
        cast = reader(graph, "rows(layers.1.lanes.phi_pre)")
        gemm_of(cast.output[0], alpha=0.123)(graph)

    said = fault("fp16", lambda files: files.graphs(widened))
    assert said.startswith("stack/mhc_phi_pre of block 1 (lanes): 4 of 4 rows differ, row 0 first, whose scale is 0.12")


def test_a_factor_where_there_is_none(fault):
    def scale(graph):
        node = next(n for n in graph.node if "logits" in n.output)
        node.attribute.append(onnx.helper.make_attribute("alpha", 1.02))

    said = fault("fp32", lambda files: files.graphs(scale, "decode"))
    assert said.startswith("embedding/embedding (vocabulary): Gemm_")
    assert "of decode multiplies it by 1.01999998" in said


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("N", 575, "has other sizes than its levels"),
        ("K", 64, "has other sizes than its levels"),
        ("bits", 8, "has other sizes than its levels"),
        ("bits", 3, "not as levels of 2, 4 or 8 bits"),
        ("block_size", 64, "has no float32 scale for every 64 columns"),
    ],
)
def test_another_reading_of_levels(attribute, value, said, fault):
    def change(graph):
        setting(reader(graph, out_proj(1)), attribute).i = value

    assert f": MatMulNBits {said} (layers.1/" in fault("int4", lambda files: files.graphs(change)).replace(
        "reads it, ", ""
    )


def test_zero_points_and_other_readers(fault, artifacts, tmp_path):
    def zero_points(graph):
        reader(graph, out_proj(1)).input.append(out_proj(1))

    assert "MatMulNBits has more than levels and scales" in fault("int4", lambda files: files.graphs(zero_points))

    def reshaped(graph):
        graph.node.append(onnx.helper.make_node("Reshape", [out_proj(1), "rows"], ["odd"], "layers.1/Reshape_odd"))

    copy = tmp_path / "other"
    said = artifacts.fault("fp32", copy, lambda files: files.graphs(reshaped))
    assert said == (
        "the matrix layers.1.attention.out_proj: Reshape reads it, not as a matrix of rows"
        " (layers.1/Reshape_odd of decode)"
    )


@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_what_is_called_after_nothing(weights, fault):
    def rename(graph):
        for tensor in graph.initializer:
            if tensor.name == out_proj(1):
                tensor.name = "c1000"
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = "c1000" if name == out_proj(1) else name

    said = fault(weights, lambda files: files.graphs(rename))
    assert said.startswith("the matrix c1000: no matrix of the checkpoint is called so (")


def test_a_cut_to_other_rows(fault):
    """The head reads the first of the embedding's rows."""

    def change(graph):
        node = next(n for n in graph.node if n.op_type == "Slice" and n.input[0] == "rows(embedding)")
        start = next(t for t in graph.initializer if t.name == node.input[1])
        start.CopyFrom(onnx.numpy_helper.from_array(np.array([300]), start.name))

    assert "Slice cuts it, not to rows that it has" in fault("fp32", lambda files: files.graphs(change))


# Damage


def test_files_that_are_damaged(artifacts, tmp_path):
    def spoiled(how, match):
        copy = tmp_path / "copy"
        with pytest.raises(BadInput, match=match):
            artifacts.fault("int4", copy, how)
        for path in copy.iterdir():
            path.unlink()
        copy.rmdir()

    def cut(files):
        path = files.folder / DATA_NAME
        path.write_bytes(path.read_bytes()[: math.floor(path.stat().st_size / 2)])

    def elsewhere(graph):
        tensor = next(t for t in graph.initializer if t.name == out_proj(1))
        next(e for e in tensor.external_data if e.key == "location").value = "../weights.bin"

    spoiled(cut, "doesn't hold this tensor")
    spoiled(lambda files: files.graphs(elsewhere), "doesn't hold this tensor")
    spoiled(lambda files: (files.folder / "prefill.onnx").write_bytes(b"\x07" * 90), "no ONNX model")
    spoiled(lambda files: (files.folder / "decode.onnx").unlink(), "missing")


def test_one_at_a_time(artifacts):
    """A matrix is read when it is asked for."""
    folder, _ = artifacts.get("int4")
    first = next(iter(read_matrices(folder)))
    assert first.values.dtype == np.int8 and first.form.startswith("int4x") and first.own
    assert Spoiled(folder).folder == folder
