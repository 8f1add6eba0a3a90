"""Builds that take what earlier ones made publish the same bytes, and say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from needle_export import compile as compiler
from needle_export import improvement, pipeline
from needle_export.bundle.cache import Cache
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.report.manifest import load_manifest
from needle_export.reuse import FOLDER, was_taken

pytest.importorskip("onnxruntime")

QUIET = NullProgress()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cached") / "model.safetensors"
    write_sample(path, SMALL.with_layers(2), 5)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 10**9)


def build(checkpoint: Path, out: Path, cache: Cache | None, **changes):
    options = {"context": 24, "bench": False, **changes}
    return pipeline.build(BuildOptions(str(checkpoint), out, **options), QUIET, cache=cache)


def files(folder: Path) -> dict[str, bytes]:
    """All but the report and the manifest, which name the checkpoint's file."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found.pop("report.json") and found.pop("manifest.json")
    return found


def forbid(*_: object, **__: object) -> None:
    raise AssertionError("it was to be taken from the cache")


def test_a_build_from_the_cache_is_a_fresh_ones_bytes(checkpoint, cache, tmp_path, monkeypatch):
    first = build(checkpoint, tmp_path / "first", cache)
    renamed = checkpoint.with_name("renamed.safetensors")
    renamed.write_bytes(checkpoint.read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "Compiler", forbid)
        second = build(renamed, tmp_path / "second", cache, bench=True)
    fresh = build(checkpoint, tmp_path / "fresh", None)
    assert files(tmp_path / "first") == files(tmp_path / "second") == files(tmp_path / "fresh")
    assert [was_taken(r) for r in (first, second, fresh)] == [False, True, False]
    assert first == fresh
    assert load_manifest(tmp_path / "first") == load_manifest(tmp_path / "fresh")
    # What is here and now isn't the cache's: names of files, and times.
    assert second.checkpoint.path_name == "renamed.safetensors"
    assert second.artifacts[0].latency is not None and first.artifacts[0].latency is None
    assert second.artifacts[0].parity == fresh.artifacts[0].parity
    assert pipeline.verify(tmp_path / "second", checkpoint=str(checkpoint), progress=QUIET) == second


def test_rounded_matrices_are_shared_between_builds(checkpoint, cache, tmp_path, monkeypatch):
    asked = {"weights": "int4", "rounding": "search"}
    build(checkpoint, tmp_path / "first", cache, **asked)
    with monkeypatch.context() as patched:
        patched.setattr(improvement.Improvement, "run", forbid)
        other = build(checkpoint, tmp_path / "other", cache, context=32, **asked)
    build(checkpoint, tmp_path / "fresh", None, context=32, **asked)
    assert files(tmp_path / "other") == files(tmp_path / "fresh")
    assert not was_taken(other)
    assert sorted(e.key.partition("-")[0] for e in cache.entries()) == ["artifact", "artifact", "levels"]


def start(checkpoint: Path, out: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    line = ["build", str(checkpoint), "--context", "24", "--no-bench", "--json", "--out", str(out), *more]
    command = [sys.executable, "-c", "from needle_export.cli import main; main()", *line]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, FOLDER: str(folder)})


def notes(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and errors == "", errors
    return " ".join(json.loads(out)["artifacts"][0]["notes"])


def test_two_processes_build_the_same_once(checkpoint, tmp_path):
    both = [start(checkpoint, tmp_path / name, tmp_path / "cache") for name in "ab"]
    assert sorted("taken from the cache" in notes(p) for p in both) == [False, True]
    assert files(tmp_path / "a") == files(tmp_path / "b")
