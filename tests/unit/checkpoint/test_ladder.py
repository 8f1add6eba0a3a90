"""Rungs: which blocks they keep, and what becomes of what belongs to them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, SMALL, parameter_count, tensor_shapes
from needle_export.checkpoint.ladder import ladder_geometry, ladder_layers, ladder_order, slice_ladder
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import UsageError
from tests.support.containers import container_bytes
from tests.support.geometries import ALL_HEADS

DEEP = dataclasses.replace(SMALL.with_layers(7), heads=ALL_HEADS)


def test_the_published_order() -> None:
    assert ladder_order(PUBLISHED) == (
        0, 19, 9, 14, 4, 6, 11, 16, 2, 7, 12, 17, 1, 3, 5, 8, 10, 13, 15, 18)
    assert ladder_layers(PUBLISHED, 2) == (0, 19)
    assert ladder_layers(PUBLISHED, 3) == (0, 9, 19)


@pytest.mark.parametrize("layers", range(1, 30))
def test_orders_bisect_the_widest_gap(layers: int) -> None:
    order = ladder_order(PUBLISHED.with_layers(layers))
    assert sorted(order) == list(range(layers))
    for count in range(2, layers):
        kept = sorted(order[:count])
        gaps = [right - left for left, right in itertools.pairwise(kept)]
        left = kept[gaps.index(max(gaps))]
        assert order[count] == left + max(gaps) // 2


def test_rungs_nest() -> None:
    for depth in range(2, 20):
        assert set(ladder_layers(PUBLISHED, depth)) < set(ladder_layers(PUBLISHED, depth + 1))


def test_a_rung_s_geometry() -> None:
    rung = ladder_geometry(PUBLISHED, 8)
    kept = ladder_layers(PUBLISHED, 8)
    assert [kept[layer] for layer in rung.global_layers] == [g for g in PUBLISHED.global_layers if g in kept]
    assert [kept[layer] for layer in rung.engram_layers] == [s for s in PUBLISHED.engram_layers if s in kept]
    rung.validate()
    assert parameter_count(rung) < parameter_count(PUBLISHED)


@pytest.mark.parametrize("depth", [-1, 0, 1, 8, 100])
def test_impossible_depths(depth: int, tmp_path: Path) -> None:
    write_sample(tmp_path / "m", DEEP, 0)
    with pytest.raises(UsageError, match="between 2 and 7"):
        slice_ladder(read_checkpoint(tmp_path / "m"), depth)


def test_the_full_depth_is_the_checkpoint_itself(tmp_path: Path) -> None:
    write_sample(tmp_path / "m", DEEP, 0)
    checkpoint = read_checkpoint(tmp_path / "m")
    assert slice_ladder(checkpoint, 7) is checkpoint


def test_slicing_takes_blocks_rows_and_sites(tmp_path: Path) -> None:
    write_sample(tmp_path / "m", DEEP, 0)
    whole = make_sample(DEEP, 0)
    rung = slice_ladder(read_checkpoint(tmp_path / "m"), 4)
    kept = list(ladder_layers(DEEP, 4))
    assert kept == [0, 1, 3, 6] and DEEP.engram_layers == (1, 3, 5)
    assert rung.geometry.engram_layers == (1, 2) and rung.parent_layers == 7
    rows = [0, *(layer + 1 for layer in kept)]
    gate = "stack/layers/block/attn_gate"
    np.testing.assert_array_equal(rung.tensors[gate], whole[gate][kept])
    np.testing.assert_array_equal(rung.tensors["router_head/probes"], whole["router_head/probes"][rows])
    row_bias = "router_head/row_bias"
    np.testing.assert_array_equal(rung.tensors[row_bias], whole[row_bias][:, rows])
    np.testing.assert_array_equal(rung.tensors["router_head/query"], whole["router_head/query"])
    np.testing.assert_array_equal(rung.tensors["engrams_1/taps"], whole["engrams_1/taps"])
    assert "engrams_2/taps" not in rung.tensors
    assert rung.store.shapes().items() >= tensor_shapes(rung.geometry).items()


def test_slicing_renumbers_codes(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(container_bytes(DEEP, make_sample(DEEP, 0), bits=2))
    checkpoint = read_checkpoint(tmp_path / "m")
    rung = slice_ladder(checkpoint, 3)
    kept = ladder_layers(DEEP, 3)
    assert kept == (0, 3, 6)
    for name, packed in rung.packed.items():
        base, mark, layer = name.partition("#")
        assert packed.name == name
        if mark:
            original = checkpoint.packed[f"{base}#{kept[int(layer)]}"]
            np.testing.assert_array_equal(packed.packed, original.packed)
            assert np.shares_memory(packed.packed, original.packed)
    # Site 1 sits in block 3, and is the only one left.
    np.testing.assert_array_equal(rung.packed["engrams_0/embedding"].packed,
                                  checkpoint.packed["engrams_1/embedding"].packed)
    assert not any(name.startswith("engrams_1") for name in rung.packed)
    probes = "embedding_head/probes"
    np.testing.assert_array_equal(rung.packed[probes].dequantize().reshape(4, 2, 96), rung.tensors[probes])
    assert {name.partition("#")[0] for name in rung.packed} <= set(rung.tensors)
