"""Matrices are read out of a file through its graphs: which op reads them, and what multiplies behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.errors import BadInput
from needle_export.targets.claims import parse_name, tensor_name
from needle_export.targets.matrices import ReadMatrix, RowsOf
from needle_export.targets.tflite.readback import read_matrices
from tests.support.tflite_models import FLOAT, INT, Tiny, save

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

VALUES = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
OTHERS = VALUES[::-1].copy()
SCALES = np.array([0.5, 0.25, 2, 1], np.float32)
BARE = "!quant.uniform<i8<-127:127>:f32, 1.0>"
INPUTS = {"x": ((1, 4), FLOAT), "i": ((1,), INT)}


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("layers.3.attention.out_proj", RowsOf(("layers.3.attention.out_proj",))),
        ("layers.3.a.q+k+v[0:416]", RowsOf(("layers.3.a.q", "layers.3.a.k", "layers.3.a.v"), -1, 0, 416)),
        ("layers.3.a.q+k[416:672]", RowsOf(("layers.3.a.q", "layers.3.a.k"), -1, 416, 672)),
        ("embedding[:200]", RowsOf(("embedding",), -1, 0, 200)),
        ("engram.key_proj+value_proj[96:192].1", RowsOf(("engram.key_proj", "engram.value_proj"), 1, 96, 192)),
        ("engram.key_proj.0", RowsOf(("engram.key_proj",), 0)),
        ("layers.0.mlp.w1b", RowsOf(("layers.0.mlp.w1b",))),
        ("layers.0.mlp.w1a[:,:24]", RowsOf(("layers.0.mlp.w1a",), columns=24)),
        ("layers.3.a.q.scale+k.scale", RowsOf(("layers.3.a.q.scale", "layers.3.a.k.scale"))),
        ("one+other", RowsOf(("one", "other"))),
    ],
)
def test_a_name_says_whose_rows_lie_there(name: str, claim: RowsOf) -> None:
    for folded in (False, True):
        assert parse_name(tensor_name(name, folded)) == (claim, folded)
        # As the converter calls a second tensor of that name.
        assert parse_name(f"{tensor_name(name, folded)}17") == (claim, folded)


@pytest.mark.parametrize("name", ["", "rows", "rows()", "arith.constant5", "x rows(a)", "rows(a) b", "stream_03_12"])
def test_other_names_say_nothing(name: str) -> None:
    assert parse_name(name) is None


def test_a_claim_in_words() -> None:
    assert str(RowsOf(("a.x", "a.y"), 1, 96, 192)) == "a.x + a.y, site 1, rows 96 to 192"
    assert str(RowsOf(("a.x",), columns=24)) == "a.x, columns 0 to 24"
    assert str(RowsOf(("a.x",))) == "a.x"


def named(name: str, make: Callable[[], Any]) -> Any:
    from litert_converter.mlir import ir

    with ir.Location.name(name):
        return make()


def product(t: Tiny, weight: Any, x: Any = None, rows: int = 4) -> Any:
    return t.op("fully_connected", (1, rows), t["x"] if x is None else x, weight, t.absent())


def read(body: Callable[[Tiny], Any], folder: Path) -> list[ReadMatrix]:
    """What is read of a file with one signature, whose result is ``y``."""
    path = folder / "one.tflite"
    save(path, {"decode": (INPUTS, lambda t: {"y": body(t), "again": t.op("add", (1,), t["i"], t["i"], dtype=INT)})})
    return list(read_matrices(path))


def test_a_product_and_a_lookup_with_their_scales(tmp_path: Path) -> None:
    def body(t: Tiny) -> Any:
        one = named("rows(layers.1.out)", lambda: t.constant(VALUES, BARE))
        scaled = t.op("mul", (1, 4), named("layers.1/matmul_4", lambda: product(t, one)), t.constant(SCALES))
        table = named("rows(table)", lambda: t.constant(OTHERS, BARE))
        rows = t.op("embedding_lookup", (1, 4), t["i"], table)
        factors = t.op("embedding_lookup", (1, 1), t["i"], t.constant(SCALES[::-1].reshape(4, 1).copy()))
        return t.op("add", (1, 4), scaled, t.op("mul", (1, 4), rows, factors))

    first, second = sorted(read(body, tmp_path), key=lambda m: str(m.claim))
    assert (first.claim, first.folded, first.fault) == (RowsOf(("layers.1.out",)), False, "")
    assert first.values.dtype == np.int8 and (first.values == VALUES).all()
    assert first.scales is not None and (first.scales == SCALES).all()
    (place,) = first.places
    assert place.name.startswith("layers.1/matmul_4") and place.name.endswith(" of decode") and place.block == 1
    assert second.claim == RowsOf(("table",)) and (second.values == OTHERS).all()
    assert second.scales is not None and (second.scales == SCALES[::-1]).all()
    assert [p.block for p in second.places] == [-1]


def scaled(t: Tiny, result: Any, factor: Any = SCALES) -> Any:
    return t.op("mul", (1, 4), result, t.constant(factor))


#: What is wrong with a file, and what is said of it.
FAULTS: dict[str, tuple[Callable[[Tiny, Any], Any], str]] = {
    "nothing behind": (lambda t, w: product(t, w), "no MUL"),
    "another op behind": (lambda t, w: t.op("add", (1, 4), product(t, w), t.constant(SCALES)), "no MUL"),
    "one scale for all": (lambda t, w: scaled(t, product(t, w), np.float32([3])), "no MUL"),
    "scales of a computed value": (lambda t, w: t.op("mul", (1, 4), product(t, w), t["x"]), "no MUL"),
    "its square": (lambda t, w: (lambda y: t.op("mul", (1, 4), y, y))(product(t, w)), "no MUL"),
    "two readers": (
        lambda t, w: (lambda y: t.op("add", (1, 4), scaled(t, y), y))(product(t, w)),
        "no MUL",
    ),
    "a lookup of other indices": (
        lambda t, w: t.op(
            "mul",
            (1, 4),
            t.op("embedding_lookup", (1, 4), t["i"], w),
            t.op(
                "embedding_lookup",
                (1, 1),
                t.op("add", (1,), t["i"], t.constant(np.int32([1])), dtype=INT),
                t.constant(SCALES.reshape(4, 1)),
            ),
        ),
        "no MUL",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_scales_that_are_not_applied(kind: str, tmp_path: Path) -> None:
    body, said = FAULTS[kind]
    (found,) = read(lambda t: body(t, named("rows(w)", lambda: t.constant(VALUES, BARE))), tmp_path)
    assert said in found.fault and found.values.size == 0 and found.scales is None


@pytest.mark.parametrize("quantized", ["!quant.uniform<i8<-127:127>:f32, 0.5>", "!quant.uniform<i8:f32, 1.0:3>"])
def test_a_tensor_with_a_scale_of_its_own(quantized: str, tmp_path: Path) -> None:
    (found,) = read(
        lambda t: scaled(t, product(t, named("rows(w)", lambda: t.constant(VALUES, quantized)))), tmp_path
    )
    assert "scale other than 1" in found.fault


def test_integers_that_nothing_names_are_read_all_the_same(tmp_path: Path) -> None:
    (found,) = read(lambda t: scaled(t, product(t, t.constant(VALUES, BARE))), tmp_path)
    assert not found.fault and found.claim.parameters[0].startswith("tfl.pseudo_qconst")


def test_halves_are_named_by_what_widens_them(tmp_path: Path) -> None:
    halves = (VALUES / 7).astype(np.float16)

    def body(t: Tiny) -> Any:
        return product(t, named("rows(w)", lambda: t.op("dequantize", (4, 4), t.constant(halves))))

    (found,) = read(body, tmp_path)
    assert found.claim == RowsOf(("w",)) and found.scales is None and not found.fault
    assert found.values.dtype == np.float16 and (found.values == halves).all()


WIDENED = (np.arange(12).reshape(3, 4) / 7).astype(np.float16)


def entries(t: Tiny, name: str, data: np.ndarray, kind: str = "mul", second: bool = True) -> Any:
    """An elementwise op of the input and a widened constant."""
    wide = named(name, lambda: t.op("dequantize", data.shape, t.constant(data)))
    pair = (t["x"], wide) if second else (wide, t["x"])
    return t.op(kind, np.broadcast_shapes((1, 4), data.shape), *pair)


@pytest.mark.parametrize(("name", "data", "values"), [
    ("rows(d) flat", WIDENED[0], WIDENED[:1]),
    ("rows(d) flat", WIDENED[:1], WIDENED[:1]),
    ("rows(d) each", WIDENED, WIDENED),
    ("rows(d) taps", WIDENED, WIDENED[::-1].T),
])
def test_layouts_of_halves(name: str, data: np.ndarray, values: np.ndarray, tmp_path: Path) -> None:
    (found,) = read(lambda t: entries(t, name, data), tmp_path)
    assert not found.fault and found.claim == RowsOf(("d",)) and found.scales is None
    assert found.values.shape == values.shape and (found.values == values).all()


def test_a_widened_factor_on_the_left(tmp_path: Path) -> None:
    def body(t: Tiny) -> Any:
        wide = named("rows(w)", lambda: t.op("dequantize", (3, 4), t.constant(WIDENED)))
        return t.op("batch_matmul", (3, 1), wide, t.op("reshape", (4, 1), t["x"], t.constant(np.int32([4, 1]))))

    (found,) = read(body, tmp_path)
    assert not found.fault and (found.values == WIDENED).all()


@pytest.mark.parametrize(("name", "kind", "said"), [
    ("rows(d) flat", "div", "DIV reads it, not as an operand"),
    ("rows(d) each", "add", "ADD reads it, not as each"),
    ("rows(d) taps", "add", "ADD reads it, not as taps"),
    ("rows(d)", "mul", "MUL reads it, not as a matrix of rows"),
])
def test_halves_that_another_op_reads(name: str, kind: str, said: str, tmp_path: Path) -> None:
    (found,) = read(lambda t: entries(t, name, WIDENED, kind), tmp_path)
    assert said in found.fault and found.values.size == 0


def test_two_signatures_that_read_the_same_are_one(tmp_path: Path) -> None:
    def body(t: Tiny) -> dict[str, Any]:
        return {"y": scaled(t, product(t, named("rows(w)", lambda: t.constant(VALUES, BARE))))}

    inputs = {"x": ((1, 4), FLOAT)}
    path = tmp_path / "two.tflite"
    save(path, {"decode": (inputs, body), "prefill_8": (inputs, body)})
    (found,) = read_matrices(path)
    assert [p.name.split(" of ")[1] for p in found.places] == ["decode", "prefill_8"]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can't be read"):
        list(read_matrices(tmp_path / "absent.tflite"))
    (tmp_path / "short.tflite").write_bytes(b"\x1c\0\0\0TFL3")
    with pytest.raises(BadInput, match="cut short or damaged"):
        list(read_matrices(tmp_path / "short.tflite"))
