"""Matrices of integers that a host makes floats of: the same numbers, from files of the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, Unsupported
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.targets.onnx.store import packed
from needle_export.targets.onnx.widen import Contract, unpack, widen

ROWS, COLUMNS, BLOCK = 24, 64, 32
GRAPHS = ("decode.onnx", "prefill.onnx")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("widen")
    write_sample(folder / "small.safetensors", SMALL, 3)
    out = folder / "dist"
    options = BuildOptions(
        checkpoint=str(folder / "small.safetensors"), target="onnx", out=out, weights="int4", context=64)
    pipeline.build(options, NullProgress())
    return out


@pytest.fixture(scope="module")
def widened(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contract]:
    out = tmp_path_factory.mktemp("widened")
    contract = widen(dist, out)
    (out / "weights.bin").write_bytes((dist / "weights.bin").read_bytes())
    unpack(out, contract.matrices)
    return out, contract


def one_product(folder: Path, levels: NDArray[np.uint8], scales: NDArray[np.float32], bits: int, *more: str) -> None:
    """Both graphs with one product of [T, 64] and a matrix [24, 64] of levels in blocks; ``more`` inputs follow."""
    blob = packed(levels, bits).reshape(ROWS, COLUMNS // BLOCK, -1)
    names = ["x", "b", "s", *more]
    node = helper.make_node("MatMulNBits", names, ["logits"], "product", domain="com.microsoft", K=COLUMNS, N=ROWS,
                            bits=bits, block_size=BLOCK, accuracy_level=4)
    held = [numpy_helper.from_array(blob, "b"), numpy_helper.from_array(scales, "s")]
    held += [numpy_helper.from_array(np.arange(ROWS, dtype=np.float32), name) for name in more if name == "bias"]
    held += [numpy_helper.from_array(np.full((ROWS, 1), 0x77, np.uint8), name) for name in more if name == "zero"]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, COLUMNS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [None, ROWS])], held)
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    helper.set_model_props(model, {"needle.state": "[]", "needle.context": "8", "needle.max_chunk": "4"})
    folder.mkdir()
    onnx.save(model, str(folder / "decode.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=0)
    (folder / "prefill.onnx").write_bytes((folder / "decode.onnx").read_bytes())


@pytest.mark.parametrize("biased", [False, True], ids=["alone", "with a bias"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_matrix_is_what_its_levels_and_scales_stand_for(tmp_path: Path, bits: int, biased: bool) -> None:
    rng = np.random.default_rng(bits)
    levels = rng.integers(0, 2**bits, (ROWS, COLUMNS)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (ROWS, COLUMNS // BLOCK)).astype(np.float32)
    one_product(tmp_path / "in", levels, scales, bits, *(["", "", "bias"] if biased else []))
    (tmp_path / "out").mkdir()
    contract = widen(tmp_path / "in", tmp_path / "out")
    assert (len(contract.matrices), contract.vocab, contract.context, contract.max_chunk) == (1, ROWS, 8, 4)
    (tmp_path / "out" / "weights.bin").write_bytes((tmp_path / "in" / "weights.bin").read_bytes())
    unpack(tmp_path / "out", contract.matrices)
    session = ort.InferenceSession(tmp_path / "out" / "decode.onnx", providers=["CPUExecutionProvider"])
    # By rows of the identity: a product with it is the matrix itself, to the last bit.
    found = session.run(None, {"x": np.eye(COLUMNS, dtype=np.float32)})[0]
    matrix = (levels.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales, BLOCK, 1)
    assert np.array_equal(found, matrix.T + (np.arange(ROWS, dtype=np.float32) if biased else np.float32(0)))


def test_zero_points_are_refused(tmp_path: Path) -> None:
    one_product(tmp_path / "in", np.zeros((ROWS, COLUMNS), np.uint8), np.ones((ROWS, 2), np.float32), 4, "zero")
    with pytest.raises(Unsupported, match="zero points"):
        widen(tmp_path / "in", tmp_path)


def test_a_whole_artifact_is_widened_and_runs(dist: Path, widened: tuple[Path, Contract]) -> None:
    out, contract = widened

    def products(folder: Path) -> list[int]:
        graphs = [onnx.load(str(folder / name), load_external_data=False).graph for name in GRAPHS]
        return [sum(node.op_type == "MatMulNBits" for node in graph.node) for graph in graphs]

    assert max(products(dist)) >= len(contract.matrices) > 5
    assert products(out) == [0, 0]
    runner = OnnxRunner(dist)
    assert (contract.context, contract.max_chunk, contract.vocab) == (runner.context, runner.max_chunk, runner.vocab)
    assert list(contract.state) == runner.layout
    tokens = np.random.default_rng(0).integers(0, runner.vocab, 40)
    rounded, exact = runner.feed(tokens), OnnxRunner(out).feed(tokens)
    # The kernels for processors round inputs to eight bits; nothing else may differ.
    assert 0 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()
    assert (rounded.argmax(-1) == exact.argmax(-1)).mean() > 0.85


def test_graphs_without_such_matrices_stay_as_they_are(tmp_path: Path, widened: tuple[Path, Contract]) -> None:
    again = widen(widened[0], tmp_path)
    assert again.matrices == ()
    for name in GRAPHS:
        assert (tmp_path / name).read_bytes() == (widened[0] / name).read_bytes()


@pytest.mark.parametrize("damage", [b"", b"not a graph", None], ids=["empty", "text", "missing"])
def test_a_damaged_graph_is_bad_input(dist: Path, tmp_path: Path, damage: bytes | None) -> None:
    for name in GRAPHS:
        (tmp_path / name).write_bytes((dist / name).read_bytes())
    (tmp_path / "decode.onnx").unlink()
    if damage is not None:
        (tmp_path / "decode.onnx").write_bytes(damage)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BadInput):
        widen(tmp_path, out)
