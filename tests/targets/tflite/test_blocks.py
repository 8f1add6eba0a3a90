"""4-bit matrices in blocks: what is put into a file, and that the runtime computes with it what the reference does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from needle_export.targets.base import RuntimeRefused
from needle_export.targets.constants import digest
from needle_export.targets.matrices import ReadMatrix
from needle_export.targets.tflite import legacy
from needle_export.targets.tflite.analysis import mapped, metadata, oldest_runtime, read_graph, span_of
from needle_export.targets.tflite.blocks import Packed, put_blocks, unpack
from needle_export.targets.tflite.contract import FILE_NAME
from needle_export.targets.tflite.readback import read_matrices
from needle_export.targets.tflite.target import TfliteTarget
from needle_export.weights.forms import Form
from needle_export.weights.int8 import asymmetric
from needle_export.weights.linear import dequantize_blocks, dynamic_row_blocks
from tests.support.tflite_models import FLOAT, INT, Tiny, save

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

FORM = Form("int", 4, 32, brain=True)
CARRIER = "!quant.uniform<i8:f32, 1.0>"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Blocks of very different sizes, as a scale a block is there for."""
    size = normal(rows, columns // 32, 1, seed=seed + 1).mul(2).exp()
    return (normal(rows, columns // 32, 32, seed=seed) * size).reshape(rows, columns)


def named(name: str, make: Callable[[], Any]) -> Any:
    from litert_converter.mlir import ir

    with ir.Location.name(name):
        return make()


def write(
    path: Path, matrices: dict[str, tuple[Tensor, Tensor]], body: Callable[[Tiny, dict[str, Any]], Any], rows: int
) -> Path:
    """A file of one signature with x [T, I], i [O] and these matrices, all of one shape [O, I]."""
    packed = {name: Packed.of(v.numpy(), s.numpy()) for name, (v, s) in matrices.items()}
    (outputs, inputs) = next(iter(matrices.values()))[0].shape

    def whole(t: Tiny) -> Any:
        made = {
            name: named(f"rows({name})", lambda one=one: t.constant(one.carried(), CARRIER))
            for name, one in packed.items()
        }
        return body(t, made)

    save(path, {"main": ({"x": ((rows, inputs), FLOAT), "i": ((outputs,), INT)}, whole)})
    put_blocks(path, {digest(one.carried()): one for one in packed.values()})
    return path


def product(t: Tiny, matrix: Any, rows: int, outputs: int, bias: Any = None) -> Any:
    return t.op("fully_connected", (rows, outputs), t["x"], matrix, t.absent() if bias is None else bias)


def run(path: Path, x: Tensor, outputs: int, delegate: bool = True) -> dict[str, Tensor]:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    resolver = OpResolverType.AUTO if delegate else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(str(path), num_threads=1, experimental_op_resolver_type=resolver)
    found = interpreter.get_signature_runner("main")(x=x.numpy(), i=np.arange(outputs, dtype=np.int32))
    return {name: torch.from_numpy(value.copy()) for name, value in found.items()}


def tied(path: Path, values: Tensor, scales: Tensor, rows: int, bias: Tensor | None = None) -> Path:
    """A product and a lookup with one matrix."""
    outputs, inputs = values.shape

    def body(t: Tiny, m: dict[str, Any]) -> Any:
        added = None if bias is None else t.constant(bias.numpy())
        found = t.op("embedding_lookup", (outputs, inputs), t["i"], m["a"])
        return {"y": product(t, m["a"], rows, outputs, added), "rows": found}

    return write(path, {"a": (values, scales)}, body, rows)


def misses(got: Tensor, x: Tensor, values: Tensor, scales: Tensor, want: Tensor, bias: Tensor | None = None) -> float:
    """The share of outputs further away than another order of adding up the blocks can take them.

    Every sum is off by some units in the last place of the greatest that it passes through: of blocks and the zero
    point's share, less than all of them together. One level of one input is thousands of those.
    """
    levels, step = asymmetric(x)
    share = (dequantize_blocks(values, scales).reshape(len(values), scales.shape[1], -1).sum(-1)).abs().sum(-1)
    pieces = levels.reshape(len(x), scales.shape[1], -1)
    weight = values.float().reshape(len(values), scales.shape[1], -1)
    sums = torch.einsum("tbi,obi->tob", pieces, weight).abs() * scales.float()
    # A zero point is at most 128.
    passed = (sums.sum(-1) + 128 * share) * step + (0 if bias is None else bias.abs())
    return float(((got - want).abs() > 4 * torch.finfo(torch.float32).eps * passed).float().mean())


SHAPES = [(1, 16, 32), (1, 96, 768), (5, 33, 128), (64, 96, 768), (5, 24, 3072), (1, 7, 96)]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_the_runtime_agrees(rows: int, outputs: int, inputs: int, biased: bool, tmp_path: Path) -> None:
    values, scales = FORM.quantize(uneven(outputs, inputs))
    x = normal(rows, inputs, seed=5) * normal(rows, 1, seed=6).mul(2).exp()
    bias = normal(outputs, seed=9) if biased else None
    path = tied(tmp_path / "one.tflite", values, scales, rows, bias)
    found = run(path, x, outputs)
    want = dynamic_row_blocks(x, values, scales) + (0 if bias is None else bias)
    assert misses(found["y"], x, values, scales, want, bias) == 0
    # The lookup reads the very same tensor, exactly; so does the kernel without the delegate.
    assert torch.equal(found["rows"], dequantize_blocks(values, scales))
    assert torch.equal(run(path, x, outputs, delegate=False)["rows"], dequantize_blocks(values, scales))


def test_what_else_it_could_be_does_not_fit(tmp_path: Path) -> None:
    """Nor the exact product, a scale that is off by its last digit, or a level: the bound above is worth something."""
    values, scales = FORM.quantize(uneven(96, 768))
    x = normal(5, 768, seed=5)
    got = run(tied(tmp_path / "one.tflite", values, scales, 5), x, 96)["y"]
    right = dynamic_row_blocks(x, values, scales)
    assert misses(got, x, values, scales, right) == 0
    assert misses(got, x, values, scales, x @ dequantize_blocks(values, scales).T) > 0.99
    other = scales.clone()
    other[:, 3] = (scales[:, 3].float() * (1 + 2**-7)).bfloat16().half()
    assert misses(got, x, values, scales, dynamic_row_blocks(x, values, other)) > 0.8
    moved = values.clone()
    moved[:, 100] += 1
    assert misses(got, x, values, scales, dynamic_row_blocks(x, moved, scales)) > 0.5


def test_the_kernel_keeps_scales_as_bfloat16(tmp_path: Path) -> None:
    """Which is why they are rounded so: a scale with more digits is another one in the product, not in the lookup."""
    values, _ = FORM.quantize(uneven(32, 64))
    fine = (normal(32, 2, seed=3).abs() + 1).half()
    short = fine.bfloat16().half()
    assert (fine != short).float().mean() > 0.7
    x = normal(3, 64, seed=5)
    found = run(tied(tmp_path / "one.tflite", values, fine, 3), x, 32)
    assert misses(found["y"], x, values, short, dynamic_row_blocks(x, values, short)) == 0
    assert torch.equal(found["rows"], dequantize_blocks(values, fine))
    with pytest.raises(ValueError, match="more digits than bfloat16"):
        dynamic_row_blocks(x, values, fine)


def test_rows_of_zeros_and_of_one_sign(tmp_path: Path) -> None:
    weight = uneven(20, 96)
    weight[3], weight[4, 32:64] = 0, 0
    values, scales = FORM.quantize(weight)
    usual = normal(96, seed=11)
    x = torch.stack([torch.zeros(96), usual.abs() + 1, -usual.abs() - 1, torch.full((96,), 3.0), usual * 1e-20])
    got = run(tied(tmp_path / "one.tflite", values, scales, 5), x, 20)["y"]
    want = dynamic_row_blocks(x, values, scales)
    assert misses(got, x, values, scales, want) == 0
    # Of a row of zeros the kernel takes the zero point's share off again, which leaves last bits of it.
    assert not want[0].any() and not got[:, 3].any() and not want[:, 3].any()


def test_nibbles_come_back() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 4).numpy()
    packed = Packed.of(values, np.ones((3, 2), np.float16))
    assert packed.levels.shape == (3, 32) and packed.levels[0, 0] == 0x98
    assert (unpack(packed.levels) == values).all()


def test_scales_alone_make_another_matrix(tmp_path: Path) -> None:
    """Equal levels are stored once, under whichever scales."""
    values, scales = FORM.quantize(uneven(32, 64))
    double = (scales * 2).half()
    x = normal(1, 64, seed=5)

    def body(t: Tiny, m: dict[str, Any]) -> Any:
        return {name: product(t, one, 1, 32) for name, one in m.items()}

    path = write(tmp_path / "two.tflite", {"a": (values, scales), "b": (values, double)}, body, 1)
    found = run(path, x, 32)
    assert torch.equal(found["b"], found["a"] * 2) and found["a"].any()
    spans = [(t.buffer, t.shape) for t in read_graph(path)[0].tensors if t.dtype == "int4"]
    assert len(spans) == 2 and len(set(spans)) == 1


def test_the_file_says_what_it_takes(tmp_path: Path) -> None:
    values, scales = FORM.quantize(uneven(32, 64))

    def body(t: Tiny, m: dict[str, Any]) -> Any:
        plain = t.op("fully_connected", (1, 32), t["x"], t.constant(normal(32, 64).numpy()), t.absent())
        found = t.op("embedding_lookup", (32, 64), t["i"], m["a"])
        return {"y": t.op("add", (1, 32), product(t, m["a"], 1, 32), plain), "rows": found}

    path = write(tmp_path / "one.tflite", {"a": (values, scales)}, body, 1)
    (graph,) = read_graph(path)
    versions = {(op.name, op.version, graph.tensors[op.inputs[1]].dtype) for op in graph.ops}
    assert ("FULLY_CONNECTED", 13, "int4") in versions and ("EMBEDDING_LOOKUP", 4, "int4") in versions
    # Another product keeps the version that it had.
    assert ("FULLY_CONNECTED", 5, "float32") in versions
    assert oldest_runtime(path) == "2.18.0" and metadata(path, "nothing") is None
    matrix = next(t for t in graph.tensors if t.dtype == "int4")
    assert (matrix.quantized, matrix.bytes) == ("blockwise", 32 * 32)
    with mapped(path) as (data, model):
        starts = [span_of(data, model.Buffers(i)) for i in range(model.BuffersLength())]
    assert all(start % 16 == 0 for start, size in starts if size)


def test_the_older_runtime_is_not_even_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by a build, and not by whoever opens the file there anyway."""
    values, scales = FORM.quantize(uneven(32, 64))
    path = tied(tmp_path / FILE_NAME, values, scales, 1)
    monkeypatch.setattr(legacy, "find_legacy_python", lambda: Path(sys.executable))
    monkeypatch.setattr(legacy, "_read_contract", lambda path: {"context": 8, "buckets": []})
    monkeypatch.setattr(legacy.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    (other,) = TfliteTarget().other_runtimes(tmp_path)
    assert other.open is None and other.reason.startswith("not tried: it has no kernel for 4-bit matrices in blocks")
    with pytest.raises(RuntimeRefused, match=r"^was not tried: it has no kernel for 4-bit matrices"):
        legacy.LegacyRunner(path, Path(sys.executable))


# Read back


def read(path: Path) -> list[ReadMatrix]:
    return sorted(read_matrices(path), key=lambda m: str(m.claim))


def test_it_is_read_back_through_the_graph(tmp_path: Path) -> None:
    values, scales = FORM.quantize(uneven(32, 64))
    others = FORM.quantize(uneven(32, 64, seed=7))
    factor = normal(32, seed=2)

    def body(t: Tiny, m: dict[str, Any]) -> Any:
        scaled = t.op("mul", (1, 32), product(t, m["a"], 1, 32), t.constant(factor.numpy()))
        return {"y": scaled, "rows": t.op("embedding_lookup", (32, 64), t["i"], m["b"])}

    first, second = read(write(tmp_path / "two.tflite", {"a": (values, scales), "b": others}, body, 1))
    assert not first.fault and not second.fault and first.bits == second.bits == 4
    for matrix, (levels, own) in ((first, (values, scales)), (second, others)):
        assert (matrix.values == levels.numpy()).all() and matrix.scales is not None
        assert matrix.scales.dtype == np.float32 and (matrix.scales == own.float().numpy()).all()
    assert first.behind is not None and (first.behind == factor.numpy()).all() and second.behind is None
    # 64 values, two scales, and a factor behind the first.
    assert (first.row_bytes(True), second.row_bytes(False)) == (32 + 4 + 4, 32 + 4)


def test_another_form_of_quantisation_is_a_fault(tmp_path: Path) -> None:
    values, scales = FORM.quantize(uneven(32, 64))
    path = tied(tmp_path / "one.tflite", values, scales, 1)
    with mapped(path) as (_, model):
        graph = model.Subgraphs(0)
        tensors = (graph.Tensors(i) for i in range(graph.TensorsLength()))
        own = next(t for t in tensors if t.Name() == b"rows(a)").Quantization()
        details = own.Details()
        place = details.Pos + details.Offset(8)
    with path.open("r+b") as file:
        file.seek(place)
        assert int.from_bytes(file.read(4), "little") == 32
        file.seek(place)
        file.write((64).to_bytes(4, "little"))
    matrices = read(path)
    assert matrices and all("no half-precision scale for every 32 columns" in m.fault for m in matrices)
