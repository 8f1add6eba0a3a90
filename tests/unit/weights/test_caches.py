"""Rows of caches against their definition in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from needle_export.errors import Unsupported
from needle_export.weights.caches import LEAST, quantize_rows, stored


def rows(seed: int = 0) -> np.ndarray:
    """[T, G, D] of very different sizes; one row of zeros, one below float32's normal numbers."""
    rng = np.random.default_rng(seed)
    found = (10.0 ** rng.uniform(-6, 6, (40, 2, 1)) * rng.standard_normal((40, 2, 48))).astype(np.float32)
    found[3, 1], found[5, 0] = 0.0, found[5, 0] * np.float32(1e-44)
    return found


def test_it_is_the_definition_bit_for_bit() -> None:
    given = rows()
    levels, scales = quantize_rows(torch.from_numpy(given))
    assert levels.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (40, 2, 1)
    for at in np.ndindex(40, 2):
        scale = max(np.abs(given[at]).max() / np.float32(127), np.float32(LEAST))
        assert scales[at].item() == scale
        assert np.array_equal(levels[at].numpy(), np.rint(given[at] / scale))
    assert int(levels.abs().max()) == 127 and bool((scales > 0).all())
    back = stored(torch.from_numpy(given), "int8").numpy()
    assert np.array_equal(back, levels.numpy().astype(np.float32) * scales.numpy())
    assert (np.abs(back - given) <= 0.5001 * scales.numpy()).all()
    assert not back[3, 1].any() and not levels[3, 1].any()


@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_a_row_depends_on_nothing_but_itself(form: str) -> None:
    given = torch.from_numpy(rows(1)).clamp(-6e4, 6e4)
    whole = stored(given, form)
    parts = [stored(given[t : t + 1, g : g + 1], form) for t in range(40) for g in range(2)]
    assert torch.equal(torch.cat(parts).reshape(whole.shape), whole) and not torch.equal(whole, given)
    if form == "fp16":
        assert torch.equal(whole, given.half().float()) and torch.equal(stored(whole, form), whole)


def test_floats_stay() -> None:
    given = torch.from_numpy(rows())
    assert stored(given, "fp32") is given


def test_what_no_half_holds_is_refused() -> None:
    given = torch.from_numpy(rows()).clamp(-6e4, 6e4)
    given[0, 0, 0] = 7e4
    with pytest.raises(Unsupported, match="beyond half precision"):
        stored(given, "fp16")
    assert bool(torch.isfinite(stored(given, "int8")).all())
    with pytest.raises(ValueError, match="no form"):
        stored(given, "int4")


def test_jitter_moves_a_few_levels_by_one() -> None:
    given = torch.from_numpy(rows(2)).repeat(50, 1, 1)
    levels, scales = quantize_rows(given)
    moved = stored(given, "int8", torch.Generator().manual_seed(0)) / scales - levels
    assert torch.equal(stored(given, "int8", torch.Generator().manual_seed(0)) / scales - levels, moved)
    steps = moved.abs().round()
    # 2^-20 of a row's greatest is a ten-thousandth of a level; rows of zeros stay.
    assert int(steps.max()) == 1 and 0 < float((steps > 0).float().mean()) < 1e-3
    assert not bool(moved[3, 1].any())
