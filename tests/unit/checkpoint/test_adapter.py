"""LoRA files: what is read, what is refused, what merging does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.checkpoint.adapter import merge_lora, read_adapter
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.safetensors_file import write_checkpoint, write_tensors
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import BadInput
from tests.support.containers import container_bytes

Q_PROJ = "stack/layers/block/self_attn/q_proj/kernel"
MLP = "stack/layers/block/hadamard_mlp"
KEY_PROJ = "engrams_0/key_proj/kernel"
META: dict[str, Any] = {"scale": 2.0, "rank": 4, "base": "checkpoints/needle3.safetensors", "seed": 0,
                        "pieces": None, "languages": None}


def pair(layers: int = 3, in_dim: int = 96, out: int = 192, rank: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {f"lora/{Q_PROJ}/A": rng.standard_normal((layers, in_dim, rank), np.float32),
            f"lora/{Q_PROJ}/B": rng.standard_normal((layers, rank, out), np.float32)}


def write(path: Path, tensors: dict[str, np.ndarray], *, dtype: str = "float32", **meta: Any) -> Path:
    metadata = {key: json.dumps(value) for key, value in (META | meta).items()}
    write_tensors(path, tensors, metadata, dtype=dtype)
    return path


@pytest.fixture
def checkpoint_path(tmp_path: Path) -> Path:
    write_sample(tmp_path / "m.safetensors", SMALL, 0)
    return tmp_path / "m.safetensors"


def test_reading(tmp_path: Path) -> None:
    tensors = pair()
    adapter = read_adapter(write(tmp_path / "a.safetensors", tensors))
    assert (adapter.scale, adapter.rank, adapter.path_name) == (2.0, 4, "a.safetensors")
    assert adapter.base == "checkpoints/needle3.safetensors" and len(adapter.sha256) == 64
    a, b = adapter.pairs[Q_PROJ]
    np.testing.assert_array_equal(a, tensors[f"lora/{Q_PROJ}/A"])
    np.testing.assert_array_equal(b, tensors[f"lora/{Q_PROJ}/B"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_adapters_become_float32(dtype: str, tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path / "a", pair(), dtype=dtype))
    assert adapter.pairs[Q_PROJ][0].dtype == np.float32


@pytest.mark.parametrize(("meta", "words"), [
    ({"scale": None}, "scale"), ({"scale": "2"}, "scale"), ({"scale": float("inf")}, "scale"),
    ({"scale": True}, "scale"), ({"rank": 8}, "rank is 8"), ({"languages": ["en"]}, "Whistle"),
    ({"languages": []}, "Whistle"), ({"pieces": ["x"]}, "Whistle"),
])
def test_metadata_is_checked(meta: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        read_adapter(write(tmp_path / "a", pair(), **meta))


@pytest.mark.parametrize(("change", "words"), [
    ({"rows": np.ones((2, 96), np.float32)}, "embedding rows"),
    ({"lora/x": np.ones((2, 2), np.float32)}, "no place"),
    ({"lora/x/C": np.ones((2, 2), np.float32)}, "no place"),
    ({"other/x/A": np.ones((2, 2), np.float32)}, "no place"),
    ({"lora/x/A": np.ones((2, 4), np.float32)}, "B matrix is missing"),
    ({"lora/x/B": np.ones((2, 4), np.float32)}, "A matrix is missing"),
    ({"lora/x/A": np.ones((2, 4), np.float32), "lora/x/B": np.ones((3, 2), np.float32)}, "multiplied"),
    ({"lora/x/A": np.ones(4, np.float32), "lora/x/B": np.ones(4, np.float32)}, "multiplied"),
    ({"lora/x/A": np.ones((2, 3), np.float32), "lora/x/B": np.ones((3, 2), np.float32)}, "ranks"),
    ({"lora/x/A": np.ones((2, 0), np.float32), "lora/x/B": np.ones((0, 2), np.float32)}, "ranks"),
])
def test_tensors_are_checked(change: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        read_adapter(write(tmp_path / "a", pair() | change))


def test_empty_and_foreign_files(tmp_path: Path, checkpoint_path: Path) -> None:
    with pytest.raises(BadInput, match="no lora/"):
        read_adapter(write(tmp_path / "a", {}))
    with pytest.raises(BadInput, match="no place in an adapter"):
        read_adapter(checkpoint_path)
    with pytest.raises(BadInput, match="adapter, not a checkpoint"):
        read_checkpoint(write(tmp_path / "b", pair()))
    (tmp_path / "c").write_bytes(b"\x80\x04abc")
    with pytest.raises(BadInput, match="neither"):
        read_adapter(tmp_path / "c")


def test_damaged_metadata(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", pair(), {"scale": "{"}, dtype="float32")
    with pytest.raises(BadInput, match="scale"):
        read_adapter(tmp_path / "a")


def test_truncation(tmp_path: Path) -> None:
    data = write(tmp_path / "a", pair()).read_bytes()
    for length in [1, 8, 9, 100, 500, *range(600, len(data), 701), len(data) - 1]:
        (tmp_path / "b").write_bytes(data[:length])
        with pytest.raises(BadInput):
            read_adapter(tmp_path / "b")


def test_merging_is_the_formula(tmp_path: Path, checkpoint_path: Path) -> None:
    checkpoint = read_checkpoint(checkpoint_path)
    adapter = read_adapter(write(tmp_path / "a.safetensors", pair()))
    merged = merge_lora(checkpoint, adapter)
    a, b = adapter.pairs[Q_PROJ]
    exact = checkpoint.tensors[Q_PROJ].astype(np.float64) + 2.0 * a.astype(np.float64) @ b.astype(np.float64)
    assert merged.tensors[Q_PROJ].dtype == np.float16
    np.testing.assert_allclose(merged.tensors[Q_PROJ], exact, rtol=2e-3, atol=2e-3)
    assert merged.adapters == ("a.safetensors",) and checkpoint.adapters == ()
    assert merged.source == checkpoint.source
    twice = merge_lora(merged, adapter)
    np.testing.assert_allclose(twice.tensors[Q_PROJ].astype(np.float32) - merged.tensors[Q_PROJ],
                               2.0 * a @ b, rtol=0, atol=0.05)
    assert twice.adapters == ("a.safetensors", "a.safetensors")


def test_merging_needs_the_right_checkpoint(tmp_path: Path, checkpoint_path: Path) -> None:
    checkpoint = read_checkpoint(checkpoint_path)
    for tensors, words in ((pair(layers=4), "makes"), (pair(out=100), "makes"),
                           ({name.replace("q_proj", "p_proj"): value for name, value in pair().items()},
                            "doesn't have"),
                           ({f"lora/{MLP}/w1a/{half}": np.ones((3, 8, 8), np.float32) for half in "AB"},
                            "isn't a linear kernel")):
        adapter = read_adapter(write(tmp_path / "a", tensors, rank=None))
        with pytest.raises(BadInput, match=words):
            merge_lora(checkpoint, adapter)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_merge_that_overflows_is_refused(dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", SMALL, make_sample(SMALL, 0), dtype=dtype)
    adapter = read_adapter(write(tmp_path / "a", pair(), scale=1e39))
    merged = merge_lora(read_checkpoint(tmp_path / "m"), adapter)
    with pytest.raises(BadInput, match=r"q_proj.*finite"):
        merged.tensors[Q_PROJ]


def test_merging_into_a_rung_fails_but_slicing_a_merge_works(tmp_path: Path, checkpoint_path: Path) -> None:
    checkpoint = read_checkpoint(checkpoint_path)
    adapter = read_adapter(write(tmp_path / "a", pair()))
    with pytest.raises(BadInput, match="makes"):
        merge_lora(slice_ladder(checkpoint, 2), adapter)
    rung = slice_ladder(merge_lora(checkpoint, adapter), 2)
    np.testing.assert_array_equal(rung.tensors[Q_PROJ],
                                  merge_lora(checkpoint, adapter).tensors[Q_PROJ][[0, 2]])
    assert rung.adapters == ("a",)


def test_merging_drops_the_codes_it_changes(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(container_bytes(SMALL, make_sample(SMALL, 0)))
    checkpoint = read_checkpoint(tmp_path / "m")
    rng = np.random.default_rng(0)
    engram = {f"lora/{KEY_PROJ}/A": rng.standard_normal((96, 4), np.float32),
              f"lora/{KEY_PROJ}/B": rng.standard_normal((4, 96), np.float32)}
    merged = merge_lora(checkpoint, read_adapter(write(tmp_path / "a", pair() | engram)))
    gone = set(checkpoint.packed) - set(merged.packed)
    assert gone == {KEY_PROJ, *(f"{Q_PROJ}#{layer}" for layer in range(3))}
    assert merged.tensors[Q_PROJ].dtype == np.float32
    assert merged.entry(Q_PROJ).stored == "float32"
    # The rung of a merge has neither the codes of changed kernels nor those of dropped blocks.
    rung = slice_ladder(merged, 2)
    assert not any(name.startswith(Q_PROJ) for name in rung.packed)


def test_bfloat16_kernels_merge_in_bfloat16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", SMALL, make_sample(SMALL, 0), dtype="bfloat16")
    checkpoint = read_checkpoint(tmp_path / "m")
    merged = merge_lora(checkpoint, read_adapter(write(tmp_path / "a", pair()))).tensors[Q_PROJ]
    assert merged.dtype == np.float32
    assert not np.any(merged.view(np.uint32) & 0xFFFF)
