"""The lint for GPU delegates: each rule is broken by one small model, and by that one alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.targets.tflite.analysis import Graph, Op, TensorInfo, read_graph
from needle_export.targets.tflite.gpu_rules import PARSED, RULES
from needle_export.targets.tflite.lint import Finding, lint
from tests.support.tflite_models import BOOL, FLOAT, INT, INT64, Body, Inputs, Tiny, save

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")


def findings(folder: Path, inputs: Inputs, body: Body) -> dict[tuple[str, str], Finding]:
    graph = read_graph(save(folder / "m.tflite", {"decode": (inputs, body)}))[0]
    return {(f.rule, f.op): f for f in lint(graph)}


def floats(**shapes: tuple[int, ...]) -> Inputs:
    return {name: (shape, FLOAT) for name, shape in shapes.items()}


def array(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def one(name: str, shape: tuple[int, ...], *inputs: str, dtype: str = FLOAT) -> Body:
    """A model of one op of the named inputs."""

    def body(t: Tiny) -> Mapping[str, Any]:
        return {"y": t.op(name, shape, *(t[i] for i in inputs), dtype=dtype)}

    return body


def with_constant(
    name: str, shape: tuple[int, ...], constant: Any, *, first: bool = False, quantized: str = ""
) -> Body:
    """A model of one op of the input "x" and a constant."""

    def body(t: Tiny) -> Mapping[str, Any]:
        pair = [t["x"], t.constant(constant, quantized)]
        more = [t.absent()] if name == "fully_connected" else []
        return {"y": t.op(name, shape, *(reversed(pair) if first else pair), *more)}

    return body


def strided(shape: tuple[int, ...], rank: int) -> Body:
    """The first row of "x", as a row or with its dimension."""
    masks = (
        "{begin_mask = 0 : i32, end_mask = 6 : i32, ellipsis_mask = 0 : i32, new_axis_mask = 0 : i32,"
        f" shrink_axis_mask = {int(len(shape) < rank)} : i32, offset = false}}"
    )

    def body(t: Tiny) -> Mapping[str, Any]:
        begin, end, step = (np.full(rank, value, np.int32) for value in (0, 1, 1))
        places = [t.constant(value) for value in (begin, end, step)]
        return {"y": t.op("strided_slice", shape, t["x"], *places, attributes=masks)}

    return body


def sliced(shape: tuple[int, ...], rank: int) -> Body:
    def body(t: Tiny) -> Mapping[str, Any]:
        begin, size = t.constant(np.zeros(rank, np.int32)), t.constant(np.array(shape, np.int32))
        return {"y": t.op("slice", shape, t["x"], begin, size)}

    return body


def compared(t: Tiny) -> Mapping[str, Any]:
    shape = t["x"].type.shape
    less = t.op("less", shape, t["x"], t["z"], dtype=BOOL)
    return {"y": t.op("select_v2", shape, less, t["x"], t["z"])}


def packed(t: Tiny) -> Mapping[str, Any]:
    weight = t.constant(np.ones((3, 4), np.int8), "!quant.uniform<i4:f32, 0.5>")
    return {"y": t.op("fully_connected", (2, 3), t["x"], weight, t.absent())}


def turned(t: Tiny) -> Mapping[str, Any]:
    return {"y": t.op("batch_matmul", (1, 3, 5), t["x"], t["z"], attributes="{adj_x = false, adj_y = true}")}


def masked(t: Tiny) -> Mapping[str, Any]:
    scores = t.op("batch_matmul", (1, 2, 3, 3), t["x"], t["z"])
    scaled = t.op("mul", (1, 2, 3, 3), scores, t.constant(np.float32(0.5)))
    return {"y": t.op("add", (1, 2, 3, 3), scaled, t["m"])}


def test_a_plain_graph_breaks_nothing(tmp_path: Path) -> None:
    def body(t: Tiny) -> Mapping[str, Any]:
        weight = t.constant(array(4, 4))
        h = t.op("fully_connected", (2, 4), t["x"], weight, t.absent())
        h = t.op("mul", (2, 4), h, t.op("logistic", (2, 4), h))
        return {"y": t.op("softmax", (2, 4), t.op("add", (2, 4), h, t["x"]))}

    assert findings(tmp_path, floats(x=(2, 4)), body) == {}


#: Rule, op, and a model that breaks it beside one that doesn't: (inputs, body) each.
CASES = {
    ("dimensions", "ADD"): [
        (floats(x=(1, 1, 2, 2, 2)), one("add", (1, 1, 2, 2, 2), "x", "x")),
        (floats(x=(1, 2, 2, 2)), one("add", (1, 2, 2, 2), "x", "x")),
    ],
    ("types", "ADD"): [
        ({"x": ((4,), INT64)}, one("add", (4,), "x", "x", dtype=INT64)),
        (floats(x=(4,)), one("add", (4,), "x", "x")),
    ],
    ("types", "MAXIMUM"): [
        ({"x": ((4,), INT), "z": ((4,), INT)}, one("maximum", (4,), "x", "z", dtype=INT)),
        ({"x": ((4,), BOOL), "z": ((4,), BOOL)}, one("logical_and", (4,), "x", "z", dtype=BOOL)),
    ],
    ("unsupported op", "GATHER_ND"): [
        ({"x": ((2, 4), FLOAT), "i": ((2, 1), INT)}, one("gather_nd", (2, 4), "x", "i")),
        ({"x": ((2, 4), FLOAT), "i": ((2,), INT)}, one("gather", (2, 4), "x", "i")),
    ],
    ("unsupported op", "BROADCAST_TO"): [
        (floats(x=(1, 4)), with_constant("broadcast_to", (2, 4), np.array([2, 4], np.int32))),
        (floats(x=(1, 4)), with_constant("add", (2, 4), array(2, 4))),
    ],
    ("unsupported op", "EMBEDDING_LOOKUP"): [
        ({"x": ((2,), INT)}, with_constant("embedding_lookup", (2, 4), array(8, 4))),
        ({"x": ((2, 4), FLOAT)}, with_constant("fully_connected", (2, 8), array(8, 4))),
    ],
    ("gather indices", "GATHER"): [
        ({"x": ((4,), FLOAT), "i": ((2, 2), INT)}, one("gather", (2, 2), "x", "i")),
        ({"x": ((4,), FLOAT), "i": ((2,), INT)}, one("gather", (2,), "x", "i")),
    ],
    ("gather table", "GATHER"): [
        ({"x": ((2,), INT)}, with_constant("gather", (2, 4), array(8, 4), first=True)),
        ({"x": ((8, 4), FLOAT), "i": ((2,), INT)}, one("gather", (2, 4), "x", "i")),
    ],
    ("slice masks", "STRIDED_SLICE"): [
        (floats(x=(2, 3, 4)), strided((3, 4), 3)),
        (floats(x=(2, 3, 4)), strided((1, 3, 4), 3)),
    ],
    ("slice rank", "SLICE"): [
        (floats(x=(4, 4)), sliced((2, 4), 2)),
        (floats(x=(4, 4, 4)), sliced((2, 4, 4), 3)),
    ],
    ("reduction axes", "SUM"): [
        ({"x": ((2, 4), FLOAT), "a": ((1,), INT)}, one("sum", (2, 1), "x", "a")),
        (floats(x=(2, 4)), with_constant("sum", (2, 1), np.array([1], np.int32))),
    ],
    ("broadcast", "ADD"): [
        (floats(x=(2, 3, 4), z=(3, 4)), one("add", (2, 3, 4), "x", "z")),
        (floats(x=(2, 3, 4), z=(4,)), one("add", (2, 3, 4), "x", "z")),
    ],
    ("mixed ranks", "MUL"): [
        (floats(x=(1, 2, 3, 4), z=(2, 3, 4)), one("mul", (1, 2, 3, 4), "x", "z")),
        (floats(x=(1, 2, 3, 4), z=(1, 2, 3, 4)), one("mul", (1, 2, 3, 4), "x", "z")),
    ],
    ("same input twice", "DIV"): [
        (floats(x=(2, 4)), one("div", (2, 4), "x", "x")),
        (floats(x=(2, 4), z=(2, 4)), one("div", (2, 4), "x", "z")),
    ],
    ("scalar", "ADD"): [
        (floats(x=(), z=(4,)), one("add", (4,), "x", "z")),
        (floats(x=(4,)), with_constant("add", (4,), np.float32(2.0))),
    ],
    ("constant matrix", "BATCH_MATMUL"): [
        (floats(x=(1, 4, 2)), with_constant("batch_matmul", (1, 3, 2), array(1, 3, 4), first=True)),
        (floats(x=(1, 3, 4)), with_constant("batch_matmul", (1, 3, 2), array(4, 2))),
    ],
    ("heads as batch", "BATCH_MATMUL"): [
        (floats(x=(2, 3, 4), z=(2, 4, 5)), one("batch_matmul", (2, 3, 5), "x", "z")),
        (floats(x=(1, 3, 4), z=(1, 4, 5)), one("batch_matmul", (1, 3, 5), "x", "z")),
    ],
    ("linear inputs", "FULLY_CONNECTED"): [
        (floats(x=(3, 4)), with_constant("fully_connected", (2, 3), array(2, 4), first=True)),
        (floats(x=(2, 4)), with_constant("fully_connected", (2, 3), array(3, 4))),
    ],
    ("expanded weights", "FULLY_CONNECTED"): [
        (
            floats(x=(2, 4)),
            with_constant("fully_connected", (2, 3), np.ones((3, 4), np.int8), quantized="!quant.uniform<i8:f32, 0.5>"),
        ),
        (floats(x=(2, 4)), with_constant("fully_connected", (2, 3), array(3, 4))),
    ],
    ("joined constant", "CONCATENATION"): [
        (floats(x=(2, 4)), with_constant("concatenation", (4, 4), array(2, 4))),
        (floats(x=(1, 1, 2, 4)), with_constant("concatenation", (2, 1, 2, 4), array(1, 1, 2, 4))),
    ],
    ("constant batch", "MUL"): [
        (floats(x=(2, 1, 2, 4)), with_constant("mul", (2, 1, 2, 4), array(2, 1, 2, 4))),
        (floats(x=(2, 1, 2, 4)), with_constant("mul", (2, 1, 2, 4), array(1, 1, 2, 4))),
    ],
    ("sum in half", "SUM"): [
        (floats(x=(2, 4)), with_constant("sum", (2, 1), np.array([1], np.int32))),
        (floats(x=(2, 4)), one("square", (2, 4), "x")),
    ],
    ("comparison", "LESS"): [
        (floats(x=(4,), z=(4,)), one("less", (4,), "x", "z", dtype=BOOL)),
        (floats(x=(4,), z=(4,)), compared),
    ],
    ("select shapes", "SELECT_V2"): [
        (floats(x=(2, 4), z=(2, 4)), compared),
        (floats(x=(1, 2, 4), z=(1, 2, 4)), compared),
    ],
    ("paddings", "PAD"): [
        (floats(x=(2, 4)), with_constant("pad", (2, 5), np.array([[0, 0], [1, 0]], np.int32))),
        (floats(x=(1, 2, 4)), with_constant("pad", (1, 2, 5), np.array([[0, 0], [0, 0], [1, 0]], np.int32))),
    ],
    ("packed weights", "FULLY_CONNECTED"): [
        (floats(x=(2, 4)), packed),
        (floats(x=(2, 4)), with_constant("fully_connected", (2, 3), array(3, 4))),
    ],
    ("transposed matmul", "BATCH_MATMUL"): [
        (floats(x=(1, 3, 4), z=(1, 5, 4)), turned),
        (floats(x=(1, 3, 4), z=(1, 4, 5)), one("batch_matmul", (1, 3, 5), "x", "z")),
    ],
    ("masked scores", "ADD"): [
        (floats(x=(1, 2, 3, 4), z=(1, 2, 4, 3), m=(1, 1, 3, 3)), masked),
        (floats(x=(1, 2, 3, 4), z=(1, 2, 4, 3), m=(1, 2, 3, 3)), masked),
    ],
}
RULE_CASES = [pytest.param(key, *pair, id=" of ".join(key)) for key, pair in CASES.items()]


@pytest.mark.parametrize(("key", "breaks", "keeps"), RULE_CASES)
def test_a_rule_sees_its_model_alone(
    key: tuple[str, str], breaks: tuple[Inputs, Body], keeps: tuple[Inputs, Body], tmp_path: Path
) -> None:
    found = findings(tmp_path, *breaks)
    assert found[key].count == 1
    assert key[0] not in {rule for rule, _ in findings(tmp_path, *keeps)}


def test_every_rule_has_a_model() -> None:
    assert {rule.name for rule in RULES} <= {rule for rule, _ in CASES}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_every_finding_has_a_public_source(tmp_path: Path) -> None:
    for breaks, _ in CASES.values():
        for finding in findings(tmp_path, *breaks).values():
            assert finding.source.startswith(("google-ai-edge/LiteRT: ", "tensorflow/tensorflow: ")), finding
            assert finding.why and finding.count > 0


def test_the_ops_that_are_parsed_exist() -> None:
    from ai_edge_litert import schema_py_generated as schema

    assert not [op for op in PARSED if not op.startswith("CUSTOM:") and not hasattr(schema.BuiltinOperator, op)]


def test_ops_of_a_kind_are_counted_together(tmp_path: Path) -> None:
    def body(t: Tiny) -> Mapping[str, Any]:
        h = t.op("div", (2, 4), t["x"], t["x"])
        return {"y": t.op("div", (2, 4), h, h)}

    assert findings(tmp_path, floats(x=(2, 4)), body)["same input twice", "DIV"].count == 2


def test_refused_ops_between_others_are_counted_as_cuts(tmp_path: Path) -> None:
    ids = {"x": ((2, 4), FLOAT), "i": ((2, 1), INT)}

    def middle(t: Tiny) -> Mapping[str, Any]:
        h = t.op("gather_nd", (2, 4), t.op("square", (2, 4), t["x"]), t["i"])
        return {"y": t.op("square", (2, 4), h)}

    def edge(t: Tiny) -> Mapping[str, Any]:
        return {"y": t.op("square", (2, 4), t.op("gather_nd", (2, 4), t["x"], t["i"]))}

    def taken(t: Tiny) -> Mapping[str, Any]:
        h = t.op("square", (2, 4), t["x"])
        return {"y": t.op("square", (2, 4), t.op("div", (2, 4), h, h))}

    assert findings(tmp_path, ids, middle)["partitions", ""].count == 1
    assert ("partitions", "") not in findings(tmp_path, ids, edge)
    # Broken too, but the delegate takes it.
    assert set(findings(tmp_path, floats(x=(2, 4)), taken)) == {("same input twice", "DIV")}


def test_sizes_known_at_run_time_refuse_the_whole_graph(tmp_path: Path) -> None:
    def body(t: Tiny) -> Mapping[str, Any]:
        return {"y": t.op("square", ("?", 4), t["x"])}

    assert findings(tmp_path, {"x": (("?", 4), FLOAT)}, body)["dynamic shapes", ""].count == 2
    assert findings(tmp_path, floats(x=(2, 4)), one("square", (2, 4), "x")) == {}


def test_half_precision_weights_are_constants(tmp_path: Path) -> None:
    """The delegate reads a float16 constant through its DEQUANTIZE."""

    def body(t: Tiny) -> Mapping[str, Any]:
        half = t.constant(array(1, 3, 4).astype(np.float16))
        return {"y": t.op("batch_matmul", (1, 3, 2), t.op("dequantize", (1, 3, 4), half), t["x"])}

    assert set(findings(tmp_path, floats(x=(1, 4, 2)), body)) == {("constant matrix", "BATCH_MATMUL")}


def test_a_version_beyond_the_delegates_is_refused() -> None:
    tensor = TensorInfo("x", (4,), "float32", 0, False, 16, "")
    graph = Graph("decode", (Op("TANH", 2, (0,), (1,)),), (tensor, tensor), {"x": 0}, {"y": 1})
    assert lint(graph) == ()
    newer = replace(graph, ops=(replace(graph.ops[0], version=3),))
    assert [(f.rule, f.op) for f in lint(newer)] == [("op version", "TANH")]
