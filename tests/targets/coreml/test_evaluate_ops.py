"""Every type of op against coremltools' own value inference, or a formula where it has none.

All cases of one float type are one package: converting takes longer than running.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.targets.coreml.evaluate import Evaluator, load_package
from needle_export.targets.coreml.evaluate.call import OPS
from needle_export.targets.coreml.evaluate.types import FLOATS
from tests.targets.coreml import layout_cases
from tests.targets.coreml.op_cases import CASES
from tests.targets.coreml.packages import Array, half_step, inferred, shapes, write

assert layout_cases  # imported for the cases that it adds

#: float32 against numpy's float32, relative to the largest value: sums in another order.
EXACT32 = 3e-6

#: Types that opset iOS 17 hasn't.
NEW_IN_18 = ("attention", "slice_update")

HALF = sorted(name for name, case in CASES.items() if case.half)
OLD = sorted(name for name in CASES if not name.startswith(NEW_IN_18))


class Together:
    """A package of many cases, and what each of them gives."""

    def __init__(self, path: Path, names: list[str], float_type: str, system: int = 18) -> None:
        self.spans: dict[str, slice] = {}
        number = {"fp32": np.float32, "fp16": np.float16}[float_type]

        def body(**inputs: Any) -> list[Any]:
            results: list[Any] = []
            for name in names:
                mine = {key: inputs[f"{name}__{key}"] for key in CASES[name].values}
                made = CASES[name].body(number, **mine)
                start = len(results)
                results += made if isinstance(made, tuple | list) else [made]
                self.spans[name] = slice(start, len(results))
            return results

        self.values = {f"{name}__{key}": value for name in names for key, value in CASES[name].values.items()}
        self.package = load_package(write(path, body, shapes(self.values, float_type), system=system))

    @cache  # noqa: B019  an instance lives as long as the module's tests
    def _run(self, precision: Any) -> list[Array]:
        outputs = Evaluator(self.package, precision).run("main", self.values)
        return [outputs[f"out{number}"] for number in range(len(outputs))]

    def results(self, name: str, precision: str) -> list[Array]:
        return self._run(precision)[self.spans[name]]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(tmp_path_factory.mktemp("ops") / "full.mlpackage", sorted(CASES), "fp32")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(tmp_path_factory.mktemp("ops") / "half.mlpackage", HALF, "fp16")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(tmp_path_factory.mktemp("ops") / "old.mlpackage", OLD, "fp32", system=17)


@cache
def wanted(name: str) -> tuple[Array, ...]:
    """In float32, whatever a package is written in."""
    case = CASES[name]
    if case.expect is not None:
        found = case.expect(**case.values)
        return found if isinstance(found, tuple) else (found,)
    results = inferred(lambda **values: case.body(np.float32, **values), case.values)
    assert all(result is not None for result in results), "coremltools infers nothing: the case needs a formula"
    return tuple(np.asarray(result) for result in results)


def check(found: Array, want: Array, slack: Any = 0) -> None:
    assert found.shape == want.shape
    if want.dtype.kind != "f":
        np.testing.assert_array_equal(found, want.astype(found.dtype))
        return
    error = np.abs(found.astype(np.float64) - want)
    assert (error <= slack + EXACT32 * max(1.0, np.abs(want).max(initial=0))).all()


@pytest.mark.parametrize("name", sorted(CASES))
def test_float32(name: str, full: Together) -> None:
    for found, want in zip(full.results(name, "float32"), wanted(name), strict=True):
        check(found, want)


@pytest.mark.parametrize("name", OLD)
def test_the_opset_of_ios_17(name: str, old: Together) -> None:
    assert old.package.functions["main"].opset == "CoreML7"
    for found, want in zip(old.results(name, "float32"), wanted(name), strict=True):
        check(found, want)


@pytest.mark.parametrize("name", HALF)
def test_declared_float16_rounds_once(name: str, half: Together) -> None:
    for found, want in zip(half.results(name, "declared"), wanted(name), strict=True):
        check(found, want, half_step(want) if want.dtype.kind == "f" else 0)


@pytest.mark.parametrize("name", HALF)
def test_float32_of_a_float16_program_rounds_nothing(name: str, half: Together) -> None:
    for found, want in zip(half.results(name, "float32"), wanted(name), strict=True):
        check(found, want)


def test_declared_results_are_float16(half: Together) -> None:
    found, rounds = half._run("declared"), 0
    declared = half.package.functions["main"].outputs
    for number, value in enumerate(found):
        if declared[f"out{number}"].dtype == "float16":
            np.testing.assert_array_equal(value, value.astype(np.float16).astype(np.float32))
            rounds += bool((value != half._run("float32")[number]).any())
    assert rounds > 40, "the rounding shows in results"
    assert {"float16"} <= {t.dtype for t in declared.values()} & FLOATS


def test_declared_equals_float32_where_all_is_float32(full: Together) -> None:
    for one, other in zip(full._run("declared"), full._run("float32"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_type_of_op_has_a_case(full: Together) -> None:
    assert sorted(set(OPS) - {op.type for op in full.package.functions["main"].ops}) == []
