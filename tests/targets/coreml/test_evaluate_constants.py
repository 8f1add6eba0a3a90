"""Compressed constants: as coremltools decompresses them, whole and row by row, in one file for all functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.targets.coreml.evaluate import Evaluator, load_package
from needle_export.targets.coreml.evaluate.constants import Constant
from tests.targets.coreml.op_cases import mb
from tests.targets.coreml.packages import Array, builder, nptype, numbers, whole, write


def codes(*shape: int, bits: int, signed: bool = False) -> Array:
    low = -(1 << (bits - 1)) if signed else 0
    return np.random.default_rng([bits, *shape]).integers(low, low + (1 << bits), shape)


def unsigned(*shape: int, bits: int) -> Array:
    return codes(*shape, bits=bits).astype(nptype(f"uint{bits}"))


def int4(*shape: int) -> Array:
    return codes(*shape, bits=4, signed=True).astype(nptype("int4"))


def positive(*shape: int) -> Array:
    return numbers(*shape, low=0.01, high=0.5)


def affine(f: Any, **rest: Any) -> Any:
    rest = {"quantized_data": codes(6, 10, bits=8, signed=True).astype(np.int8)} | rest
    return mb.constexpr_affine_dequantize(**rest)


def old_lut(f: Any, bits: int) -> Any:
    packed = np.random.default_rng(bits).integers(0, 256, -(-bits * 77 // 8)).astype(np.uint8)
    return mb.constexpr_lut_to_dense(indices=packed, lut=numbers(1 << bits).astype(f), shape=np.uint32([7, 11]))


#: Ops that make a matrix, by float type.
FORMS: dict[str, Callable[[Any], Any]] = {
    "int4_blocks": lambda f: mb.constexpr_blockwise_shift_scale(data=int4(6, 64), scale=positive(6, 2).astype(f)),
    "int4_blocks_both_ways": lambda f: mb.constexpr_blockwise_shift_scale(
        data=int4(6, 64), scale=positive(3, 4).astype(f), offset=int4(3, 4)
    ),
    "uint4_blocks_offset": lambda f: mb.constexpr_blockwise_shift_scale(
        data=unsigned(6, 64, bits=4), scale=positive(6, 4).astype(f), offset=unsigned(6, 4, bits=4)
    ),
    "int8_channels": lambda f: mb.constexpr_blockwise_shift_scale(
        data=codes(6, 10, bits=8, signed=True).astype(np.int8), scale=positive(6, 1).astype(f)
    ),
    "int8_columns": lambda f: mb.constexpr_blockwise_shift_scale(
        data=codes(6, 10, bits=8, signed=True).astype(np.int8), scale=positive(1, 10).astype(f)
    ),
    "affine_channels": lambda f: affine(
        f, scale=positive(6).astype(f), zero_point=np.int8([0, 1, -5, 127, -128, 3]), axis=0
    ),
    "affine_columns": lambda f: affine(f, scale=positive(10).astype(f), zero_point=np.int8(3), axis=-1),
    "affine_whole": lambda f: affine(f, scale=f(0.0625), zero_point=np.int8(-7), axis=0),
    "lut4": lambda f: mb.constexpr_lut_to_dense(indices=unsigned(6, 10, bits=4), lut=numbers(1, 1, 16, 1).astype(f)),
    "lut4_odd": lambda f: mb.constexpr_lut_to_dense(indices=unsigned(7, 9, bits=4), lut=numbers(1, 1, 16, 1).astype(f)),
    "lut4_rows": lambda f: mb.constexpr_lut_to_dense(
        indices=unsigned(6, 10, bits=4), lut=numbers(3, 1, 16, 1).astype(f)
    ),
    "lut4_blocks": lambda f: mb.constexpr_lut_to_dense(
        indices=unsigned(6, 10, bits=4), lut=numbers(2, 5, 16, 1).astype(f)
    ),
    "lut2_vectors": lambda f: mb.constexpr_lut_to_dense(
        indices=unsigned(6, 10, bits=2), lut=numbers(1, 2, 4, 3).astype(f), vector_axis=np.int32(1)
    ),
    "lut2_vectors_down": lambda f: mb.constexpr_lut_to_dense(
        indices=unsigned(6, 10, bits=2), lut=numbers(3, 1, 4, 2).astype(f), vector_axis=np.int32(-2)
    ),
    "lut8_then_scale": lambda f: mb.constexpr_blockwise_shift_scale(
        data=mb.constexpr_lut_to_dense(
            indices=unsigned(6, 10, bits=8), lut=codes(1, 1, 256, 1, bits=8, signed=True).astype(np.int8)
        ),
        scale=positive(6, 2).astype(f),
    ),
    "sparse": lambda f: mb.constexpr_sparse_to_dense(
        nonzero_data=numbers(int(codes(6, 10, bits=1).sum())).astype(f), mask=unsigned(6, 10, bits=1)
    ),
}
for _bits in (1, 2, 3, 6, 8):
    FORMS[f"lut{_bits}"] = lambda f, bits=_bits: mb.constexpr_lut_to_dense(
        indices=unsigned(5, 24, bits=bits), lut=numbers(1, 1, 1 << bits, 1).astype(f)
    )


def decompressed(make: Callable[[Any], Any], f: Any) -> Array:
    """By coremltools."""
    found: list[Any] = []

    def body(x: Any) -> Any:
        found.append(make(f).op.materialized_val_inference())
        return x

    builder()
    from coremltools.converters.mil.mil import Function

    with Function({"x": mb.TensorSpec(shape=(1,))}, opset_version=_system()) as function:
        function.set_outputs([mb.identity(x=body(function.inputs["x"]))])
    return np.asarray(found[0])


def _system() -> Any:
    import coremltools as ct

    return ct.target.iOS18


NAMES = sorted(FORMS)
KINDS = {"fp32": np.float32, "fp16": np.float16}


@pytest.fixture(scope="module", params=sorted(KINDS))
def forms(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[Array], list[Array]]:
    """The float type, every form's matrix, and three rows and columns of each; these in a package of their own."""
    kind = request.param
    f, folder = KINDS[kind], tmp_path_factory.mktemp("forms")
    whole_ones = write(
        folder / "whole.mlpackage",
        lambda one: [mb.mul(x=FORMS[name](f), y=one) for name in NAMES],
        {"one": ((1,), kind)},
    )
    parts = write(
        folder / "parts.mlpackage",
        lambda at: [mb.gather(x=FORMS[name](f), indices=at, axis=axis) for name in NAMES for axis in (0, 1)],
        {"at": ((3,), "int32")},
    )
    matrices = Evaluator(load_package(whole_ones), "declared").run("main", {"one": np.ones(1)})
    cuts = Evaluator(load_package(parts), "declared").run("main", {"at": PLACES})
    return f, [matrices[f"out{n}"] for n in range(len(matrices))], [cuts[f"out{n}"] for n in range(len(cuts))]


