"""States, several functions, findings, and what a package tells of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.errors import BadInput
from needle_export.targets.coreml.evaluate import Evaluator, load_package
from needle_export.targets.coreml.inspect import describe_package
from tests.targets.coreml.op_cases import mb
from tests.targets.coreml.packages import WEIGHTS, nptype, numbers, whole, write
from tests.targets.coreml.stepping import BIAS, SECOND, SLOTS, WEIGHT, WIDTH, X, projected, two_functions


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_functions(tmp_path_factory.mktemp("functions"))


def test_functions_share_a_state(package: Path) -> None:
    evaluator = Evaluator(load_package(package))
    evaluator.run("prefill", {"x": X[:4], "slot": whole([0])})
    evaluator.run("decode", {"x": X[4:5], "slot": whole([4])})
    last = evaluator.run("decode", {"x": X[5:], "slot": whole([5])})
    want = np.zeros((WIDTH, SLOTS))
    want[:, :6] = projected(X).T
    np.testing.assert_allclose(last["out0"], want, atol=2e-5)
    np.testing.assert_array_equal(evaluator.state["cache"][0], last["out0"])
    evaluator.reset()
    assert not evaluator.state["cache"].any()
    assert list(evaluator.state) == ["cache"]


def test_declared_states_are_float16(package: Path) -> None:
    evaluator = Evaluator(load_package(package), "declared")
    evaluator.run("prefill", {"x": X[:4], "slot": whole([3])})
    state = evaluator.state["cache"]
    np.testing.assert_array_equal(state, state.astype(np.float16))
    first = (X[:4].astype(np.float64) @ (WEIGHT / 8).T + BIAS).astype(np.float16)
    want = (first.astype(np.float64) @ (SECOND / 8).T).T
    np.testing.assert_allclose(state[0, :, 3:7], want, rtol=2**-10, atol=2e-4)
    assert not evaluator.findings
    evaluator.state["cache"] = np.full((1, WIDTH, SLOTS), 1 / 3)
    assert float(evaluator.state["cache"][0, 0, 0]) == float(np.float16(1 / 3))


def test_a_run_that_fails_leaves_the_state(package: Path) -> None:
    evaluator = Evaluator(load_package(package))
    evaluator.run("prefill", {"x": X[:4], "slot": whole([0])})
    before = evaluator.state["cache"]
    with pytest.raises(BadInput, match=r"slice_update.*an update of sizes"):
        evaluator.run("prefill", {"x": X[:4], "slot": whole([SLOTS - 2])})
    np.testing.assert_array_equal(evaluator.state["cache"], before)


def test_a_state_is_read_as_it_was(tmp_path: Path) -> None:
    """What was read before a write doesn't change with it."""

    def body(x: Any, cache: Any) -> Any:
        before = mb.read_state(input=cache)
        after = mb.coreml_update_state(state=cache, value=mb.add(x=before, y=x))
        return mb.mul(x=before, y=np.float16(1)), after

    path = write(tmp_path / "a.mlpackage", body, {"x": ((3,), "fp16")}, {"cache": (3,)})
    evaluator = Evaluator(load_package(path))
    x = np.array([1, 2, 3], np.float32)
    evaluator.run("main", {"x": x})
    outputs = evaluator.run("main", {"x": x})
    np.testing.assert_array_equal(outputs["out0"], x)
    np.testing.assert_array_equal(outputs["out1"], 2 * x)
    outputs["out1"][:] = 0  # results are copies
    np.testing.assert_array_equal(evaluator.state["cache"], 2 * x)


def test_constants_of_functions_are_one(package: Path) -> None:
    evaluator = Evaluator(load_package(package))
    evaluator.prepare("decode")
    before = len(evaluator._pool._known)
    dense = {key for key, one in evaluator._pool._known.items() if one.type.shape == (WIDTH, WIDTH)}
    evaluator.prepare("prefill")
    matrices = {key for key, one in evaluator._pool._known.items() if one.type.shape == (WIDTH, WIDTH)}
    assert matrices == dense and len(matrices) == 2
    assert len(evaluator._pool._known) > before  # small ones lie in the specification


