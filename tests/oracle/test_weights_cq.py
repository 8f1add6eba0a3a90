"""Codebook weights from floats, against what the package's own exporter makes of them, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from needle.model import export, quantize
from numpy.typing import NDArray

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, Geometry
from needle_export.checkpoint.sample import make_sample
from needle_export.weights.cq import TERNARY, codebook, decode, encode
from tests.oracle.test_checkpoint_container import write_export
from tests.support.geometries import VARIANTS

Floats = NDArray[np.float32]

MATRICES = ("embedding", "kernel", "probes", "query")
#: Whose rows are rows of the tree's tensor; of the others they are columns.
TABLES = ("embedding", "probes", "query")


def assert_bits_equal(found: NDArray[np.generic], wanted: NDArray[np.generic]) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("group", [8, 32, 64, 128, 1024])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, TERNARY])
def test_the_levels(bits: int, group: int) -> None:
    theirs = quantize._cq_codebook_np(quantize.TERNARY_BITS if bits == TERNARY else bits, group)
    assert_bits_equal(codebook(bits, group), theirs)


def assert_exported(geometry: Geometry, tensors: dict[str, NDArray[np.generic]], path: Path) -> None:
    """Every matrix of a container, as its reader has it, against our encoding of the floats."""
    checkpoint = read_checkpoint(path)
    # All that may be quantised is: nothing is compared with nothing.
    kernels = {name for name in tensors if name.rsplit("/")[-1] in MATRICES or "mhc_phi" in name}
    assert {name.partition("#")[0] for name in checkpoint.packed} == kernels
    for name, theirs in checkpoint.packed.items():
        tensor, _, layer = name.partition("#")
        array = (tensors[tensor][int(layer)] if layer else tensors[tensor]).astype(np.float32)
        matrix = array.reshape(-1, array.shape[-1]) if tensor.endswith(TABLES) else array.T
        indices, norms = encode(matrix, theirs.bits, theirs.group)
        assert theirs.bits == 4
        assert_bits_equal(indices, theirs.indices())
        assert_bits_equal(norms, np.ascontiguousarray(theirs.norms))
        assert_bits_equal(codebook(4, theirs.group), theirs.codebook)
        back = decode(indices, norms, codebook(4, theirs.group))[:, : matrix.shape[1]]
        assert_bits_equal(np.ascontiguousarray(back), theirs.dequantize())


@pytest.mark.parametrize("name", ["small", "all_heads", "odd_width", "deep"])
def test_every_matrix_of_an_exported_checkpoint(name: str, tmp_path: Path) -> None:
    geometry, path = VARIANTS[name], tmp_path / "m.cact"
    tensors = make_sample(geometry, 6)
    table = tensors["embedding/embedding"]
    table[3] = 0  # a row of zeros, and one whose norm is denormal in half precision
    table[4] *= 1e-5
    write_export(path, geometry, tensors)
    assert_exported(geometry, tensors, path)


@pytest.mark.slow
@pytest.mark.published
def test_every_matrix_at_the_published_width(tmp_path: Path) -> None:
    geometry, path = PUBLISHED.with_layers(4), tmp_path / "m.cact"
    tensors = make_sample(geometry, 2)
    write_export(path, geometry, tensors)
    assert_exported(geometry, tensors, path)


def difficult(rows: int, columns: int, seed: int) -> Floats:
    """Rows of very different sizes, zeros, single spikes, and rows of one value, which lie between levels."""
    rng = np.random.default_rng(seed)
    weight = (10.0 ** rng.uniform(-7, 1, (rows, 1)) * rng.standard_normal((rows, columns))).astype(np.float32)
    weight[::7] = 0
    weight[1::7, rng.integers(columns)] *= 100
    weight[2::7] = rng.standard_normal((len(weight[2::7]), 1))
    weight[3::7] = np.sign(weight[3::7])
    return weight


# The package's own packing, for widths that it no longer writes too: only its check of the width stands in the way.
SHAPES = [(70, 128, 128), (70, 768, 128), (70, 700, 128), (70, 96, 32)]
#: Widths and shapes, and the published embedding's.
CASES = [(bits, *shape) for bits in (1, 2, 3, 4) for shape in SHAPES] + [(4, 8192, 768, 128)]


@pytest.mark.parametrize(("bits", "rows", "columns", "group"), CASES)
def test_any_width(bits: int, rows: int, columns: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "WEIGHT_BITS", bits)
    weight = difficult(rows, columns, bits)
    packed, norms = export._cq_pack(weight, bits, group)
    found = encode(weight, bits, group)
    assert_bits_equal(found[0], export._unpack_lsb(packed, bits, found[0].shape[1]))
    assert_bits_equal(found[1], norms)
    back = decode(*found, codebook(bits, group))[:, :columns]
    assert_bits_equal(np.ascontiguousarray(back), export._cq_unpack(packed, norms, rows, columns, bits, group))


def test_three_levels_are_those_of_training() -> None:
    """The exporter packs no ternary weights; in training they are quantised like this, in JAX."""
    weight = difficult(200, 384, 3)
    indices, norms = encode(weight, TERNARY)
    theirs = np.asarray(quantize.cq_quantize(weight, quantize.TERNARY_BITS))
    ours = decode(indices, norms, codebook(TERNARY, 128))
    # Its sums are in another order: a group's norm may be its neighbour in half precision, and a value between two
    # levels may take the other. Rows of one value are all such ties, and left out.
    drawn = np.arange(200) % 7 > 3
    off = np.abs(theirs - ours)[drawn] > 1e-3 * np.abs(weight[drawn]).max(1, keepdims=True)
    assert off.mean() < 1e-3
    assert not theirs[::7].any() and not ours[::7].any()
