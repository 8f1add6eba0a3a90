"""Weights are found in a finished file by their bytes; one that the converter changed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.config.rules import Rules
from needle_export.errors import Unsupported
from needle_export.graph.program import Part
from needle_export.targets.base import WeightShare
from tests.support.tflite_models import FLOAT, Tiny, save

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from needle_export.targets.tflite.buffers import digest, digests, stored_weights
from needle_export.targets.tflite.store import Stored, WeightStore

MATRIX = np.arange(32, dtype=np.float32).reshape(4, 8)
BYTES = np.arange(16, dtype=np.int8).reshape(4, 4)
SCALES = np.array([0.5, 0.25, 2, 1], np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two signatures that read the same matrix, one of which reads integers as well."""

    def first(t: Tiny) -> dict[str, Any]:
        product = t.op("fully_connected", (1, 4), t["x"], t.constant(MATRIX), t.absent())
        weight = t.constant(BYTES, "!quant.uniform<i8<-127:127>:f32, 1.0>")
        whole = t.op("fully_connected", (1, 4), product, weight, t.absent())
        return {"y": t.op("mul", (1, 4), whole, t.constant(SCALES))}

    def second(t: Tiny) -> dict[str, Any]:
        return {"y": t.op("fully_connected", (1, 4), t["x"], t.constant(MATRIX), t.absent())}

    inputs = {"x": ((1, 8), FLOAT)}
    path = tmp_path_factory.mktemp("model") / "m.tflite"
    return save(path, {"decode": (inputs, first), "prefill_8": (inputs, second)})


def stored(name: str, array: np.ndarray, kept: str = "", parts: tuple[Part, ...] = ()) -> dict[str, Stored]:
    return {digest(array): Stored(name, str(array.dtype), parts, kept)}


def test_every_constant_is_found_by_its_bytes(model: Path) -> None:
    found = digests(model)
    for array in (MATRIX, BYTES, SCALES):
        assert found[digest(array)] == array.nbytes
    assert digest(MATRIX + 1) not in found and digest(np.ascontiguousarray(MATRIX.T)) not in found


def test_weights_are_told_as_they_lie_in_the_file(model: Path) -> None:
    parts = (Part("a/kernel", "routing", 1, 20), Part("b/kernel", "content", 1, 12))
    asked = {**stored("merged", MATRIX, "small", parts), **stored("bytes", BYTES), **stored("bytes.scales", SCALES)}
    found = stored_weights(model, asked)
    assert [(w.name, w.bytes, w.dtype, w.kept_float) for w in found] == [
        ("merged", 128, "float32", "small"),
        ("bytes", 16, "int8", ""),
        ("bytes.scales", 16, "float32", ""),
    ]
    assert found[0].shares == (WeightShare("a/kernel", "routing", 1, 20), WeightShare("b/kernel", "content", 1, 12))


@pytest.mark.parametrize(
    "changed",
    [
        MATRIX * np.float32(1 + 2e-7),
        np.ascontiguousarray(MATRIX.T),
        MATRIX.astype(np.float16),
        BYTES - np.int8(1),
        np.where(MATRIX == 0, np.float32(-0.0), MATRIX),
    ],
    ids=["the last bit", "transposed", "rounded", "shifted", "a sign of zero"],
)
def test_a_weight_that_the_converter_changed_is_refused(changed: np.ndarray, model: Path) -> None:
    assert stored_weights(model, stored("kept", MATRIX))
    with pytest.raises(Unsupported, match="the converter changed this weight") as refusal:
        stored_weights(model, {**stored("kept", MATRIX), **stored("layers.1.attention.out_proj", changed)})
    assert refusal.value.where == "layers.1.attention.out_proj" and refusal.value.exit_code == 5


def test_equal_bytes_stand_for_every_tensor_that_has_them() -> None:
    # Two blocks may hold the same matrix; the reference must round both.
    store, parts = WeightStore(Rules("int8")), [Part(f"kernel {i}", "content", i, 6) for i in range(2)]
    for part in (*parts, parts[0]):
        store._note("same", Stored("kernel", "int8", (part,)))
    store._note("same", Stored("bias", "float32", (Part("bias", "content", 0, 6),)))
    assert store.stored == {"same": Stored("kernel", "int8", tuple(parts))}
