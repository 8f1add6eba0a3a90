"""Codebook weights: the rotation, the levels, and encoding by its definition."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from needle_export.weights import cq
from needle_export.weights.cq import TERNARY, codebook, decode, encode, hadamard, padded

WIDTHS = (1, 2, 3, 4, TERNARY)


def normal(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (10.0 ** rng.uniform(-3, 1, (rows, 1)) * rng.standard_normal((rows, columns))).astype(np.float32)


@pytest.mark.parametrize("group", [8, 16, 128, 1024])
def test_hadamard_is_symmetric_and_orthonormal(group: int) -> None:
    matrix = hadamard(group)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(group), atol=1e-5)
    assert not matrix.flags.writeable


@pytest.mark.parametrize("bits", WIDTHS)
def test_levels_are_the_best_of_a_unit_normal(bits: int) -> None:
    levels = codebook(bits, 64).astype(np.float64) * 8
    assert (np.diff(levels) > 0).all() and len(levels) == (3 if bits == TERNARY else 2**bits)
    assert not codebook(bits, 64).flags.writeable
    # Lloyd's condition: each is the mean of its cell; here of normal values cut finely, not of drawn ones.
    at = np.linspace(-8, 8, 2_000_001)
    density = np.exp(-at * at / 2)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, at)
    means = np.bincount(cell, at * density) / np.bincount(cell, density)
    # The drawn values that upstream took theirs from are off by as much as 1 %.
    np.testing.assert_allclose(levels, means, atol=0.02 if bits in (2, 3, 4) else 1e-4)


def test_only_widths_of_the_format() -> None:
    for bits in (0, 6, 8):
        with pytest.raises(KeyError):
            codebook(bits, 128)
        with pytest.raises(KeyError):
            encode(normal(2, 128), bits)


@pytest.mark.parametrize(("columns", "group"), [(128, 128), (384, 128), (200, 128), (7, 8), (40, 16)])
@pytest.mark.parametrize("bits", WIDTHS)
def test_it_is_the_definition(bits: int, columns: int, group: int) -> None:
    weight = normal(20, columns, bits)
    weight[3] = 0
    weight[4, : columns // 2] = 0
    indices, norms = encode(weight, bits, group)
    width, levels = padded(columns, group), codebook(bits, group)
    assert indices.dtype == np.uint8 and indices.shape == (20, width)
    assert norms.dtype == np.float16 and norms.shape == (20, width // group)
    groups = np.pad(weight, ((0, 0), (0, width - columns))).reshape(20, -1, group).astype(np.float64)
    rotated = groups @ hadamard(group).astype(np.float64)
    lengths = np.linalg.norm(groups, axis=-1, keepdims=True)
    # A rotation keeps lengths.
    np.testing.assert_allclose(norms, lengths[..., 0], rtol=2**-11, atol=2**-24)
    unit = rotated / np.maximum(lengths, 1e-12)
    chosen = np.abs(unit - levels[indices].reshape(unit.shape))
    assert (chosen <= np.abs(unit[..., None] - levels).min(-1) + 1e-6).all()
    back = decode(indices, norms, levels)
    assert back.dtype == np.float32 and (back[3] == 0).all()
    np.testing.assert_allclose(
        back.reshape(rotated.shape),
        (levels[indices].reshape(rotated.shape) * norms[..., None].astype(np.float64)) @ hadamard(group),
        atol=1e-5 * lengths.max(),
    )


@pytest.mark.parametrize(
    ("bits", "share"), [(1, 1 - 2 / np.pi), (TERNARY, 0.190), (2, 0.1175), (3, 0.0345), (4, 0.0095)]
)
def test_the_error_is_that_of_a_normals_best_levels(bits: int, share: float) -> None:
    # J. Max, "Quantizing for minimum distortion", 1960, table I, for 2, 3, 4, 8 and 16 levels. Weights needn't be
    # normal themselves: the rotation makes them so.
    weight = np.random.default_rng(0).uniform(-1, 1, (200, 512)).astype(np.float32)
    error = decode(*encode(weight, bits), codebook(bits, 128)) - weight
    assert (error**2).sum() / (weight**2).sum() == pytest.approx(share, rel=0.05)


def test_slices_of_rows_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(300, 256)
    whole = encode(weight, 4)
    monkeypatch.setattr(cq, "_AT_ONCE", 7 * 256)
    assert all(np.array_equal(a, b) for a, b in zip(encode(weight, 4), whole, strict=True))
    strided = encode(np.asfortranarray(weight), 4)
    assert all(np.array_equal(a, b) for a, b in zip(strided, whole, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (normal(2, 128).astype(np.float64), normal(2, 128)[0]):
        with pytest.raises(ValueError, match="a float32 matrix is needed"):
            encode(wrong, 4)  # type: ignore[arg-type]  # the wrong dtype is the test
    for value in (np.nan, np.inf):
        weight = normal(2, 128)
        weight[1, 5] = value
        with pytest.raises(ValueError, match="NaN or infinity"):
            encode(weight, 4)
    with pytest.raises(ValueError, match="a group of 96 is no power of two"):
        encode(normal(2, 128), 4, 96)
    with pytest.raises(ValueError, match="a norm is beyond half precision"):
        encode(np.full((2, 128), 6000, np.float32), 4)