PLACES = whole([4, 0, 2])


@pytest.mark.parametrize("name", NAMES)
def test_like_coremltools(name: str, forms: tuple[Any, list[Array], list[Array]]) -> None:
    """Exactly: in a product with one, and in rows and columns that are looked up."""
    f, matrices, cuts = forms
    want = decompressed(FORMS[name], f).astype(np.float32)
    number = NAMES.index(name)
    np.testing.assert_array_equal(matrices[number], want)
    np.testing.assert_array_equal(cuts[2 * number], want[PLACES])
    np.testing.assert_array_equal(cuts[2 * number + 1], want[:, PLACES])


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_the_form_of_ios_16(bits: int, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.mlpackage",
        lambda one: mb.mul(x=old_lut(np.float16, bits), y=one),
        {"one": ((1,), "fp16")},
        system=17,
    )
    builder()
    from coremltools.converters.mil.mil.ops.defs.iOS16.constexpr_ops import constexpr_lut_to_dense

    packed = np.random.default_rng(bits).integers(0, 256, -(-bits * 77 // 8)).astype(np.uint8)
    want = constexpr_lut_to_dense.decompress(numbers(1 << bits), packed, [7, 11])
    found = Evaluator(load_package(path), "declared").run("main", {"one": np.ones(1)})["out0"]
    np.testing.assert_array_equal(found, want)


def test_rows_of_a_table_are_found_without_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By axis, by batches, and by several indices."""
    tables = {
        "plain": lambda f: numbers(6, 50, 8).astype(np.float16),
        "lut": lambda f: mb.constexpr_lut_to_dense(
            indices=unsigned(6, 50, 8, bits=4), lut=numbers(1, 1, 1, 16, 1).astype(np.float16)
        ),
        "scaled": lambda f: mb.constexpr_blockwise_shift_scale(
            data=int4(6, 50, 8), scale=positive(6, 50, 2).astype(np.float16)
        ),
    }
    batches, pairs = whole([[3, 49]] * 6), whole([[5, 49], [0, 1]])
    path = write(
        tmp_path / "a.mlpackage",
        lambda at, pair: [
            result
            for make in tables.values()
            for result in (
                mb.gather(x=make(np.float16), indices=at, axis=1, batch_dims=1),
                mb.gather_nd(x=make(np.float16), indices=pair),
                mb.gather(x=make(np.float16), indices=mb.slice_by_index(x=at, begin=[0, 0], end=[1, 1]), axis=1),
            )
        ],
        {"at": (batches.shape, "int32"), "pair": (pairs.shape, "int32")},
    )
    package = load_package(path)
    full = [np.asarray(decompressed(tables[name], np.float16)) for name in ("lut", "scaled")]
    full = [tables["plain"](np.float16), *full]
    with monkeypatch.context() as patch:
        big = []
        rows = Constant.dense.func  # type: ignore[attr-defined]  # a cached_property's function

        def seen(self: Constant) -> Any:
            if self.type.elements >= 2400:
                big.append(self)
            return rows(self)

        patch.setattr(Constant.dense, "func", seen)
        outputs = Evaluator(package, "declared").run("main", {"at": batches, "pair": pairs})
        assert not big
    for number, table in enumerate(full):
        wide = table.astype(np.float32)
        np.testing.assert_array_equal(outputs[f"out{3 * number}"], wide[:, [3, 49]])
        np.testing.assert_array_equal(outputs[f"out{3 * number + 1}"], wide[[5, 0], [49, 1]])
        np.testing.assert_array_equal(outputs[f"out{3 * number + 2}"], wide[:, 3].reshape(6, 1, 1, 8))


def test_an_index_outside_is_an_error(tmp_path: Path) -> None:
    from needle_export.errors import BadInput

    path = write(
        tmp_path / "a.mlpackage", lambda at: mb.gather(x=numbers(4, 5), indices=at, axis=0), {"at": ((1,), "int32")}
    )
    evaluator = Evaluator(load_package(path))
    for wrong in (-1, 4):
        with pytest.raises(BadInput, match="op 'gather_0' of type 'gather': can't be computed: index"):
            evaluator.run("main", {"at": whole([wrong])})
