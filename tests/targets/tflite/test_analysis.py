"""Reading .tflite files, and where XNNPACK cuts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.errors import BadInput
from needle_export.targets.tflite.analysis import (
    LeftOp,
    Op,
    Partitions,
    between,
    buffer_bytes,
    count_ops,
    cut,
    metadata,
    oldest_runtime,
    partitions,
    read_graph,
)
from tests.support.tflite_models import FLOAT, INT, Tiny, save

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

PER_CHANNEL = "!quant.uniform<i8<-127:127>:f32:0, {0.5,0.25,0.125}>"
PER_TENSOR = "!quant.uniform<i8:f32, 0.5>"


def straight(t: Tiny) -> Mapping[str, Any]:
    return {"y": t.op("add", (2, 4), t["x"], t["x"])}


def gathered(t: Tiny) -> Mapping[str, Any]:
    a = t.op("add", (2, 4), t["x"], t["x"])
    g = t.op("gather", (2, 4), a, t["i"])
    return {"y": t.op("mul", (2, 4), t.op("add", (2, 4), g, g), g)}


def embedded(t: Tiny) -> Mapping[str, Any]:
    table = t.constant(np.ones((8, 4), np.float32))
    e = t.op("embedding_lookup", (2, 4), t["i"], table)
    return {"y": t.op("add", (2, 4), e, t["x"])}


INPUTS = {"x": ((2, 4), FLOAT), "i": ((2,), INT)}
ONE = {"x": ((2, 4), FLOAT)}


def test_a_graph_reads_as_it_was_built(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (INPUTS, gathered), "prefill_4": (ONE, straight)})
    decode, prefill = read_graph(path)
    assert (decode.name, prefill.name) == ("decode", "prefill_4")
    assert [op.name for op in decode.ops] == ["ADD", "GATHER", "ADD", "MUL"]
    assert [op.name for op in prefill.ops] == ["ADD"]
    assert all(op.version >= 1 for op in decode.ops)
    add, gather, *_ = decode.ops
    assert add.inputs == (decode.inputs["x"],) * 2
    assert gather.inputs == (add.outputs[0], decode.inputs["i"])
    assert decode.outputs == {"y": decode.ops[-1].outputs[0]}
    x, i = (decode.tensors[decode.inputs[name]] for name in ("x", "i"))
    assert (x.shape, x.dtype, x.constant, x.bytes, x.quantized) == ((2, 4), "float32", False, 32, "")
    assert (i.shape, i.dtype) == ((2,), "int32")


def test_ops_are_counted_most_frequent_first(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (INPUTS, gathered)})
    assert list(count_ops(read_graph(path)[0]).items()) == [("ADD", 2), ("GATHER", 1), ("MUL", 1)]


def test_constants_say_how_they_are_stored(tmp_path: Path) -> None:
    def body(t: Tiny) -> Mapping[str, Any]:
        rows = np.arange(12, dtype=np.int8).reshape(3, 4)
        out = {}
        for name, weight in {
            "float": t.constant(np.ones((3, 4), np.float32)),
            "channel": t.constant(rows, PER_CHANNEL),
            "tensor": t.constant(rows + 1, PER_TENSOR),
        }.items():
            out[name] = t.op("fully_connected", (2, 3), t["x"], weight, t.absent())
        return out

    graph = read_graph(save(tmp_path / "m.tflite", {"decode": (ONE, body)}))[0]
    weights = [graph.tensors[op.inputs[1]] for op in graph.ops]
    assert [(w.dtype, w.quantized, w.bytes, w.constant) for w in weights] == [
        ("float32", "", 48, True),
        ("int8", "per channel", 12, True),
        ("int8", "per tensor", 12, True),
    ]
    assert all(op.inputs[2] == -1 for op in graph.ops)


def test_a_size_known_at_run_time_alone_is_minus_one(tmp_path: Path) -> None:
    def body(t: Tiny) -> Mapping[str, Any]:
        return {"y": t.op("add", ("?", 4), t["x"], t["x"])}

    graph = read_graph(save(tmp_path / "m.tflite", {"decode": ({"x": (("?", 4), FLOAT)}, body)}))[0]
    tensor = graph.tensors[graph.inputs["x"]]
    assert (tensor.shape, tensor.bytes) == ((-1, 4), 0)


def test_shared_constants_count_once(tmp_path: Path) -> None:
    """Two signatures over one table: the file holds it once, and so does the sum."""

    def body(t: Tiny) -> Mapping[str, Any]:
        table = t.constant(np.arange(4096, dtype=np.float32).reshape(1024, 4))
        return {"y": t.op("embedding_lookup", (2, 4), t["i"], table)}

    ids = {"i": ((2,), INT)}
    path = save(tmp_path / "m.tflite", {"decode": (ids, body), "prefill": (ids, body)}, {"k": "x" * 9999})
    one, two = (graph.tensors[graph.ops[0].inputs[1]] for graph in read_graph(path))
    assert one.buffer == two.buffer
    assert buffer_bytes(path) == (16384, path.stat().st_size)


def test_metadata_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (ONE, straight)}, {"needle.contract": '{"größe": 1}'})
    assert metadata(path, "needle.contract") == '{"größe": 1}'
    assert metadata(path, "needle") is None


def test_the_oldest_runtime_is_the_exporters(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (INPUTS, embedded)})
    version = oldest_runtime(path)
    assert version is not None
    assert [part.isdigit() for part in version.split(".")] == [True] * 3


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (INPUTS, embedded)})
    with pytest.raises(BadInput, match="can't be read"):
        read_graph(tmp_path / "none.tflite")
    for content in (b"", b"PK\3\4 and more"):
        (tmp_path / "foreign").write_bytes(content)
        with pytest.raises(BadInput, match="isn't a TFLite model"):
            read_graph(tmp_path / "foreign")
    whole = path.read_bytes()
    (tmp_path / "short").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="cut short"):
        read_graph(tmp_path / "short")
    with pytest.raises(BadInput, match=r"no signature 'prefill'.*it has: decode"):
        partitions(path, "prefill")


# Where XNNPACK cuts


def test_a_gather_between_two_sums_cuts(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (INPUTS, gathered)})
    assert partitions(path, "decode") == Partitions(2, 3, (LeftOp("GATHER", 1, 1),))


def test_a_lookup_before_everything_cuts_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (INPUTS, embedded)})
    assert partitions(path, "decode") == Partitions(1, 1, (LeftOp("EMBEDDING_LOOKUP", 1, 0),))


def test_every_signature_is_counted_on_its_own(tmp_path: Path) -> None:
    bodies = {"first": (INPUTS, gathered), "second": (INPUTS, embedded), "third": (ONE, straight)}
    path = save(tmp_path / "m.tflite", bodies)
    before = path.read_bytes()
    assert [partitions(path, name).count for name in bodies] == [2, 1, 1]
    assert [len(partitions(path, name).left) for name in bodies] == [1, 1, 0]
    turned = save(tmp_path / "t.tflite", dict(reversed(bodies.items())))
    assert [partitions(turned, name) for name in bodies] == [partitions(path, name) for name in bodies]
    assert path.read_bytes() == before


def test_holes_for_large_weights_change_no_cut(tmp_path: Path) -> None:
    def body(t: Tiny) -> Mapping[str, Any]:
        weight = t.constant(np.ones((4, 32768), np.float32))
        wide = t.op("fully_connected", (2, 4), t["w"], weight, t.absent())
        g = t.op("gather", (2, 4), wide, t["i"])
        # A small constant that the op's preparation reads.
        turn = t.constant(np.array([1, 0], np.int32))
        return {"y": t.op("transpose", (4, 2), g, turn)}

    inputs = {"w": ((2, 32768), FLOAT), "i": ((2,), INT)}
    path = save(tmp_path / "m.tflite", {"decode": (inputs, body), "prefill": (inputs, body)})
    assert partitions(path, "prefill") == partitions(path, "decode")
    assert partitions(path, "decode").count == 2


def node(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
    return Op(name, 0, inputs, outputs)


def test_a_partition_is_what_its_outputs_reach_within_its_inputs() -> None:
    nodes = [
        node("A", (0,), (1,)),
        node("L", (1,), (2,)),
        node("M", (2,), (3,)),
        node("A", (3, 1), (4,)),
        node("N", (4,), (5,)),
        node("DELEGATE", (0,), (1,)),
        node("DELEGATE", (3, 1), (4,)),
    ]
    # L and M both stand between the two; N comes after the last.
    assert cut(nodes) == Partitions(2, 2, (LeftOp("L", 1, 1), LeftOp("M", 1, 1), LeftOp("N", 1, 0)))


def test_without_a_delegate_everything_is_left() -> None:
    assert cut([node("A", (0,), (1,)), node("A", (1,), (2,))]) == Partitions(0, 0, (LeftOp("A", 2, 0),))


def test_absent_inputs_join_nothing() -> None:
    ops = [node("A", (0, -1), (1,)), node("L", (2, -1), (3,)), node("A", (4, -1), (5,))]
    assert between(ops, {0, 2}) == frozenset()
    ops = [node("A", (0,), (1,)), node("L", (1,), (2,)), node("A", (2,), (3,))]
    assert between(ops, {0, 2}) == {1}
    assert between(ops, {0}) == between(ops, {2}) == frozenset()


def test_reading_loads_no_interpreter(tmp_path: Path) -> None:
    path = save(tmp_path / "m.tflite", {"decode": (ONE, straight)})
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from needle_export.targets.tflite import analysis, lint\n"
        "heavy = ('ai_edge_litert', 'flatbuffers', 'torch')\n"
        "assert not [m for m in heavy if m in sys.modules]\n"
        f"lint.lint(analysis.read_graph(Path({str(path)!r}))[0])\n"
        "assert not [m for m in ('ai_edge_litert.interpreter', 'torch') if m in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
