"""Containers of our own making: what is kept as it is, and what becomes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from needle_export.checkpoint.checkpoint import drop_head, read_checkpoint
from needle_export.checkpoint.cq import PackedTensor, has_invalid_crumbs, unpack
from needle_export.checkpoint.geometry import SMALL, Geometry, optional_shapes, tensor_shapes
from needle_export.checkpoint.sample import make_sample
from needle_export.weights.cq import TERNARY, hadamard
from tests.support.containers import container_bytes, rough_books, tokenizer_blob
from tests.support.geometries import VARIANTS


def write(path: Path, geometry: Geometry, **options: object) -> dict[str, np.ndarray]:
    tensors = make_sample(geometry, 0)
    path.write_bytes(container_bytes(geometry, tensors, **options))  # type: ignore[arg-type]  # one helper for all options
    return tensors


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("float_heads", [False, True])
def test_geometry_and_tensors(name: str, float_heads: bool, tmp_path: Path) -> None:
    geometry = VARIANTS[name]
    tensors = write(tmp_path / "m", geometry, float_heads=float_heads, tokenizer=tokenizer_blob())
    checkpoint = read_checkpoint(tmp_path / "m")
    assert checkpoint.geometry == geometry
    assert checkpoint.tokenizer == tokenizer_blob()
    assert checkpoint.source.format == "cact" and not checkpoint.source.random
    shapes = tensor_shapes(geometry) | {key: shape for key, shape in optional_shapes(geometry).items()
                                        if key == "router_head/calibration"}
    assert checkpoint.store.shapes() == shapes
    for key in shapes:
        ours, original = checkpoint.tensors[key], tensors[key]
        if ours.dtype == np.float16:
            np.testing.assert_array_equal(ours, original)
        else:
            # Four bits of Lloyd-Max leave about 1 % of the energy as error.
            error = np.linalg.norm(ours - original.astype(np.float32)) / np.linalg.norm(original)
            assert error < 0.15, key


def test_float16_matrices_are_read_exactly(tmp_path: Path) -> None:
    tensors = write(tmp_path / "m", SMALL, bits=0, float_heads=True)
    checkpoint = read_checkpoint(tmp_path / "m")
    assert checkpoint.packed == {} and checkpoint.tokenizer is None
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name], array)
        assert checkpoint.entry(name).stored == "float16"


@pytest.mark.parametrize("bits", [1, 2, 3, 4, TERNARY])
def test_packed_matrices_are_the_file_s(bits: int, tmp_path: Path) -> None:
    write(tmp_path / "m", SMALL, bits=bits)
    data = (tmp_path / "m").read_bytes()
    checkpoint = read_checkpoint(tmp_path / "m")
    q_proj = "stack/layers/block/self_attn/q_proj/kernel"
    names = {name.partition("#")[0] for name in checkpoint.packed}
    assert names == {name for name in checkpoint.tensors
                     if name.endswith(("kernel", "embedding", "probes", "query")) or "mhc_phi" in name}
    for name, packed in checkpoint.packed.items():
        assert packed.name == name
        assert packed.packed.tobytes() in data and packed.norms.tobytes() in data
        assert not packed.packed.flags.writeable and not packed.packed.flags.owndata
        assert packed.indices().shape == (packed.shape[0], packed.in_pad)
        assert packed.indices().max() < len(packed.codebook)
        assert packed.nbytes == packed.packed.nbytes + packed.norms.nbytes
    for layer in range(SMALL.num_layers):
        packed = checkpoint.packed[f"{q_proj}#{layer}"]
        assert packed.shape == (192, 96)
        np.testing.assert_array_equal(packed.dequantize().T, checkpoint.tensors[q_proj][layer])
        lanes = checkpoint.packed[f"stack/mhc_phi_res#{layer}"]
        np.testing.assert_array_equal(lanes.dequantize().T, checkpoint.tensors["stack/mhc_phi_res"][layer])
    expected = "ternary" if bits == TERNARY else f"cq{bits}"
    assert checkpoint.entry(q_proj).stored == expected


def test_dequantisation_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    group, out, in_dim = 32, 5, 70
    packed = rng.integers(0, 256, (out, 96 * 3 // 8), dtype=np.uint8)
    norms = rng.uniform(0, 1, (out, 3)).astype(np.float16)
    book = rough_books(group)[3]
    tensor = PackedTensor("t", (out, in_dim), 3, group, packed, norms, book)
    index = tensor.indices()
    # Index j of a row is the three bits from 3 j on, lowest first.
    bits = np.unpackbits(packed, axis=1, bitorder="little").reshape(out, 96, 3)
    np.testing.assert_array_equal(index, bits @ np.array([1, 2, 4]))
    rotated = (book[index].reshape(out, 3, group) * norms[:, :, None].astype(np.float64)) @ hadamard(group)
    np.testing.assert_allclose(tensor.dequantize(), rotated.reshape(out, 96)[:, :in_dim], atol=1e-6)


def test_slices_of_rows_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (300, 128), dtype=np.uint8)
    tensor = PackedTensor("t", (300, 256), 4, 128, packed, rng.uniform(0, 1, (300, 2)).astype(np.float16),
                          rough_books(128)[4])
    whole = tensor.dequantize()
    monkeypatch.setattr("needle_export.checkpoint.cq._SLICE_ELEMENTS", 7 * 256)
    np.testing.assert_array_equal(tensor.dequantize().view(np.uint32), whole.view(np.uint32))
    some = np.array([5, 0, 299], np.intp)
    np.testing.assert_array_equal(tensor.take(some).dequantize(), whole[some])
    np.testing.assert_array_equal(tensor.rows(10, 20, "u").dequantize(), whole[10:20])


def test_ternary_crumbs() -> None:
    stream = np.array([[0b01_00_11_00, 0b11_11_01_01]], np.uint8)
    assert unpack(stream, TERNARY, 8).tolist() == [[1, 0, 1, 2, 2, 2, 0, 0]]
    assert not has_invalid_crumbs(stream)
    for shift in (0, 2, 4, 6):
        assert has_invalid_crumbs(np.array([2 << shift], np.uint8))


def test_kv_settings_and_permutations_are_kept(tmp_path: Path) -> None:
    geometry = dataclasses.replace(SMALL, kv_window=160, kv_bits=3)
    write(tmp_path / "m", geometry)
    read = read_checkpoint(tmp_path / "m")
    assert (read.geometry.kv_window, read.geometry.kv_bits) == (160, 3)
    for permutation, seed in zip(read.permutations, (11, 13), strict=True):
        assert permutation.dtype == np.int64
        np.testing.assert_array_equal(permutation, np.random.RandomState(seed).permutation(128))


def test_reading_does_not_dequantise(tmp_path: Path) -> None:
    import tracemalloc

    write(tmp_path / "m", SMALL, bits=1)
    size = (tmp_path / "m").stat().st_size
    tracemalloc.start()
    checkpoint = read_checkpoint(tmp_path / "m")
    assert tracemalloc.get_traced_memory()[1] < size
    table = checkpoint.tensors["engrams_0/embedding"]
    assert tracemalloc.get_traced_memory()[1] > table.nbytes
    # An array in use is handed out again, and forgotten with its last user.
    assert checkpoint.tensors["engrams_0/embedding"] is table
    tracemalloc.stop()


def test_dropping_a_head(tmp_path: Path) -> None:
    write(tmp_path / "m", VARIANTS["all_heads"])
    checkpoint = read_checkpoint(tmp_path / "m")
    smaller = drop_head(checkpoint, "confidence")
    assert [head.name for head in smaller.geometry.heads] == ["embedding", "router"]
    gone = set(checkpoint.tensors) - set(smaller.tensors)
    assert gone and all(name.startswith("confidence_head/") for name in gone)
    assert set(checkpoint.packed) - set(smaller.packed) == gone & set(checkpoint.packed)
    assert drop_head(smaller, "confidence") is smaller
    assert smaller.store.shapes().items() >= tensor_shapes(smaller.geometry).items()
