"""What builds share: whatever decides an artifact decides its key, and what is taken is what was kept."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from needle_export import reuse
from needle_export.bundle.cache import Cache
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rule
from needle_export.errors import UsageError, VerificationFailed
from needle_export.report.schema import AdapterInfo, Report, load_report
from needle_export.reuse import Earlier, was_taken
from needle_export.targets.base import OtherRuntime
from tests.support.reports import write_artifact

ROOT = Path(__file__).parents[2]
QUIET = NullProgress()
ONE = AdapterInfo("a.safetensors", "1" * 64)


def earlier(cache: Cache | None, options: BuildOptions, sha256: str = "0" * 64, adapters: Any = (), layers: int = 3):
    checkpoint: Any = SimpleNamespace(
        source=SimpleNamespace(sha256=sha256, path_name="x.safetensors"), geometry=SimpleNamespace(num_layers=layers)
    )
    return Earlier(cache, options, checkpoint, adapters)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 10**6)


def options(**changes: Any) -> BuildOptions:
    return BuildOptions(**{"checkpoint": "x", "out": Path("out"), **changes})


#: For every option: what else it may be, and what has to be chosen for that.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "target": ("tflite", {}),
    "layers": (8, {}),
    "context": (64, {}),
    "weights": ("fp16", {}),
    "rules": ((Rule("content", "fp16"),), {}),
    "rounding": ("search", {"weights": "int4"}),
    "calibrate": ("prompts.jsonl", {"weights": "int4"}),
    "cache": ("fp16", {}),
    "opset": (23, {}),
    "os": ("ios26", {"target": "coreml"}),
    "buckets": ((16,), {"target": "tflite"}),
    "heads": (("confidence",), {"target": "tflite"}),
    "keep_confidence": (True, {"lora": "a"}),
    "seed": (1, {}),
    "tolerances": ((("logits", 1e-6),), {}),
}
#: Files, which count by what they hold; and what decides nothing of an artifact.
BY_CONTENT, FREE = {"checkpoint", "lora"}, {"out", "threads", "bench", "tokenizer"}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(BuildOptions)])
def test_every_option_that_decides_an_artifact_decides_its_key(
    cache: Cache, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("{}")
    if name in BY_CONTENT | FREE:
        changes = {"checkpoint": "y", "lora": "b", "tokenizer": "c", "out": Path("other"), "threads": 2, "bench": False}
        keys = {earlier(cache, options(**more)).artifact_key(()) for more in ({}, {name: changes[name]})}
        assert len(keys) == 1
        return
    value, needed = CHANGES[name]  # an option that isn't there needs an entry
    keys = {earlier(cache, options(**needed, **more)).artifact_key(()) for more in ({}, {name: value})}
    assert len(keys) == 2 and None not in keys


def artifact_key(cache: Cache, runtimes: tuple[OtherRuntime, ...] = (), **changes: Any) -> str | None:
    return earlier(cache, options(), **changes).artifact_key(runtimes)


def test_inputs_and_runtimes_decide_the_key(cache: Cache) -> None:
    there = OtherRuntime("old", "2.14", lambda: None)
    keys = [
        artifact_key(cache),
        artifact_key(cache, sha256="1" * 64),
        artifact_key(cache, adapters=(ONE,)),
        artifact_key(cache, adapters=(ONE, ONE)),
        artifact_key(cache, (there,)),
        artifact_key(cache, (dataclasses.replace(there, version="2.15"),)),
        artifact_key(cache, (dataclasses.replace(there, open=None, reason="not tried"),)),
    ]
    assert len(set(keys)) == len(keys)
    # The name of a file is nothing of what it holds.
    assert artifact_key(cache, adapters=(ONE,)) == artifact_key(cache, adapters=(AdapterInfo("b", ONE.sha256),))
    assert artifact_key(cache) == artifact_key(cache)


def test_prompts_count_by_what_they_hold(cache: Cache, tmp_path: Path) -> None:
    def key(name: str, text: str) -> str | None:
        (tmp_path / name).write_text(text)
        return earlier(cache, options(weights="int4", calibrate=str(tmp_path / name))).artifact_key(())

    assert key("a", "1") == key("b", "1") != key("a", "2")
    # The build says what is wrong with them.
    assert earlier(cache, options(weights="int4", calibrate=str(tmp_path / "absent"))).artifact_key(()) is None


def test_levels_are_shared_by_what_does_not_touch_them(cache: Cache) -> None:
    forms = [["embedding/embedding", -1, "int4x128"]]

    def key(forms: Any = forms, layers: int = 3, sha256: str = "0" * 64, **changes: Any) -> str | None:
        return earlier(cache, options(weights="int4", **changes), sha256, layers=layers).levels_key(forms)

    first = key(rounding="search")
    assert first == key(rounding="search", context=64, cache="fp16", seed=3)
    others = [key(), key([["embedding/embedding", -1, "int4x32"]], rounding="search"), key(layers=4, rounding="search"),
              key(sha256="1" * 64, rounding="search")]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("change", ["edit", "new file", "distribution", "setting", "machine", "python"])
def test_software_and_machine_decide_the_key(
    cache: Cache, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = artifact_key(cache)
    if change in ("edit", "new file"):
        copy = tmp_path / "package"
        shutil.copytree(ROOT / "needle_export", copy, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(reuse, "_PACKAGE", copy)
        assert artifact_key(cache) == before
        path = copy / ("graph/match.py" if change == "edit" else "graph/more.py")
        path.write_text((path.read_text() if path.exists() else "") + "\n#\n")
    elif change == "distribution":
        found = dict(reuse._distributions((*reuse.ROOTS[""], *reuse.ROOTS["onnx"])))
        assert "torch" in found and "sympy" in found, "what torch needs takes part too"
        monkeypatch.setattr(reuse, "_distributions", lambda roots: found | {"sympy": "0"})
    elif change == "setting":
        monkeypatch.setenv("OMP_NUM_THREADS", "77")
    elif change == "machine":
        monkeypatch.setattr(reuse, "host", lambda: "another")
    else:
        monkeypatch.setattr(reuse.platform, "python_version", lambda: "2.7")
    assert artifact_key(cache) != before


def test_every_distribution_of_a_target_takes_part() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for target, roots in reuse.ROOTS.items():
        listed = {re.split(r"[^\w-]", line)[0] for line in (extras[target] if target else project["dependencies"])}
        assert set(roots) <= listed if not target else set(roots) == listed


# --- taking and keeping ------------------------------------------------------------------------------


def build(cache: Cache | None, folder: Path, made: list[str], **changes: Any) -> Report:
    folder.mkdir()

    def make() -> Report:
        made.append(folder.name)
        return write_artifact(folder, {"model/weights/a.bin": b"abc", "b.bin": b"b"})

    return earlier(cache, options(**changes)).built((), folder, QUIET, make)


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_second_build_takes_what_the_first_made(cache: Cache, tmp_path: Path) -> None:
    made: list[str] = []
    first, second = build(cache, tmp_path / "a", made), build(cache, tmp_path / "b", made)
    assert made == ["a"] and files(tmp_path / "a") == files(tmp_path / "b")
    assert not was_taken(first) and was_taken(second)
    (before,), (after,) = first.artifacts, second.artifacts
    assert after.notes[:-1] == before.notes and "verified it on" in after.notes[-1]
    assert dataclasses.replace(after, notes=before.notes) == before
    build(cache, tmp_path / "c", made, context=64)
    build(None, tmp_path / "d", made)
    assert made == ["a", "c", "d"]
    # What was taken is not kept with the note that it was.
    assert build(cache, tmp_path / "e", made) == second


def test_what_fails_is_not_kept(cache: Cache, tmp_path: Path) -> None:
    def fail() -> Report:
        raise VerificationFailed("it computes something else")

    with pytest.raises(VerificationFailed):
        earlier(cache, options()).built((), tmp_path, QUIET, fail)
    assert cache.entries() == []


@pytest.mark.parametrize("what", ["report", "file"])
def test_a_damaged_entry_is_made_again(cache: Cache, tmp_path: Path, what: str) -> None:
    made: list[str] = []
    build(cache, tmp_path / "a", made)
    (entry,) = cache.entries()
    name = "report.json" if what == "report" else "model/weights/a.bin"
    (cache.folder / "entries" / entry.key / "files" / name).write_bytes(b"{}")
    assert not was_taken(build(cache, tmp_path / "b", made))
    assert made == ["a", "b"] and was_taken(build(cache, tmp_path / "c", made))
    assert load_report(tmp_path / "c") == load_report(tmp_path / "a")


def test_a_cache_that_keeps_nothing_stops_no_build(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made: list[str] = []
    for cache in (Cache(tmp_path / "file" / "cache", 10**6), Cache(tmp_path / "cache", 1)):
        for _ in range(2):
            build(cache, tmp_path / str(len(made)), made)
    assert len(made) == 4


# --- where it is -------------------------------------------------------------------------------------


def test_tests_use_no_cache() -> None:
    assert reuse.open_cache() is None


def test_the_environment_names_folder_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reuse.FOLDER, str(tmp_path))
    cache = reuse.open_cache()
    assert cache is not None and (cache.folder, cache.limit) == (tmp_path, 10 * 10**9)
    monkeypatch.setenv(reuse.LIMIT, "2 GB")
    cache = reuse.open_cache()
    assert cache is not None and cache.limit == 2 * 10**9
    monkeypatch.setenv(reuse.LIMIT, "2 apples")
    with pytest.raises(UsageError, match=r"NEEDLE_EXPORT_CACHE_LIMIT: '2 apples'"):
        reuse.open_cache()
    monkeypatch.delenv(reuse.LIMIT)
    monkeypatch.delenv(reuse.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache = reuse.open_cache()
    assert cache is not None and cache.folder.name == "needle-export" and not cache.folder.exists()
