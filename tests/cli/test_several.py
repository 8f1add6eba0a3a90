"""Several recipes and devices in one command: what is built where, what is said of each, how it ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from needle_export.bundle.cache import Cache
from needle_export.report.schema import REPORT_NAME, load_report, parse_report
from needle_export.reuse import FOLDER
from tests.cli.conftest import Run, Start
from tests.support import fake_pipeline
from tests.support.reports import is_whole

PHONES = ("--device", "pixel-8", "--device", "iphone-16-pro")
RECIPES = ("--recipe", "android-balanced", "--recipe", "ios-balanced")
BUILT = ["android-balanced-pixel-8", "ios-balanced-iphone-16-pro"]
REFUSED = ["android-balanced-iphone-16-pro", "ios-balanced-pixel-8"]


def folders(out: str = "o") -> list[str]:
    return sorted(p.name for p in Path(out).iterdir()) if Path(out).exists() else []


def built() -> list[str]:
    return [options["out"].name for _, options in fake_pipeline.CALLS]


def test_each_recipe_is_built_for_each_device_that_takes_it(run: Run) -> None:
    result = run("build", "x", "--out", "o", *PHONES, *RECIPES)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert folders() == built() == BUILT and all(is_whole(Path("o") / name) for name in BUILT)
    targets = {options["out"].name: options["target"] for _, options in fake_pipeline.CALLS}
    assert targets == dict(zip(BUILT, ("tflite", "coreml"), strict=True))
    for name in BUILT:
        assert f"{name} " in result.stdout
    for name in REFUSED:
        assert f"{name}: refused: " in " ".join(result.stdout.split())


@pytest.mark.parametrize(("line", "names"), [
    (PHONES, ["iphone-16-pro", "pixel-8"]),
    (RECIPES, ["android-balanced", "ios-balanced"]),
    ((*PHONES, "--recipe", "web"), ["web-iphone-16-pro", "web-pixel-8"]),
])
def test_names_of_folders(run: Run, line: tuple[str, ...], names: list[str]) -> None:
    assert run("build", "x", "--out", "o", *line).exit_code == 0
    assert folders() == names


def test_what_is_refused_of_several_alike_is_said_once(run: Run) -> None:
    result = run("build", "x", "--out", "o", *PHONES, "--device", "esp32-s3", "--recipe", "web", "--recipe",
                 "onnx-desktop")
    assert result.exit_code == 0
    assert "web-esp32-s3, onnx-desktop-esp32-s3: refused: ESP32-S3" in " ".join(result.stdout.split())
    assert result.stdout.count("refused: ") == 1


def test_one_plan_is_published_into_the_folder_itself(run: Run) -> None:
    result = run("build", "x", "--out", "o", *PHONES[:2], *RECIPES[:2], "--json")
    assert result.exit_code == 0
    assert is_whole(Path("o")) and parse_report(result.stdout.encode()) == load_report(Path("o"))


def test_the_others_are_built_after_one_fails(run: Run) -> None:
    line = ("build", "x", "--out", "o", *PHONES, *RECIPES)
    result = run(*line, fake=f"verification@{BUILT[0]}")
    assert result.exit_code == 4
    assert built() == BUILT and folders() == BUILT[1:]
    assert result.stderr == f"error: {BUILT[0]}: onnx: logits differ by 1e-2 in layer 3\n"
    assert f"{BUILT[0]}: failed: onnx: logits differ" in " ".join(result.stdout.split())
    fake_pipeline.CALLS.clear()
    assert run(*line, fake=f"crash@{BUILT[0]}").exit_code == 70
    assert built() == BUILT


def test_the_code_is_that_of_the_first_that_failed(run: Run) -> None:
    assert run("build", "x", "--out", "o", *PHONES, *RECIPES, fake="input").exit_code == 3
    assert built() == BUILT and not Path("o").exists()


def test_json_has_all_of_them_in_one_document(run: Run) -> None:
    result = run("build", "x", "--out", "o", *PHONES, *RECIPES, "--json", fake=f"input@{BUILT[1]}")
    assert result.exit_code == 3
    builds = {b["name"]: b for b in json.loads(result.stdout)["builds"]}
    assert list(builds) == [BUILT[0], *REFUSED, BUILT[1]]
    assert [b["status"] for b in builds.values()] == ["built", "refused", "refused", "failed"]
    first, refused, _, failed = builds.values()
    assert parse_report(json.dumps(first["report"]).encode()) == load_report(Path("o") / BUILT[0])
    assert Path(first["out"]) == Path("o") / BUILT[0] and first["error"] is None and first["same_as"] is None
    assert refused["report"] is None and "choose --weights" in refused["refusals"][0]
    assert failed["error"] == {"message": "the tensor is missing", "where": "x/kernel", "fix": "fetch it again",
                               "exit_code": 3}


def test_quiet_prints_errors_only(run: Run) -> None:
    result = run("build", "x", "--out", "o", *PHONES, *RECIPES, "--quiet", fake=f"input@{BUILT[1]}")
    assert result.stdout == ""
    assert result.stderr == f"error: {BUILT[1]}: x/kernel: the tensor is missing; fetch it again\n"


def test_where_all_are_refused_nothing_was_done(run: Run) -> None:
    result = run("build", "x", "--out", "o", "--device", "esp32-s3", *RECIPES)
    assert result.exit_code == 5 and built() == [] and not Path("o").exists()
    assert result.stderr == "error: the devices refuse all of these builds; needle-export plan says why of each\n"
    # One document on stdout, whatever came of them.
    result = run("build", "x", "--out", "o", "--device", "esp32-s3", *RECIPES, "--json")
    assert result.exit_code == 5
    assert [b["status"] for b in json.loads(result.stdout)["builds"]] == ["refused"] * 2


@pytest.mark.parametrize(("line", "code", "sentence"), [
    ((*PHONES, "--device", "pixel-9000"), 2, "pixel-9000"),
    ((*PHONES, "--recipe", "none-such"), 2, "none-such"),
    ((*PHONES, "--device", "pixel-8"), 2, "two builds would be pixel-8; give each recipe and device once"),
    ((*PHONES, "--save-recipe", "r.toml"), 2, "--save-recipe: several plans are no recipe"),
])
def test_what_is_wrong_with_all_of_them_is_said_before_anything_is_built(
    run: Run, line: tuple[str, ...], code: int, sentence: str
) -> None:
    result = run("build", "x", "--out", "o", *line)
    assert result.exit_code == code and sentence in result.stderr
    assert built() == [] and not Path("o").exists()


def test_options_that_one_of_them_can_not_have_fail_that_one(run: Run) -> None:
    result = run("build", "x", "--out", "o", *RECIPES, "--buckets", "16", "--os", "ios26")
    assert result.exit_code == 2 and folders() == ["ios-balanced"]
    assert "error: android-balanced: --os: the tflite target isn't made for an operating system" in result.stderr


def test_folders_do_not_go_into_a_build(run: Run, dist: Path) -> None:
    for out in (dist, dist / REPORT_NAME):
        result = run("build", "x", "--out", str(out), *PHONES)
        assert result.exit_code == 2 and "this is a build itself or a file" in result.stderr
    assert is_whole(dist) and built() == []


def test_an_interrupt_ends_all_and_leaves_what_was_published(start: Start, tmp_path: Path) -> None:
    process = start("build", "x", "--out", "o", *PHONES, *RECIPES, "--recipe", "web", fake=f"sleep@{BUILT[1]}",
                    cwd=tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "error: interrupted\n")
    assert folders(str(tmp_path / "o")) == BUILT[:1] and is_whole(tmp_path / "o" / BUILT[0])
    rows = {line.split()[0]: " ".join(line.split()[1:3]) for line in out.splitlines() if line.split()[1:]}
    assert rows[BUILT[0]].startswith("built") and rows["web-pixel-8"] == "not built"


# --- which cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_builds_use_the_users_cache_unless_told_otherwise(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    line = ["build", "x", "--out", "o", *(PHONES if several else ())]
    assert run(*line).exit_code == 0
    assert set(fake_pipeline.CACHES) == {None}  # switched off for tests
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    fake_pipeline.CACHES.clear()
    assert run(*line).exit_code == 0
    assert [c and c.folder for c in fake_pipeline.CACHES] == [tmp_path / "cache"] * (2 if several else 1)
    fake_pipeline.CACHES.clear()
    assert run(*line, "--no-cache").exit_code == 0
    assert set(fake_pipeline.CACHES) == {None}
    assert not (tmp_path / "cache").exists()


def test_cache_shows_and_clears(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "switched off by NEEDLE_EXPORT_CACHE" in run("cache").stdout
    assert json.loads(run("cache", "--json").stdout)["folder"] is None
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    assert "0 entries, 0 B of at most 10.0 GB" in run("cache").stdout
    assert not (tmp_path / "cache").exists()
    cache, key = Cache(tmp_path / "cache", 100), f"artifact-{1:064x}"
    cache.keep(key, "onnx int4, 20 layers", lambda folder: (folder / "a").write_bytes(bytes(7)) and None)
    text = run("cache").stdout
    assert "1 entry, 7 B" in text and "onnx int4, 20 layers" in text and str(tmp_path / "cache") in text
    answer = json.loads(run("cache", "--json").stdout)
    assert answer["bytes"] == 7 and answer["limit_bytes"] == 10**10 and answer["removed"] == []
    assert [(e["key"], e["bytes"]) for e in answer["entries"]] == [(key, 7)]
    cleared = json.loads(run("cache", "--clear", "--json").stdout)
    assert cleared["removed"] == [key] and cleared["entries"] == []
    assert "0 entries" in run("cache", "--clear").stdout
