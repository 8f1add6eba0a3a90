"""Checkpoints, rungs and merges against the package's own reader, slicer and merge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from needle.model import architecture, checkpoints, finetune, run

from needle_export.checkpoint.adapter import merge_lora, read_adapter
from needle_export.checkpoint.checkpoint import read_checkpoint, standard_permutations
from needle_export.checkpoint.geometry import PUBLISHED, SMALL, Geometry, optional_shapes, tensor_shapes
from needle_export.checkpoint.ladder import ladder_geometry, ladder_layers, ladder_order, slice_ladder
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import BadInput
from tests.support import oracle
from tests.support.containers import container_bytes
from tests.support.geometries import VARIANTS

RESOLVED = ("vocab_size", "out_vocab", "d_model", "num_heads", "num_kv_heads", "num_layers", "max_seq_len",
            "rope_theta", "mhc_lanes", "sliding_window", "global_layers", "qkv_conv_taps", "engram_slots",
            "engram_seed_heads", "engram_layers", "ladder_order", "kv_window", "kv_bits", "pad_token_id")


def write_theirs(path: Path, tree: dict[str, Any], config: Any, **extra: Any) -> None:
    checkpoints.write_checkpoint(path, {"format_version": 2, "params": tree, "config": config, **extra})


def agrees(geometry: Geometry, config: Any) -> None:
    """Asserts that a geometry says what the package's configuration says."""
    for field in RESOLVED:
        value = getattr(config, field)
        assert getattr(geometry, field) == value, field
    assert (geometry.qk_head_dim, geometry.v_head_dim) == architecture.head_dims(config)
    engram = (geometry.engram_orders, geometry.engram_heads, geometry.engram_sub_dim)
    assert engram == architecture.engram_geometry(config)
    assert geometry.split_permutations == bool(config.ladder_widths)
    assert geometry.hada_blocks == architecture._hada_blocks(geometry.hada_n)
    ours = standard_permutations(geometry.hada_n, geometry.split_permutations)
    theirs = architecture._hada_perms(geometry.hada_n, bool(config.ladder_widths))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_shapes_are_those_of_the_package_s_parameters(name: str) -> None:
    geometry = VARIANTS[name]
    found = oracle.parameter_shapes(geometry)
    optional = optional_shapes(geometry)
    # The head of the router has no calibration when it is new.
    assert found == tensor_shapes(geometry) | {key: shape for key, shape in optional.items() if key in found}
    assert set(optional) - set(found) <= {"router_head/calibration"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_reads_the_package_s_files(dtype: str, tmp_path: Path) -> None:
    geometry, path = VARIANTS["all_heads"], tmp_path / "m.safetensors"
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    tree = oracle.to_tree(make_sample(geometry, 1), target)
    tree["mtp_head"] = {"kernel": np.ones((3, 2), target)}
    write_theirs(path, tree, geometry.to_config(), step=7, run={"loss": float("nan"), "name": "x"})
    checkpoint = read_checkpoint(path)
    assert checkpoint.geometry == geometry
    assert checkpoint.source.step == 7 and checkpoint.source.run["name"] == "x"
    assert not checkpoint.source.random
    assert checkpoint.store.entry("embedding/embedding").stored == dtype
    loaded, config = run.load_checkpoint(str(path))
    agrees(checkpoint.geometry, config)
    expected = oracle.to_tensors(loaded)
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        ours = checkpoint.tensors[name]
        assert ours.dtype == ("float32" if dtype == "bfloat16" else dtype)
        np.testing.assert_array_equal(ours, array.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["small", "split", "all_heads", "orders"])
def test_the_package_reads_ours(name: str, dtype: str, tmp_path: Path) -> None:
    geometry, path = VARIANTS[name], tmp_path / "m.safetensors"
    tensors = make_sample(geometry, 1)
    write_checkpoint(path, geometry, tensors, step=3, run={"a": 1}, dtype=dtype)
    loaded, config, info = run.load_checkpoint(str(path), return_run=True)
    agrees(geometry, config)
    assert info == {"a": 1} and checkpoints.read_checkpoint(path)["step"] == 3
    theirs = oracle.to_tensors(loaded)
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert set(theirs) == set(tensors)
    for key, array in tensors.items():
        np.testing.assert_array_equal(theirs[key], array.astype(target), err_msg=key)


def test_a_freshly_written_config_omits_fields(tmp_path: Path) -> None:
    config = architecture.TransformerConfig(
        vocab_size=256, d_model=96, num_heads=4, num_layers=3, engram_heads=2, engram_slots=32,
        engram_layers=(1,), qk_head_dim=48, v_head_dim=64, sliding_window=16, qkv_conv_taps=3,
        global_layers=(2, 9))
    saved = dict(vars(config))
    assert "rope_theta" not in saved and "mhc_lanes" not in saved
    geometry = dataclasses.replace(SMALL, engram_slots=32)
    path = tmp_path / "m.safetensors"
    write_theirs(path, oracle.to_tree(make_sample(geometry, 1)), saved)
    read = read_checkpoint(path).geometry
    assert read == dataclasses.replace(geometry, kv_window=0, max_seq_len=4096)


def test_omitted_late_fields_mean_off(tmp_path: Path) -> None:
    saved = {"vocab_size": 64, "d_model": 96, "num_heads": 2, "num_layers": 4, "engram_layers": [1],
             "engram_slots": 16, "num_kv_heads": 1}
    config = architecture.TransformerConfig.from_saved(saved)
    geometry = dataclasses.replace(
        SMALL, vocab_size=64, num_heads=2, num_kv_heads=1, num_layers=4, qk_head_dim=48, v_head_dim=48,
        max_seq_len=4096, sliding_window=0, global_layers=(), qkv_conv_taps=0, engram_heads=1,
        engram_sub_dim=48, engram_slots=16, kv_window=0, heads=())
    path = tmp_path / "m.safetensors"
    write_theirs(path, oracle.to_tree(make_sample(geometry, 1)), saved)
    assert read_checkpoint(path).geometry == geometry
    agrees(geometry, config)


def test_config_of_the_published_geometry() -> None:
    agrees(PUBLISHED, oracle.oracle_config(PUBLISHED))
    assert json.loads(json.dumps(PUBLISHED.to_config())) == PUBLISHED.to_config()


@pytest.mark.parametrize("layers", range(2, 25))
def test_ladder_orders(layers: int) -> None:
    geometry = PUBLISHED.with_layers(layers)
    assert ladder_order(geometry) == architecture.ladder_order(layers)
    for depth in range(2, layers + 1):
        assert ladder_layers(geometry, depth) == architecture.ladder_layer_indices(layers, depth)
    config = oracle.oracle_config(geometry)
    for depth in range(2, layers):
        agrees(ladder_geometry(geometry, depth), architecture.ladder_config(config, depth))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_slices_equal(dtype: str, tmp_path: Path) -> None:
    geometry = dataclasses.replace(VARIANTS["all_heads"].with_layers(7))
    path = tmp_path / "m.safetensors"
    tensors = make_sample(geometry, 1)
    write_checkpoint(path, geometry, tensors, dtype=dtype)
    checkpoint, config, tree = read_checkpoint(path), oracle.oracle_config(geometry), oracle.to_tree(tensors)
    for depth in range(2, 7):
        rung = slice_ladder(checkpoint, depth)
        agrees(rung.geometry, architecture.ladder_config(config, depth))
        expected = oracle.to_tensors(architecture.ladder_slice(tree, config, depth))
        assert set(rung.tensors) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(rung.tensors[name], array, err_msg=name)
        assert rung.parent_layers == 7
        assert {key: value.shape for key, value in rung.tensors.items()} == (
            tensor_shapes(rung.geometry) | optional_shapes(rung.geometry))


def test_slice_of_a_slice_follows_the_carried_order(tmp_path: Path) -> None:
    geometry = PUBLISHED.with_layers(20)
    once = ladder_geometry(geometry, 9)
    config = architecture.ladder_config(oracle.oracle_config(geometry), 9)
    agrees(ladder_geometry(once, 4), architecture.ladder_config(config, 4))
    assert once.ladder_order != ladder_order(dataclasses.replace(once, ladder_order=()))
    small = SMALL.with_layers(8)
    write_sample(tmp_path / "m.safetensors", small, 0)
    checkpoint = read_checkpoint(tmp_path / "m.safetensors")
    twice, direct = slice_ladder(slice_ladder(checkpoint, 6), 3), slice_ladder(checkpoint, 3)
    assert twice.geometry == direct.geometry and twice.parent_layers == direct.parent_layers == 8
    for name, array in direct.tensors.items():
        np.testing.assert_array_equal(twice.tensors[name], array, err_msg=name)


def test_a_carried_ladder_order_survives_the_file(tmp_path: Path) -> None:
    rung = ladder_geometry(SMALL.with_layers(9), 5)
    path = tmp_path / "m.safetensors"
    write_checkpoint(path, rung, make_sample(rung, 0))
    assert read_checkpoint(path).geometry == rung
    assert rung.ladder_order == run.load_checkpoint(str(path))[1].ladder_order != ()


def adapter_for(geometry: Geometry, path: Path, *, rank: int = 4, scale: float = 1.7) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(geometry)
    lora = {}
    for target in finetune.LORA_TARGETS:
        name = f"stack/layers/block/self_attn/{target}/kernel"
        layers, in_dim, out = shapes[name]
        lora[name] = {"A": rng.standard_normal((layers, in_dim, rank), np.float32) / rank,
                      "B": rng.standard_normal((layers, rank, out), np.float32) * 0.05}
    checkpoints.write_adapter(path, {"lora": lora, "scale": scale, "rank": rank, "base": "x", "seed": 0})
    return lora


def last_place(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance between neighbouring numbers of ``dtype`` around each value."""
    info = ml_dtypes.finfo(dtype)
    spacing = np.exp2(np.floor(np.log2(np.maximum(np.abs(values), 1e-30))) - info.nmant)
    return np.maximum(spacing, float(info.smallest_subnormal))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "cact"])
def test_merges_equal(dtype: str, tmp_path: Path) -> None:
    geometry = SMALL.with_layers(5)
    path, adapter_path = tmp_path / "m", tmp_path / "a.safetensors"
    tensors = make_sample(geometry, 1)
    if dtype == "cact":
        path.write_bytes(container_bytes(geometry, tensors))
    else:
        write_checkpoint(path, geometry, tensors, dtype=dtype)
    lora = adapter_for(geometry, adapter_path)
    checkpoint, adapter = read_checkpoint(path), read_adapter(adapter_path)
    assert (adapter.scale, adapter.rank, adapter.base) == (1.7, 4, "x")
    merged = merge_lora(checkpoint, adapter)
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype("float32" if dtype == "cact" else dtype)
    flat = {name: jnp.asarray(array.astype(target)) for name, array in checkpoint.tensors.items()}
    for name, pair in lora.items():
        expected = finetune.merge_lora(
            {"w": flat[name]}, {("w",): {key: jnp.asarray(value) for key, value in pair.items()}}, 1.7)["w"]
        assert expected.dtype == target
        a, b = np.asarray(merged.tensors[name], np.float32), np.asarray(expected).astype(np.float32)
        assert np.abs(b - np.asarray(checkpoint.tensors[name], np.float32)).max() > 0.01
        # Both products are float32 sums of four terms in some order; what that can move, plus one step of
        # the kernel's number format at the largest of the operands and the sum.
        magnitude = 1.7 * np.matmul(np.abs(pair["A"]), np.abs(pair["B"]))
        original = np.asarray(checkpoint.tensors[name], np.float32)
        operands = np.maximum(np.maximum(np.abs(original), np.abs(b)), np.abs(b - original))
        assert (np.abs(a - b) <= last_place(operands, target) + 4 * 2.0 ** -23 * magnitude).all()
    untouched = set(checkpoint.tensors) - set(lora)
    for name in untouched:
        np.testing.assert_array_equal(merged.tensors[name], checkpoint.tensors[name])
    assert merged.adapters == ("a.safetensors",)
    assert set(merged.packed) == {key for key in checkpoint.packed if key.partition("#")[0] not in lora}


def test_merge_then_slice_commutes_with_the_package_s_order(tmp_path: Path) -> None:
    geometry = SMALL.with_layers(5)
    path, adapter_path = tmp_path / "m.safetensors", tmp_path / "a.safetensors"
    tensors = make_sample(geometry, 1)
    write_checkpoint(path, geometry, tensors, dtype="float32")
    lora = adapter_for(geometry, adapter_path)
    ours = slice_ladder(merge_lora(read_checkpoint(path), read_adapter(adapter_path)), 3)
    tree = finetune.merge_lora(
        oracle.to_tree(tensors),
        {tuple(name.split("/")): {key: jnp.asarray(value) for key, value in pair.items()}
         for name, pair in lora.items()}, 1.7)
    theirs, config = finetune.rung(tree, oracle.oracle_config(geometry), 3)
    agrees(ours.geometry, config)
    for name, array in oracle.to_tensors(theirs).items():
        np.testing.assert_allclose(ours.tensors[name], array, rtol=0, atol=1e-6, err_msg=name)


def test_rung_of_a_split_model_keeps_its_permutations(tmp_path: Path) -> None:
    geometry = VARIANTS["split"]
    write_sample(tmp_path / "m", geometry, 0)
    rung = slice_ladder(read_checkpoint(tmp_path / "m"), 2)
    assert rung.geometry.split_permutations
    np.testing.assert_array_equal(rung.permutations, standard_permutations(64, True))


def test_a_whistle_configuration_is_refused(tmp_path: Path) -> None:
    from needle.model.whistle import WhistleConfig

    saved = dataclasses.asdict(WhistleConfig())
    write_theirs(tmp_path / "m.safetensors", oracle.to_tree(make_sample(SMALL, 0)), saved)
    with pytest.raises(BadInput, match="Whistle"):
        read_checkpoint(tmp_path / "m.safetensors")
