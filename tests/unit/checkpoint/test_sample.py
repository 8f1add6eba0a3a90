"""Random checkpoints: deterministic, labelled, storable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from needle_export import __version__
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, SMALL, optional_shapes, tensor_shapes
from needle_export.checkpoint.sample import make_sample, write_sample
from tests.support.geometries import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_are_complete_finite_and_not_dead(name: str) -> None:
    geometry = VARIANTS[name]
    tensors = make_sample(geometry, 0)
    assert {key: value.shape for key, value in tensors.items()} == (
        tensor_shapes(geometry) | optional_shapes(geometry))
    for key, array in tensors.items():
        assert array.dtype == np.float16 and np.isfinite(array).all(), key
        assert array.size == 1 or array.std() > 0, key


def test_seeds_decide() -> None:
    first, again, other = make_sample(SMALL, 0), make_sample(SMALL, 0), make_sample(SMALL, 1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        assert not np.array_equal(array, other[name]), name


def test_the_stream_is_pinned() -> None:
    # Results recorded from a sample can only be compared while the same seed means the same weights.
    tensors = make_sample(SMALL, 0)
    np.testing.assert_allclose(tensors["embedding/embedding"][0, :4], [0.03543, 0.01141, -0.02309, -0.005215],
                               rtol=1e-3)
    np.testing.assert_allclose(tensors["stack/layers/block/attn_gate"], [4.871, 4.121, 4.453], rtol=1e-3)


def test_tensors_do_not_depend_on_other_tensors() -> None:
    assert np.array_equal(make_sample(SMALL, 0)["embedding/embedding"],
                          make_sample(VARIANTS["no_taps"], 0)["embedding/embedding"])


def test_the_file_says_that_it_is_random(tmp_path: Path) -> None:
    write_sample(tmp_path / "m.safetensors", SMALL, 9)
    source = read_checkpoint(tmp_path / "m.safetensors").source
    assert source.random
    assert source.run == {"random": True, "seed": 9, "generator": f"needle-export {__version__}"}


@pytest.mark.slow
@pytest.mark.published
def test_the_published_size(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_sample(path, PUBLISHED, 0)
    assert abs(path.stat().st_size - 242_047_978) < 20_000
    assert read_checkpoint(path).geometry == PUBLISHED