def test_findings_name_the_op_at_which_they_arise(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        big = mb.mul(x=x, y=np.float16(300), name="too_big")
        lost = mb.sub(x=big, y=big, name="inf_minus_inf")
        return mb.add(x=big, y=np.float16(1), name="after"), mb.relu(x=lost, name="later")

    path = write(tmp_path / "a.mlpackage", body, {"x": ((4,), "fp16")})
    values = {"x": np.array([1, 300, -1000, 218.5], np.float32)}
    assert not Evaluator(load_package(path), "float32").findings
    evaluator = Evaluator(load_package(path), "declared")
    outputs = evaluator.run("main", values)
    found = {(f.op_name, f.op_type, f.function, f.kind): f.count for f in evaluator.findings}
    # 218.5 x 300 = 65,550 is rounded to infinity, too.
    assert found == {
        ("too_big", "mul", "main", "overflow"): 3,
        ("inf_minus_inf", "sub", "main", "nan"): 3,
    }
    assert np.isposinf(outputs["out0"][1]) and np.isneginf(outputs["out0"][2])
    evaluator.run("main", values)
    assert {f.count for f in evaluator.findings} == {6}
    assert not np.isinf(Evaluator(load_package(path)).run("main", values)["out0"]).any()


def test_just_above_the_largest_counts_too(tmp_path: Path) -> None:
    """65,510 rounds to 65,504 and is out of range nevertheless; 65,504 itself isn't."""
    path = write(tmp_path / "a.mlpackage", lambda x, y: mb.add(x=x, y=y), {"x": ((1,), "fp16"), "y": ((1,), "fp16")})
    evaluator = Evaluator(load_package(path), "declared")
    evaluator.run("main", {"x": [65504.0], "y": [0.0]})
    assert not evaluator.findings
    evaluator.run("main", {"x": [65504.0], "y": [6.0]})
    assert [f.kind for f in evaluator.findings] == ["overflow"]


def test_underflow_is_told_when_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mlpackage", lambda x: mb.square(x=x), {"x": ((2,), "fp16")})
    evaluator = Evaluator(load_package(path), "declared", underflow=True)
    evaluator.run("main", {"x": [1e-4, 1.0]})
    assert [(f.kind, f.count) for f in evaluator.findings] == [("underflow", 1)]


def test_constants_that_are_no_numbers_are_found(tmp_path: Path) -> None:
    bad = numbers(3, 4)
    bad[1, 2], bad[0, 0] = np.nan, -np.inf
    path = write(tmp_path / "a.mlpackage", lambda x: mb.add(x=x, y=bad), {"x": ((3, 4), "fp32")})
    evaluator = Evaluator(load_package(path))
    evaluator.prepare("main")
    assert {(f.kind, f.count) for f in evaluator.findings} == {("constant nan", 1), ("constant infinite", 1)}
    assert {f.op_type for f in evaluator.findings} == {"const"}


def test_the_description(package: Path, tmp_path: Path) -> None:
    told = describe_package(package)
    assert json.loads(json.dumps(told)) == told
    assert (told["specification"], told["minimum_os"]) == (9, "iOS 18, macOS 15")
    assert list(told["functions"]) == ["decode", "prefill"] and told["default_function"] == "decode"
    assert told["states"] == {"cache": {"dtype": "float16", "shape": [1, WIDTH, SLOTS]}}
    decode = told["functions"]["decode"]
    assert decode["inputs"] == {
        "x": {"dtype": "float16", "shape": [1, WIDTH]},
        "slot": {"dtype": "int32", "shape": [1]},
    }
    assert decode["op_types"]["linear"] == 2 and decode["ops"] == sum(decode["op_types"].values())
    assert sum(decode["precisions"].values()) == decode["ops"] and decode["precisions"]["int"] == 3
    assert told["constants"]["forms"] == {"dense float16": told["constants"]["bytes"]}
    assert told["constants"]["bytes"] >= 2 * (2 * WIDTH * WIDTH + WIDTH)
    assert told["constants"]["shared"] == 1.0
    assert told["weight_file_bytes"] == (package / WEIGHTS).stat().st_size


def test_forms_of_compressed_constants_are_told_apart(tmp_path: Path) -> None:
    codes = np.arange(48).reshape(6, 8)

    def body(x: Any) -> Any:
        return [
            mb.linear(x=x, weight=weight)
            for weight in (
                mb.constexpr_lut_to_dense(indices=(codes % 16).astype(nptype("uint4")), lut=numbers(1, 1, 16, 1)),
                mb.constexpr_blockwise_shift_scale(data=(codes % 7).astype(nptype("int4")), scale=numbers(6, 2)),
                mb.constexpr_blockwise_shift_scale(data=codes.astype(np.int8), scale=numbers(6, 1)),
                mb.constexpr_affine_dequantize(
                    quantized_data=codes.astype(np.int8), zero_point=np.int8(0), scale=np.float32(0.5), axis=0
                ),
            )
        ]

    path = write(tmp_path / "a.mlpackage", body, {"x": ((1, 8), "fp32")})
    forms = describe_package(path)["constants"]["forms"]
    assert {name: forms[name] for name in forms if not name.startswith("dense")} == {
        "int4 blocks": 24 + 6 * 2 * 4,
        "lut4": 24 + 16 * 4,
        "int8 channels": 48,
        "int8 tensor": 48,
    }
