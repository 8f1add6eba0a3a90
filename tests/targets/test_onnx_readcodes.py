"""Codes are read back from a finished ONNX artifact, and a change of any part of them is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

from needle_export.targets.onnx.contract import FILES
from needle_export.targets.onnx.target import OnnxTarget
from tests.support.coded_builds import Coded, unpacked
from tests.support.onnx_tamper import Spoiled, flip

pytest.importorskip("onnxruntime")

OUT = "codes(layers.1.attention.out_proj)"
OUT_NORMS = "norms(layers.1.attention.out_proj)"
QKV = "codes(layers.1.attention.q_proj+k_proj+v_proj+gate_proj)"
TENSOR = "stack/layers/block/self_attn/out_proj/kernel"


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    return Coded(tmp_path_factory.mktemp("coded"))


@pytest.fixture
def fault(coded, tmp_path):
    return lambda how: coded.fault("onnx", tmp_path / "copy", lambda folder: how(Spoiled(folder)))


def test_every_matrix_in_codes_is_compared(coded):
    found = coded.compared("onnx")
    assert found.faults == []
    _, reference, made = coded.get("onnx")
    codes = {key for key, wanted in reference.items() if wanted.dtype.startswith("codes") and wanted.used[0]}
    assert codes and codes <= set(found.covered) and all(found.covered[key].all() for key in codes)
    layers = coded.checkpoint.geometry.num_layers
    # Of a block: five projections and three of lanes, but the last one's mixing; two tables and two projections.
    assert len(codes) == 8 * layers - 1 + 4
    held = sum(w.bytes for w in made.weights if w.dtype.startswith(("codebook", "cq")))
    assert held <= found.bytes


def test_what_is_read_is_what_the_container_holds(coded):
    folder, _, _ = coded.get("onnx")
    read = {str(m.claim): m for m in OnnxTarget().read_matrices(folder) if m.form}
    for claim, name in (("layers.1.attention.out_proj", f"{TENSOR}#1"), ("embedding", "embedding/embedding")):
        levels, norms = unpacked(coded.checkpoint, name)
        assert read[claim].form == "codesx8"
        assert np.array_equal(read[claim].values, levels) and np.array_equal(read[claim].scales, norms)
    assert {p.name.rpartition(" of ")[2] for p in read["embedding"].places} == set(FILES)


def test_a_flipped_index_is_found(fault):
    found = fault(lambda files: files.change(OUT, flip(5, 3)))
    assert re.match(rf"{TENSOR} of block 1 .*: 1 of 96 rows differ, row 5 first, where 1 of 256 values .*at 6: ", found)


def test_a_changed_norm_is_found(fault):
    found = fault(lambda files: files.change(OUT_NORMS, flip(7, 2)))
    assert re.match(rf"{TENSOR} of block 1 .*: 1 of 96 rows differ, row 7 first, whose norm of columns 16 ", found)


def test_rows_of_a_merged_matrix_are_told_apart(fault):
    found = fault(lambda files: files.change(QKV, flip(4 * 48 + 2, 0)))
    assert "self_attn/k_proj/kernel of block 1" in found and "row 2 first" in found


def test_two_matrices_of_one_shape_in_each_others_place_are_found(fault):
    def exchange(files):
        other = OUT.replace("layers.1", "layers.0")
        files.exchange(OUT, other)
        files.exchange(OUT_NORMS, OUT_NORMS.replace("layers.1", "layers.0"))

    assert re.match(rf"layers.\d/\w+ of \w+ reads {TENSOR} of block", fault(exchange))


def test_norms_of_another_block_are_found(fault):
    found = fault(lambda files: files.exchange(OUT_NORMS, OUT_NORMS.replace("layers.1", "layers.0"), "decode"))
    assert TENSOR in found and "whose norm of columns 0 and on is" in found


def test_a_changed_table_of_levels_is_found(fault):
    def change(files):
        names = []
        files.graphs(lambda g: names.extend(t.name for t in g.initializer if list(t.dims) == [256, 2]), "decode")
        (name,) = names
        files.change(name, flip(3, 1))

    assert re.match(r"\S+ .*rows differ, row \d+ first, where \d+ of \d+ values", fault(change))


def test_norms_that_are_looked_up_by_other_indices_are_found(fault):
    """A lookup whose norms are read by other indices than its levels."""
    def change(graph):
        node = next(n for n in graph.node if n.op_type == "Gather" and n.input[0] == "norms(embedding)")
        node.input[1] = next(n for n in graph.node if n.op_type == "Gather"
                             and n.input[0] == "norms(engram.tables)").input[1]

    found = fault(lambda files: files.graphs(change, "decode"))
    assert re.match(r"the matrix embedding: its norms are read by other indices \(Gather_\d+ of decode\)", found)


def test_the_numbers_of_another_block_are_found(fault):
    """A product that reads what another block's indices and norms were made into."""
    def change(graph):
        mine, other = (next(n for n in graph.node if name in n.input) for name in (OUT, OUT.replace("1", "0", 1)))
        mine.input[0] = other.input[0]

    found = fault(lambda files: files.graphs(change, "decode"))
    assert TENSOR in found and "of block" in found
