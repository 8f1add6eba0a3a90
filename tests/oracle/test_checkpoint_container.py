"""Containers against the package's own writer and reader."""

from __future__ import annotations

import struct
from pathlib import Path

import jax
import numpy as np
import pytest
from needle.model import checkpoints, export, quantize
from needle.model.architecture import ladder_slice
from needle.model.whistle import Whistle, WhistleConfig

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, Geometry, tensor_shapes
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.sample import make_sample
from needle_export.checkpoint.walk import Slot
from needle_export.errors import BadInput
from tests.support import oracle
from tests.support.containers import TERNARY, container_bytes
from tests.support.geometries import VARIANTS

BOOKS = {bits: quantize._cq_codebook_np(bits, 128) for bits in (2, 3, 4)}
MATRICES = ("embedding/embedding", "kernel", "mhc_phi_pre", "mhc_phi_post", "mhc_phi_res", "probes", "query")


def write_export(path: Path, geometry: Geometry, tensors: dict[str, np.ndarray]) -> None:
    config = oracle.oracle_config(geometry)
    export.write_export(oracle.to_tree(tensors), config, path, kv_window=geometry.kv_window)


def expected_tensors(geometry: Geometry, path: Path) -> dict[str, np.ndarray]:
    """The package's reading of a container, put into tree orientation by position."""
    _, arrays = export.read_export(path)
    it = iter(arrays)
    g = geometry
    taken: dict[str, list[np.ndarray]] = {}

    def take(name: str, *, transpose: bool = False) -> None:
        array = next(it)
        taken.setdefault(name, []).append(array.T if transpose else array)

    block, attn, mlp = "stack/layers/block", "stack/layers/block/self_attn", "stack/layers/block/hadamard_mlp"
    take("embedding/embedding")
    for _ in range(g.num_layers):
        take(f"{block}/ZCRMSNorm_0/scale")
        for name in ("q_proj", "k_proj", "v_proj"):
            take(f"{attn}/{name}/kernel", transpose=True)
        for name in ("q_taps", "k_taps", "v_taps") if g.qkv_conv_taps else ():
            take(f"{attn}/{name}")
        take(f"{attn}/q_norm/scale")
        take(f"{attn}/k_norm/scale")
        take(f"{attn}/gate_proj/kernel", transpose=True)
        take(f"{attn}/out_proj/kernel", transpose=True)
        take(f"{block}/post_attn_norm/scale")
        take(f"{block}/attn_gate")
        take(f"{block}/pre_hada_norm/scale")
        for name in ("d1", "d2", "b2", "d3", "d4", "w1a", "w1b", "w2a", "w2b", "w3a", "w3b", "cond_v",
                     "cond_u"):
            take(f"{mlp}/{name}")
    for name in ("a_pre", "a_post", "a_res", "b_pre", "b_post", "b_res"):
        take(f"stack/mhc_{name}")
    for name in ("phi_pre", "phi_post", "phi_res"):
        rows = next(it)
        stacked = rows.reshape(g.num_layers, -1, rows.shape[1]).transpose(0, 2, 1)
        taken[f"stack/mhc_{name}"] = [stacked]
    take("hada_p1")
    take("hada_p2")
    for site in range(len(g.engram_layers)):
        take(f"engrams_{site}/embedding")
        take(f"engrams_{site}/key_proj/kernel", transpose=True)
        take(f"engrams_{site}/value_proj/kernel", transpose=True)
        take(f"engrams_{site}/taps")
    take("stack/final_norm/scale")
    if g.heads:
        next(it)
    for head in g.heads:
        for name in ("probes", "gain", "query", "row_bias"):
            take(f"{head.key}/{name}")
        take(f"{head.key}/proj/kernel", transpose=True)
        take(f"{head.key}/proj/bias")
        if head.name == "router":
            take(f"{head.key}/calibration")
    assert not [left for left in it if not isinstance(left, bytes)]
    shapes = tensor_shapes(g) | {"router_head/calibration": (3,)}
    return {name: np.stack(parts).reshape(shapes.get(name, (-1,))) for name, parts in taken.items()}


def assert_same(geometry: Geometry, path: Path) -> None:
    checkpoint = read_checkpoint(path)
    expected = expected_tensors(geometry, path)
    first, second = checkpoint.permutations
    np.testing.assert_array_equal(first, expected.pop("hada_p1"))
    np.testing.assert_array_equal(second, expected.pop("hada_p2"))
    expected.pop("embedding_head/proj/bias", None)
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        ours = checkpoint.tensors[name]
        assert ours.shape == array.shape, name
        # Compared as bits, so that a zero of the other sign would show too.
        np.testing.assert_array_equal(ours.astype(np.float32).view(np.uint32),
                                      np.ascontiguousarray(array, np.float32).view(np.uint32), err_msg=name)


@pytest.mark.parametrize("name", VARIANTS)
def test_reads_what_the_package_writes(name: str, tmp_path: Path) -> None:
    geometry, path = VARIANTS[name], tmp_path / "m.cact"
    write_export(path, geometry, make_sample(geometry, 3))
    assert_same(geometry, path)
    read = read_checkpoint(path).geometry
    # The container has no room for these two.
    assert read == geometry
    header, _ = export.read_export(path)
    assert read.kv_window == header["kv_window"] and read.kv_bits == header["kv_bits"]


@pytest.mark.parametrize("name", ["small", "all_heads", "no_taps", "split"])
def test_our_test_writer_writes_the_package_s_bytes(name: str, tmp_path: Path) -> None:
    geometry, path = VARIANTS[name], tmp_path / "m.cact"
    tensors = make_sample(geometry, 5)
    write_export(path, geometry, tensors)
    assert container_bytes(geometry, tensors, bits=4, books=BOOKS) == path.read_bytes()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, TERNARY])
