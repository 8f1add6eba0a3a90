"""Rounding by the error of outputs: less of it, and still a fixed point of rounding to nearest."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from needle_export.weights import calibrated as calibrated_module
from needle_export.weights.calibrated import calibrate_blocks, calibrated, shrunk
from needle_export.weights.forms import Form
from needle_export.weights.linear import dequantize_blocks, quantize_blocks
from needle_export.weights.search import TINY, searched
from tests.unit.weights.test_search import assert_fixed, kinds


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(count: int, width: int, seed: int = 0) -> Tensor:
    """Inputs of which a few directions are much greater than the rest, as a trained layer's are."""
    mix = normal(width, width, seed=seed) * torch.arange(1, width + 1) ** -0.8
    return normal(count, width, seed=seed + 1) @ mix.T


def error(found: Tensor, weight: Tensor, h: Tensor) -> float:
    off = (found - weight).double()
    return float((off @ h.double() * off).sum())


def moments(kind: str, width: int, seed: int) -> Tensor:
    if kind == "none":
        return torch.zeros(width, width)
    x = inputs(8 if kind == "few" else 400, width, seed)
    if kind == "unseen columns":
        x[:, ::3] = 0
    return x.T @ x


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_to_nearest_changes_nothing_that_was_found(bits: int, block: int) -> None:
    hs = itertools.cycle(moments(k, 128, bits) for k in ("many", "few", "none", "unseen columns"))
    for weight, h in zip(kinds(12, 128, 7 * bits + block).values(), hs, strict=False):
        values, scales = calibrate_blocks(weight, h, 100, bits, block)
        assert values.dtype == torch.int8 and scales.dtype == torch.float16
        assert bool((scales >= TINY).all()) and int(values.abs().max()) <= 2 ** (bits - 1) - 1
        assert_fixed(values, scales, bits, block)


@pytest.mark.slow
def test_rounding_to_nearest_changes_nothing_in_a_long_sweep() -> None:
    for seed, kind in itertools.product(range(1), ("many", "few", "none", "unseen columns")):
        for bits, block in itertools.product(range(2, 9), (16, 32, 128)):
            for weight in kinds(12, 256, 50 + seed).values():
                assert_fixed(*calibrate_blocks(weight, moments(kind, 256, seed), 100, bits, block), bits, block)


@pytest.mark.parametrize(
    ("bits", "block", "most"), [(2, 32, 0.1), (3, 32, 0.1), (4, 32, 0.1), (4, 128, 0.1), (8, 32, 0.2)]
)
def test_outputs_have_a_fraction_of_the_error(bits: int, block: int, most: float) -> None:
    weight, x = normal(64, 256) * 0.05, inputs(4000, 256, 3)
    h = x.T @ x
    plain = error(Form("int", bits, block).rounded(weight), weight, h)
    best = error(calibrated(weight, h, 4000, bits, block), weight, h)
    assert best < most * plain and error(searched(weight, bits, block, h.diagonal()), weight, h) < plain
    # On inputs of the same sort that it hasn't seen too.
    fresh = normal(4000, 256, seed=99) @ (normal(256, 256, seed=3) * torch.arange(1, 257) ** -0.8).T
    off = error(calibrated(weight, h, 4000, bits, block), weight, fresh.T @ fresh)
    assert off < 1.5 * most * error(Form("int", bits, block).rounded(weight), weight, fresh.T @ fresh)


def test_every_step_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, h = normal(64, 128), moments("many", 128, 1)
    with_damping = shrunk(h, 400).float()
    errors = [error(searched(weight, 3, 32, with_damping.diagonal()), weight, with_damping)]
    for sweeps in (0, 1, 2, 4):
        monkeypatch.setattr(calibrated_module, "_SWEEPS", sweeps)
        errors.append(error(calibrated(weight, h, 400, 3, 32), weight, with_damping))
    assert errors[1] < 0.5 * errors[0] and errors[2] < 0.97 * errors[1]
    assert all(after <= before for before, after in itertools.pairwise(errors))


def test_uncorrelated_inputs_leave_the_search_little_to_gain() -> None:
    """Where columns can't make up for each other, nothing is left but each scale's best levels."""
    weight = normal(64, 128)
    for h in (torch.eye(128), torch.zeros(128, 128)):
        found = calibrated(weight, h, 400, 4, 32)
        plain = searched(weight, 4, 32)
        assert float((found - weight).square().sum() / (plain - weight).square().sum()) == pytest.approx(1, abs=1e-3)
        assert float((found == plain).float().mean()) > 0.9


