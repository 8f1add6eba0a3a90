"""Scales with the least squared error: never worse than rounding to nearest, and a fixed point of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from needle_export.weights.forms import Form
from needle_export.weights.linear import dequantize_blocks, quantize_blocks
from needle_export.weights.search import TINY, search_blocks, searched


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kinds(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Matrices of every sort that a checkpoint, or a hostile one, may hold."""
    plain = normal(rows, columns, seed=seed)
    outliers = plain.clone()
    outliers[:, seed % columns] *= 100
    holes = plain * (normal(rows, columns, seed=seed + 1) > 1)
    holes[: rows // 2, : columns // 2] = 0
    return {
        "normal": plain * 0.02,
        "heavy tails": plain**5,
        "outliers": outliers,
        "mostly zero": holes,
        "all zero": torch.zeros(rows, columns),
        "negative zero": -torch.zeros(rows, columns),
        "around the least scale": plain * TINY * 4,
        "below the least scale": plain * TINY * 0.1,
        "far below it": plain * 1e-30,
        "near the greatest scale": plain.clamp(-1, 1) * 65000,
        "of every size": plain * 10.0 ** (5 * normal(rows, columns, seed=seed + 2)).clamp(-20, 4),
        "halves": plain.half().float(),
        "one value": torch.full((rows, columns), 0.1),
        "already on levels": dequantize_blocks(*quantize_blocks(plain, 4, 16)),
    }


def assert_fixed(values: Tensor, scales: Tensor, bits: int, block: int) -> None:
    stands_for = dequantize_blocks(values, scales)
    again = quantize_blocks(stands_for, bits, block)
    assert torch.equal(again[0], values) and torch.equal(again[1], scales)
    assert torch.equal(Form("int", bits, block).rounded(stands_for), stands_for)


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("bits", range(2, 9))
def test_rounding_to_nearest_changes_nothing_that_was_found(bits: int, block: int) -> None:
    for seed in (0, 1):
        for name, weight in kinds(24, 256, 100 * seed + bits).items():
            importance = None if seed == 0 else normal(256, seed=7).square() * (normal(256, seed=8) > -1)
            values, scales = search_blocks(weight, bits, block, importance)
            assert values.dtype == torch.int8 and scales.dtype == torch.float16, name
            assert bool((scales >= TINY).all()) and int(values.abs().max()) <= 2 ** (bits - 1) - 1, name
            assert_fixed(values, scales, bits, block)


@pytest.mark.slow
def test_rounding_to_nearest_changes_nothing_in_a_long_sweep() -> None:
    for seed in range(12):
        for bits in range(2, 9):
            for block in (16, 32, 128):
                size = float(10.0 ** np.random.default_rng(seed).uniform(-8, 4))
                for weight in kinds(64, 512, 1000 + seed).values():
                    weight = (weight * size).clamp(-60000, 60000)
                    assert_fixed(*search_blocks(weight, bits, block), bits, block)


def error(weight: Tensor, found: Tensor, importance: Tensor | None = None) -> Tensor:
    """Squared error of each row, in float64."""
    squares = (found.double() - weight.double()).square()
    return (squares if importance is None else squares * importance.double()).sum(1)


@pytest.mark.parametrize("bits", range(2, 9))
def test_no_block_is_worse_than_rounded_to_nearest(bits: int) -> None:
    importance = normal(32, seed=5).square()
    for name, weight in kinds(200, 32, bits).items():
        plain = Form("int", bits, 32).rounded(weight)
        for h in (None, importance):
            found = error(weight, searched(weight, bits, 32, h), h)
            # Errors are compared in float32, so one may be greater by its last bits.
            assert bool((found <= error(weight, plain, h) * 1.0001).all()), name


@pytest.mark.parametrize(
    ("bits", "block", "most"),
    [(2, 32, 0.43), (2, 128, 0.33), (3, 32, 0.76), (3, 128, 0.62), (4, 32, 0.89), (4, 128, 0.83), (8, 128, 0.98)],
)
def test_how_much_less_error_normal_weights_have(bits: int, block: int, most: float) -> None:
    weight = normal(128, 512, seed=bits)
    plain = error(weight, Form("int", bits, block).rounded(weight)).sum()
    assert float(error(weight, searched(weight, bits, block)).sum() / plain) < most


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_hardly_any_scale_is_better(bits: int) -> None:
    """Against every scale that half precision holds, for a few blocks."""
    weight, top = normal(12, 32, seed=bits), 2 ** (bits - 1) - 1
    codes = torch.arange(0x0400, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    scales = codes[(codes > 0.02) & (codes < 4)]
    levels = torch.round(weight[:, None] / scales[:, None]).clamp(-top, top)  # [O, scales, K]
    errors = (levels * scales[:, None] - weight[:, None]).double().square().sum(-1)
    errors[levels.abs().amax(-1) < top] = torch.inf
    found = error(weight, searched(weight, bits, 32))
    best = errors.amin(1)
    assert bool((found >= best * 0.9999).all()) and float(found.sum() / best.sum()) < 1.01


def test_an_important_column_is_followed_more_closely() -> None:
    weight, importance = normal(100, 64, seed=3), torch.ones(64)
    importance[[5, 40]] = 1000.0
    plain, weighted = searched(weight, 3, 32), searched(weight, 3, 32, importance)
    assert error(weight, weighted, importance).sum() < 0.5 * error(weight, plain, importance).sum()
    # Only relations count, and a column of none leaves the others as they are.
    assert torch.equal(searched(weight, 3, 32, importance * 1024), weighted)
    assert torch.equal(searched(weight, 3, 32, torch.zeros(64)), plain)


def test_rows_do_not_touch_each_other() -> None:
    weight = normal(3000, 128, seed=1)  # more than is worked on at once
    whole = searched(weight, 4, 32)
    assert torch.equal(searched(weight[2990:], 4, 32), whole[2990:])
    before = weight.clone()
    searched(weight, 4, 32)
    assert torch.equal(weight, before)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="don't divide"):
        search_blocks(torch.zeros(2, 96), 4, 64)
    with pytest.raises(ValueError, match="beyond half precision"):
        search_blocks(torch.full((1, 32), 65504.0 * 8), 4, 32)
    with pytest.raises(ValueError, match="beyond half precision"):
        search_blocks(torch.full((1, 32), torch.nan), 4, 32)
    for wrong in (torch.ones(95), -torch.ones(96), torch.full((96,), torch.inf), torch.ones(2, 96)):
        with pytest.raises(ValueError, match="importance must be 96 finite numbers"):
            search_blocks(torch.zeros(2, 96), 4, 32, wrong)