def test_every_width_to_the_bit(bits: int, tmp_path: Path) -> None:
    geometry, path = VARIANTS["all_heads"], tmp_path / "m.cact"
    path.write_bytes(container_bytes(geometry, make_sample(geometry, 1), bits=bits, books=BOOKS))
    assert_same(geometry, path)
    packed = read_checkpoint(path).packed["embedding/embedding"]
    raw_bits = quantize.TERNARY_BITS if bits == TERNARY else bits
    np.testing.assert_array_equal(packed.codebook, quantize._cq_codebook_np(raw_bits, 128))
    unpack = (export._unpack_ternary_crumbs(packed.packed, packed.in_pad) if bits == TERNARY
              else export._unpack_lsb(packed.packed, bits, packed.in_pad))
    np.testing.assert_array_equal(packed.indices(), unpack)


@pytest.mark.slow
@pytest.mark.published
def test_the_published_widths_to_the_bit(tmp_path: Path) -> None:
    # Six groups a row instead of one or two: another BLAS path. Four layers reach an engram site.
    geometry, path = PUBLISHED.with_layers(4), tmp_path / "m.cact"
    write_export(path, geometry, make_sample(geometry, 3))
    assert_same(geometry, path)


def test_mixed_widths_as_published(tmp_path: Path) -> None:
    geometry, path = VARIANTS["deep"], tmp_path / "m.cact"

    def width(slot: Slot) -> int:
        return 4 if slot.tensor == "embedding/embedding" or "mhc_phi" in slot.tensor else 2

    path.write_bytes(container_bytes(geometry, make_sample(geometry, 1), bits=width, books=BOOKS))
    assert_same(geometry, path)
    formats = {read_checkpoint(path).packed[name].bits for name in ("embedding/embedding",
                                                                    "stack/mhc_phi_res#3")}
    assert formats == {4}
    assert read_checkpoint(path).packed["stack/layers/block/self_attn/q_proj/kernel#6"].bits == 2


def test_float_heads_layout(tmp_path: Path) -> None:
    geometry, path = VARIANTS["all_heads"], tmp_path / "m.cact"
    tensors = make_sample(geometry, 2)
    path.write_bytes(container_bytes(geometry, tensors, books=BOOKS, float_heads=True))
    assert_same(geometry, path)
    np.testing.assert_array_equal(read_checkpoint(path).tensors["router_head/probes"],
                                  tensors["router_head/probes"])


def test_other_group_size(tmp_path: Path) -> None:
    geometry, path = VARIANTS["small"], tmp_path / "m.cact"
    books = {bits: quantize._cq_codebook_np(bits, 32) for bits in (2, 3, 4)}
    path.write_bytes(container_bytes(geometry, make_sample(geometry, 1), bits=3, group=32, books=books))
    assert_same(geometry, path)


def test_sliced_container_equals_the_package_s_sliced_arrays(tmp_path: Path) -> None:
    geometry, path = VARIANTS["deep"], tmp_path / "m.cact"
    write_export(path, geometry, make_sample(geometry, 4))
    checkpoint = read_checkpoint(path)
    tree = oracle.to_tree(expected_tensors(geometry, path))
    for permutation in ("hada_p1", "hada_p2"):
        tree.pop(permutation)
    for depth in range(2, geometry.num_layers):
        expected = oracle.to_tensors(ladder_slice(tree, oracle.oracle_config(geometry), depth))
        rung = slice_ladder(checkpoint, depth)
        assert set(rung.tensors) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(rung.tensors[name], array, err_msg=name)
        for name, packed in rung.packed.items():
            tensor, mark, layer = name.partition("#")
            whole = rung.tensors[tensor]
            part = whole[int(layer)] if mark else whole
            matrix = packed.dequantize()
            straight = tensor.endswith(("embedding", "probes", "query"))
            np.testing.assert_array_equal(matrix if straight else matrix.T,
                                          part.reshape(matrix.shape if straight else matrix.T.shape))


def test_a_whistle_container_is_refused(tmp_path: Path) -> None:
    config = WhistleConfig(text=64, dim=128, enc_layers=1, dec_layers=2, sites=(1,), slots=32, stem=32)
    shapes = jax.eval_shape(
        lambda key: Whistle(config).init(key, np.zeros((1, 16000), np.float32), np.full(1, 16000),
                                         np.ones((1, 4), np.int32)), jax.random.PRNGKey(0))["params"]
    tree = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, np.float32), shapes)
    path = tmp_path / "whistle.cact"
    export.write_export(tree, config.needle(), path, audio=config)
    with pytest.raises(BadInput, match="Whistle"):
        read_checkpoint(path)
    checkpoints.write_checkpoint(tmp_path / "whistle.safetensors", {
        "format_version": 2, "params": tree, "config": vars(config)})
    with pytest.raises(BadInput, match="Whistle"):
        read_checkpoint(tmp_path / "whistle.safetensors")


def test_header_codebooks_are_the_computed_ones(tmp_path: Path) -> None:
    geometry, path = VARIANTS["small"], tmp_path / "m.cact"
    write_export(path, geometry, make_sample(geometry, 3))
    packed = read_checkpoint(path).packed["embedding/embedding"]
    np.testing.assert_array_equal(packed.codebook, BOOKS[4])
    assert struct.unpack_from("<I", path.read_bytes(), 8) == (28,)