def test_few_inputs_are_not_taken_at_their_word() -> None:
    """Of eight inputs, 64 columns' moments say next to nothing about the ninth."""
    weight, h = normal(64, 64), moments("few", 64, 4)
    other = moments("many", 64, 40)  # of other directions
    plain = error(searched(weight, 4, 32), weight, other)
    assert error(calibrated(weight, h, 8, 4, 32), weight, other) < 1.3 * plain
    assert error(calibrated(weight, h, None, 4, 32), weight, other) > 1.5 * plain


def test_how_far_moments_are_shrunk() -> None:
    x = normal(100_000, 32)
    few, many, unit = x[:4].T @ x[:4], x.T @ x, torch.eye(32, dtype=torch.float64)
    assert torch.equal(shrunk(many, 0), unit) and torch.equal(shrunk(torch.zeros(32, 32), 5), unit)
    assert torch.allclose(shrunk(few, 4), 1.01 * unit, atol=0.15)
    # Inputs without any direction are the unit matrix all the same, and what has some keeps them when it is sure.
    steep = x * torch.linspace(0.1, 2, 32)
    h = (steep.T @ steep).double()
    wanted = h / h.diagonal().mean() + 0.01 * unit
    assert torch.allclose(shrunk(h, 100_000), wanted, atol=1e-3) and torch.allclose(shrunk(h, None), wanted)
    assert float((shrunk(h, 10) - wanted).abs().max()) > 0.1
    assert bool((torch.linalg.eigvalsh(shrunk(few, 4)) > 0).all())


def brute(weight: Tensor, h: Tensor, scale: float) -> float:
    """The least error that levels -1, 0, 1 at a scale can have, of one row."""
    levels = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=weight.shape[1])), dtype=torch.float64)
    off = levels * scale - weight.double()
    return float(((off @ h.double()) * off).sum(1).min())


def test_it_comes_near_the_best_levels_that_there_are() -> None:
    excess, plain = 0.0, 0.0
    for seed in range(12):
        weight, h = normal(1, 8, seed=seed), moments("many", 8, seed)
        with_damping = shrunk(h, 400)
        values, scales = calibrate_blocks(weight, h, 400, 2, 8)
        found = error(dequantize_blocks(values, scales), weight, with_damping)
        best = brute(weight, with_damping, float(scales))
        assert found >= best * (1 - 1e-5)
        nearest = torch.round(weight / scales.float()).clamp(-1, 1) * scales.float()
        excess, plain = excess + found / best - 1, plain + error(nearest, weight, with_damping) / best - 1
    assert excess < 0.2 * plain


def test_only_the_relations_of_moments_count() -> None:
    weight, h = normal(20, 64), moments("many", 64, 2)
    assert torch.equal(calibrated(weight, h * 1024, 400, 4, 32), calibrated(weight, h, 400, 4, 32))
    assert torch.equal(calibrated(weight, h.double(), 400, 4, 32), calibrated(weight, h, 400, 4, 32))
    before = weight.clone()
    assert torch.equal(calibrated(weight[:7], h, 400, 4, 32), calibrated(weight, h, 400, 4, 32)[:7])
    assert torch.equal(weight, before)


def test_what_lies_on_levels_stays() -> None:
    weight = dequantize_blocks(*quantize_blocks(normal(20, 64), 4, 32))
    assert torch.equal(calibrated(weight, moments("many", 64, 2), 400, 4, 32), weight)


def test_what_does_not_fit_is_refused() -> None:
    weight, h = normal(4, 64), moments("many", 64, 2)
    with pytest.raises(ValueError, match="don't divide"):
        calibrate_blocks(weight, h, 400, 4, 48)
    for wrong in (h[:32], h[:32, :32], h * torch.nan, h / 0):
        with pytest.raises(ValueError, match="moments must be finite, 64 x 64"):
            calibrate_blocks(weight, wrong, 400, 4, 32)
    with pytest.raises(ValueError, match="beyond half precision"):
        calibrate_blocks(weight * 1e9, h, 400, 4, 32)
