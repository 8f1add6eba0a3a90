"""Palettes: what they must hold whatever the weights are, and the search for their levels against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from needle_export.weights import palette
from needle_export.weights.linear import dequantize_blocks, quantize_blocks
from needle_export.weights.palette import dequantize_palette, palettize

Floats = NDArray[np.float32]


def found(weight: Floats, bits: int = 4, group: int = 16) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    indices, levels = palettize(torch.from_numpy(weight), bits, group)
    assert indices.dtype == torch.uint8 and levels.dtype == torch.float16
    assert indices.shape == weight.shape and levels.shape == (len(weight) // group, 2**bits)
    return indices.numpy(), levels.numpy()


def restored(indices: NDArray[np.uint8], levels: NDArray[np.float16]) -> Floats:
    back: Floats = dequantize_palette(torch.from_numpy(indices), torch.from_numpy(levels)).numpy()
    assert back.dtype == np.float32
    return back


def samples() -> dict[str, Floats]:
    rng = np.random.default_rng(0)
    bell = rng.standard_normal((64, 96))
    return {
        "normal": bell.astype(np.float32),
        "laplace": rng.laplace(size=(64, 96)).astype(np.float32),
        "uniform": rng.uniform(-1, 1, (64, 96)).astype(np.float32),
        "all positive": np.abs(bell).astype(np.float32) + 3,
        "outliers": (bell * np.where(rng.random((64, 96)) < 0.01, 20, 1)).astype(np.float32),
        "rows of many sizes": (bell * 10.0 ** rng.uniform(-2, 2, (64, 1))).astype(np.float32),
        "mostly zeros": np.where(rng.random((64, 96)) < 0.9, 0, bell).astype(np.float32),
    }


SAMPLES = samples()


def by_definition(entries: Floats, count: int, start: Floats) -> NDArray[np.float16]:
    """Lloyd's iterations entry by entry: to the nearest level, the upper of two as near; levels become means."""
    levels = start.copy()
    for _ in range(palette._ITERATIONS):
        between = (levels[1:] + levels[:-1]) / np.float32(2)
        members: list[list[float]] = [[] for _ in range(count)]
        for entry in entries:
            members[int((between <= entry).sum())].append(float(entry))
        levels = np.array(
            [math.fsum(m) / len(m) if m else old for m, old in zip(members, levels, strict=True)], np.float32
        )
    return levels.astype(np.float16)


@pytest.mark.parametrize("name", SAMPLES)
def test_levels_are_those_of_lloyds_iterations(name: str) -> None:
    weight = SAMPLES[name][:16, :24]
    indices, levels = found(weight)
    start = palette._start(torch.from_numpy(np.sort(weight.reshape(1, -1))), 16)[0].numpy()
    assert (np.diff(start) >= 0).all() and start[0] >= weight.min() and start[-1] <= weight.max()
    assert np.array_equal(levels[0], by_definition(weight.reshape(-1), 16, start))
    # Every entry has the nearest of the levels as they are stored, halfway the upper.
    wide = levels[0].astype(np.float32)
    between = (wide[1:] + wide[:-1]) / np.float32(2)
    assert np.array_equal(indices, (between <= weight[..., None]).sum(-1))


@pytest.mark.parametrize("bits", [1, 2, 4, 6])
@pytest.mark.parametrize("name", SAMPLES)
def test_no_entry_is_nearer_to_another_level(name: str, bits: int) -> None:
    weight = SAMPLES[name]
    indices, levels = found(weight, bits)
    assert (np.diff(levels.astype(np.float32), axis=1) >= 0).all() and indices.max() < 2**bits
    distance = np.abs(weight.reshape(4, -1, 1) - levels.astype(np.float32)[:, None])
    off = np.abs(restored(indices, levels) - weight)
    assert np.array_equal(off, distance.min(-1).reshape(weight.shape))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_error_is_not_above_that_of_uniform_levels(name: str) -> None:
    """Of 15 levels with the same rows to serve: that is what a palette stands instead of."""
    weight = SAMPLES[name]
    rows = torch.from_numpy(weight.reshape(4, -1))
    uniform = dequantize_blocks(*quantize_blocks(rows, 4, rows.shape[1])).numpy().reshape(weight.shape)
    error, beaten = (float(((w - weight).astype(np.float64) ** 2).sum()) for w in (restored(*found(weight)), uniform))
    assert 0 < error < beaten
    if name == "normal":
        # The least error that any 16 levels have on this density is 0.0095 of the variance (J. Max, 1960).
        assert error / float((weight**2).sum()) < 0.0105 and beaten > 1.5 * error


@pytest.mark.parametrize("seed", range(20))
def test_few_values_are_kept(seed: int) -> None:
    """However unevenly they are spread, and however unlike the groups are."""
    rng = np.random.default_rng(seed)
    weight = np.empty((64, 40), np.float32)
    for rows in np.split(weight, 4):
        values = np.unique(10.0 ** rng.uniform(-3, 1) * rng.standard_normal(rng.integers(1, 17))).astype(np.float16)
        shares = rng.dirichlet(np.full(len(values), rng.choice([0.2, 1.0, 10.0])))
        rows[:] = rng.choice(values, rows.shape, p=shares)
    indices, levels = found(weight)
    assert np.array_equal(restored(indices, levels), weight)
    assert (np.diff(levels.astype(np.float32), axis=1) >= 0).all()


def test_seventeen_values_are_not() -> None:
    weight = np.tile(np.arange(17, dtype=np.float32), (16, 1))
    assert len(np.unique(restored(*found(weight)))) == 16


def test_groups_know_nothing_of_each_other() -> None:
    weight = np.concatenate([SAMPLES["normal"], SAMPLES["mostly zeros"], 100 * SAMPLES["laplace"]])
    indices, levels = found(weight)
    for at in range(len(weight) // 16):
        rows = slice(16 * at, 16 * (at + 1))
        alone = found(weight[rows])
        assert np.array_equal(indices[rows], alone[0]) and np.array_equal(levels[at], alone[1][0])


def test_a_large_weight_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SAMPLES["rows of many sizes"]
    whole = found(weight, group=4)
    monkeypatch.setattr(palette, "_AT_ONCE", 3 * 4 * 96 + 5)
    parts = found(weight, group=4)
    assert np.array_equal(whole[0], parts[0]) and np.array_equal(whole[1], parts[1])


def test_the_order_of_rows_in_a_group_does_not_matter() -> None:
    weight = SAMPLES["laplace"][:16]
    order = np.random.default_rng(1).permutation(16)
    indices, levels = found(weight)
    turned = found(np.ascontiguousarray(weight[order]))
    assert np.array_equal(levels, turned[1]) and np.array_equal(indices[order], turned[0])


def test_zeros_and_single_entries() -> None:
    assert (restored(*found(np.zeros((16, 8), np.float32))) == 0).all()
    assert restored(*found(np.full((1, 1), 0.5, np.float32), group=1)).tolist() == [[0.5]]


@pytest.mark.parametrize("group", [0, 5])
def test_groups_that_do_not_fit(group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} don't divide 16 rows"):
        palettize(torch.zeros(16, 8), 4, group)


def test_a_level_beyond_half_precision() -> None:
    weight = torch.full((16, 8), 65504.0)
    palettize(weight, 4, 16)
    with pytest.raises(ValueError, match="a level is beyond half precision"):
        palettize(weight * 1.001, 4, 16)
