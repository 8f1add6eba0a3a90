"""Inspection of checkpoints, containers and adapters: facts that sum up, and their view."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from needle_export.checkpoint.geometry import SMALL, parameter_count
from needle_export.checkpoint.safetensors_file import write_checkpoint, write_tensors
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import BadInput, UsageError
from needle_export.inspection import inspect
from needle_export.measure.ledger import byte_ledger
from needle_export.report.codec import to_json
from needle_export.report.inspection_text import render_inspection
from tests.support.containers import container_bytes, tokenizer_blob
from tests.support.geometries import VARIANTS

ATTENTION = "stack/layers/block/self_attn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_sample(folder / "small.safetensors", SMALL, 1)
    tensors = make_sample(SMALL, 1)
    (folder / "small.cact").write_bytes(container_bytes(SMALL, tensors, bits=4, tokenizer=tokenizer_blob()))
    mixed = container_bytes(SMALL, tensors, bits=lambda slot: 0 if slot.layer == 1 else 2)
    (folder / "mixed.cact").write_bytes(mixed)
    rng = np.random.default_rng(0)
    pairs = {f"lora/{ATTENTION}/{name}/kernel/{half}": rng.standard_normal((3, *shape)).astype(np.float32)
             for name, out in (("q_proj", 192), ("v_proj", 128))
             for half, shape in (("A", (96, 2)), ("B", (2, out)))}
    write_tensors(folder / "adapter.safetensors", pairs,
                  {"scale": "2.0", "rank": "2", "base": json.dumps("needle3")}, dtype="float32")
    return folder


def test_a_checkpoint(folder: Path) -> None:
    path = folder / "small.safetensors"
    found = inspect(str(path), bits=4, heads=[(64, 64), (48, 64)], context=64)
    assert found.adapter is None
    model = found.model
    assert model is not None
    assert (found.file.format, found.file.random) == ("safetensors", True)
    assert found.file.bytes == path.stat().st_size
    assert model.parameters == parameter_count(SMALL)
    assert sum(model.stored.values()) == path.stat().st_size
    stored = {role: count for role, count in model.stored.items() if role != "overhead"}
    assert stored == byte_ledger(SMALL)
    assert model.ledger == byte_ledger(SMALL, 4)
    assert [rung.depth for rung in model.rungs] == [2, 3]
    assert [row.current for row in model.head_shapes] == [False, True]
    assert model.kv_cache_bytes == model.head_shapes[1].kv_cache_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ledger_of_the_file_counts_its_own_number_format(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, SMALL, make_sample(SMALL, 0), dtype=dtype, run={})
    found = inspect(str(path))
    assert found.model is not None
    assert not found.file.random
    assert sum(found.model.stored.values()) == path.stat().st_size
    assert found.model.stored["routing"] == byte_ledger(SMALL, 32 if dtype == "float32" else 16)["routing"]


@pytest.mark.parametrize("name", ["small.cact", "mixed.cact"])
def test_a_container(folder: Path, name: str) -> None:
    path = folder / name
    found = inspect(str(path), bits=2)
    assert found.file.format == "cact"
    assert found.model is not None
    stored = found.model.stored
    assert sum(stored.values()) == path.stat().st_size
    assert all(count > 0 for count in stored.values())
    # Gathered in groups of 128 but stored 96 wide: a packed row takes 64 bytes and one norm.
    rows = 256
    assert stored["vocabulary"] == rows * (128 * (4 if name == "small.cact" else 2) // 8 + 2)


def test_layers_left_in_float_count_as_such(folder: Path) -> None:
    plain, mixed = (inspect(str(folder / name)).model for name in ("small.cact", "mixed.cact"))
    assert plain is not None
    assert mixed is not None
    layer_16 = byte_ledger(SMALL)["routing"] // 3
    assert mixed.stored["routing"] > layer_16
    assert plain.stored["routing"] < byte_ledger(SMALL)["routing"] // 2


def test_an_adapter(folder: Path) -> None:
    found = inspect(str(folder / "adapter.safetensors"))
    assert found.model is None
    adapter = found.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.scale, adapter.base) == (2, 2.0, "needle3")
    assert adapter.parameters_by_role == {"routing": 3 * 2 * (96 + 192), "content": 3 * 2 * (96 + 128)}
    assert adapter.parameters == sum(adapter.parameters_by_role.values())
    assert adapter.targets == (f"{ATTENTION}/q_proj/kernel", f"{ATTENTION}/v_proj/kernel")
    text = render_inspection(found)
    assert "LoRA adapter" in text
    assert "q_proj" in text


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    pairs = {f"lora/other/kernel/{half}": np.zeros((2, 2), np.float32) for half in "AB"}
    write_tensors(tmp_path / "a.safetensors", pairs, {"scale": "1", "rank": "2"}, dtype="float32")
    with pytest.raises(BadInput, match="no Needle 3 model has"):
        inspect(str(tmp_path / "a.safetensors"))


def test_damaged_and_missing_files_are_explained_by_their_readers(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        inspect(str(tmp_path / "absent"))
    (tmp_path / "noise").write_bytes(b"noise" * 100)
    with pytest.raises(BadInput):
        inspect(str(tmp_path / "noise"))
    with pytest.raises(BadInput, match="folder"):
        inspect(str(tmp_path))


def test_impossible_questions_are_refused(folder: Path) -> None:
    path = str(folder / "small.safetensors")
    with pytest.raises(UsageError, match="--bits"):
        inspect(path, bits=0)
    with pytest.raises(UsageError, match="--head"):
        inspect(path, heads=[(3, 3)])


def test_the_view_shows_what_teams_argue_over(folder: Path) -> None:
    found = inspect(str(folder / "small.safetensors"), heads=[(64, 64), (48, 64)], context=64)
    text = render_inspection(found)
    assert "RANDOM WEIGHTS" in text.splitlines()[1]
    for part in ("405,093", "routing", "171.1 kB", "42.8 kB", "48/64 (this model)", "+14.3 kB", "+7.1 %",
                 "KV cache at 64", "Rungs of the ladder", "233,365", "SHA-256"):
        assert part in text, part


@pytest.mark.parametrize("geometry", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_can_be_shown(tmp_path: Path, geometry: object) -> None:
    write_sample(tmp_path / "x.safetensors", geometry, 0)
    found = inspect(str(tmp_path / "x.safetensors"))
    assert render_inspection(found)
    assert json.loads(to_json(found))["model"]["layers"] == found.model.layers


def test_progress_is_told_in_bytes(folder: Path) -> None:
    path = folder / "small.safetensors"
    stages: list[tuple[str, int | None]] = []
    steps: list[int] = []

    class Recorder:
        def stage(self, name: str, total: int | None = None) -> Recorder:
            stages.append((name, total))
            return self

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *unused: object) -> None:
            pass

        def advance(self, n: int = 1) -> None:
            steps.append(n)

    inspect(str(path), progress=Recorder())
    assert stages[-1] == ("read the file", path.stat().st_size)
    assert sum(steps) == path.stat().st_size
