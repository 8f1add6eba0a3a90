"""Symmetric integers with a scale for each block, against their definition in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from needle_export.weights.linear import dequantize_blocks, dynamic_blocks, quantize_blocks

Floats = NDArray[np.float32]

TINY = np.finfo(np.float16).tiny


def normal(rows: int, columns: int, seed: int = 0) -> Floats:
    """Rows and columns of very different sizes, as weights have them."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-2, 1, (rows, 1)) * 10.0 ** rng.uniform(-1, 0, columns)
    return (sizes * rng.standard_normal((rows, columns))).astype(np.float32)


def defined(weight: Floats, bits: int, block: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """The docstring, one block after the other."""
    top = 2 ** (bits - 1) - 1
    rows, columns = weight.shape
    values, scales = np.zeros(weight.shape, np.int8), np.zeros((rows, columns // block), np.float16)
    for row in range(rows):
        for at in range(columns // block):
            run = weight[row, at * block : (at + 1) * block]
            scale = max(np.float16(np.abs(run).max() / np.float32(top)), TINY)
            scales[row, at] = scale
            values[row, at * block : (at + 1) * block] = np.clip(np.rint(run / np.float32(scale)), -top, top)
    return values, scales


def quantized(weight: Floats, bits: int, block: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    values, scales = quantize_blocks(torch.from_numpy(weight), bits, block)
    assert values.dtype == torch.int8 and scales.dtype == torch.float16
    return values.numpy(), scales.numpy()


def restored(values: NDArray[np.int8], scales: NDArray[np.float16]) -> Floats:
    found: Floats = dequantize_blocks(torch.from_numpy(values), torch.from_numpy(scales)).numpy()
    assert found.dtype == np.float32
    return found


@pytest.mark.parametrize(
    ("bits", "block"), [(8, 96), (8, 32), (4, 32), (4, 96), (4, 1), (3, 8), (2, 32), (5, 3), (7, 48)]
)
def test_it_is_the_definition_bit_for_bit(bits: int, block: int) -> None:
    weight = normal(24, 96, bits * block)
    values, scales = quantized(weight, bits, block)
    expected = defined(weight, bits, block)
    assert np.array_equal(values, expected[0]) and np.array_equal(scales, expected[1])
    wide = np.repeat(scales.astype(np.float32), block, axis=1)
    assert np.array_equal(restored(values, scales), values.astype(np.float32) * wide)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nothing_is_further_off_than_half_a_level(bits: int) -> None:
    weight, top = normal(200, 96, bits), 2 ** (bits - 1) - 1
    values, scales = quantized(weight, bits, 32)
    wide = np.repeat(scales.astype(np.float32), 32, axis=1)
    off = np.abs(restored(values, scales) - weight) / wide
    # A scale that was rounded down leaves the greatest value of its block up to 2^-11 of all levels short.
    assert 0.49 < off.max() < 0.5 + top * 2.0**-11
    # All levels are in use, the least of the type is not, and every block's greatest entry has the greatest level.
    assert set(np.unique(values)) == set(range(-top, top + 1))
    assert (np.abs(values).reshape(200, 3, 32).max(-1) == top).all()
    assert (scales > 0).all()


def test_halves_are_rounded_to_even() -> None:
    weight = np.array([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5]], np.float32)
    values, scales = quantized(weight, 4, 8)
    assert scales.tolist() == [[1.0]] and values.tolist() == [[7, 0, 2, 2, 0, -2, -2, 6]]


def test_a_scale_is_rounded_to_half_precision_first() -> None:
    # The half nearest to 100 / 127 lies above it, and 50.49 times that is more than 50.5 times 100 / 127.
    scale = float(np.float16(100 / 127))
    values, scales = quantized(np.array([[100.0, -100.0, 50 * scale, 50.49 * scale]], np.float32), 8, 4)
    assert scales.tolist() == [[scale]] and values.tolist() == [[127, -127, 50, 50]]
    assert 50.49 * scale > 50.5 * 100 / 127
    # Below the least number that half precision holds with all its bits, that one is taken.
    values, scales = quantized(np.full((1, 4), 1e-3, np.float32), 8, 4)
    assert scales.tolist() == [[TINY]] and values.tolist() == [[16, 16, 16, 16]]


def test_brain_scales_have_eight_digits() -> None:
    weight = normal(64, 96, 5)
    values, scales = (a.numpy() for a in quantize_blocks(torch.from_numpy(weight), 4, 32, brain=True))
    wide = torch.from_numpy(scales.astype(np.float32))
    assert torch.equal(wide.bfloat16().float(), wide)
    exact = np.abs(weight.reshape(64, 3, 32)).max(-1) / 7
    kept = exact > 2 * TINY
    assert np.abs(scales[kept] / exact[kept] - 1).max() <= 2.0**-8
    # Values are rounded by these scales, not by finer ones.
    assert np.array_equal(values, np.clip(np.rint(weight / np.repeat(scales.astype(np.float32), 32, 1)), -7, 7))
    assert not np.array_equal(scales, quantized(weight, 4, 32)[1])
    with pytest.raises(ValueError, match="a scale is beyond half precision"):
        quantize_blocks(torch.full((1, 32), 7 * 65500.0), 4, 32, brain=True)


def test_a_block_of_zeros_stays_zero_and_touches_no_other() -> None:
    weight = normal(4, 64, 3)
    weight[1, 32:] = 0
    weight[2] = -0.0
    values, scales = quantized(weight, 4, 32)
    assert (scales[1, 1], *scales[2]) == (TINY,) * 3
    back = restored(values, scales)
    assert (back[1, 32:] == 0).all() and (back[2] == 0).all()
    others = quantized(weight[[0, 3]], 4, 32)
    assert np.array_equal(values[[0, 3]], others[0]) and np.array_equal(scales[[0, 3]], others[1])


def test_what_it_made_stays_what_it_is() -> None:
    """Rounding twice is rounding once, so that a tensor may be read from a rounded reference."""
    for bits, block in ((8, 96), (4, 32), (2, 16)):
        once = restored(*quantized(normal(32, 96, bits), bits, block))
        assert np.array_equal(restored(*quantized(once, bits, block)), once)
    brain = dequantize_blocks(*quantize_blocks(torch.from_numpy(normal(32, 96)), 4, 32, brain=True))
    assert torch.equal(dequantize_blocks(*quantize_blocks(brain, 4, 32, brain=True)), brain)


@pytest.mark.parametrize(("block", "word"), [(0, "blocks of 0"), (5, "blocks of 5 don't divide 96 columns")])
def test_blocks_that_do_not_fit(block: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        quantize_blocks(torch.zeros(2, 96), 4, block)


def test_a_scale_beyond_half_precision() -> None:
    weight = torch.zeros(2, 8)
    weight[1, 3] = 65504.0 * 127
    quantize_blocks(weight, 8, 8)
    with pytest.raises(ValueError, match="a scale is beyond half precision"):
        quantize_blocks(weight * 1.001, 8, 8)


def in_runs(x: Floats, values: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.float64]:
    """A product with inputs rounded run by run, one run after the other."""
    runs = scales.shape[1]
    width = x.shape[1] // runs
    total = np.zeros((len(x), len(values)))
    for row in range(len(x)):
        for run in range(runs):
            at = slice(run * width, (run + 1) * width)
            peak = np.abs(x[row, at]).max()
            levels = np.rint(x[row, at] * (np.float32(127) / peak)) if peak else np.zeros(width)
            step = peak / np.float32(127)
            sums = values[:, at].astype(np.int64) @ levels.astype(np.int64)
            total[row] += sums * float(step) * scales[:, run].astype(np.float64)
    return total


@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 64), (4, 16), (2, 32)])
def test_a_products_inputs_are_rounded_run_by_run(bits: int, block: int) -> None:
    values, scales = quantized(normal(24, 192, 1), bits, block)
    x = normal(7, 192, 2)
    x[3], x[4, :block] = 0, 0
    found = dynamic_blocks(torch.from_numpy(x), torch.from_numpy(values), torch.from_numpy(scales)).numpy()
    wanted = in_runs(x, values, scales)
    assert found.dtype == np.float32 and np.array_equal(found, wanted.astype(np.float32))
    # That is what the scheme costs: more than the last bits, and at most half a level of every input.
    weight = restored(values, scales).astype(np.float64)
    error = np.abs(found - x.astype(np.float64) @ weight.T)
    half = np.repeat(np.abs(x).reshape(7, -1, block).max(-1), block, axis=1) / 254
    assert error.max() > 1e-5 and (error <= 1.0001 * half @ np.abs(weight).T).all()


def test_leading_dimensions_and_refusals_of_a_product() -> None:
    values, scales = (torch.from_numpy(a) for a in quantized(normal(24, 64), 4, 32))
    x = torch.from_numpy(normal(6, 64))
    flat = dynamic_blocks(x, values, scales)
    assert torch.equal(dynamic_blocks(x.reshape(2, 3, 64), values, scales), flat.reshape(2, 3, 24))
    for wrong in ({"x": x.double()}, {"x": x[:, :32]}, {"scales": scales[:20]}, {"scales": scales.repeat(1, 3)[:, :5]}):
        with pytest.raises(ValueError, match="doesn't fit"):
            dynamic_blocks(**({"x": x, "values": values, "scales": scales} | wrong))
