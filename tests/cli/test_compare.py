"""needle-export compare: one table over folders, in every form, and a sentence for what is no build."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from needle_export.report.comparison import SORTS, compare
from needle_export.report.comparison_view import render
from needle_export.report.schema import dump_report, load_report
from tests.cli.conftest import Run
from tests.support.reports import is_whole, write_artifact


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another published folder, of a larger artifact that a scheme was used on."""
    folder = tmp_path / "other"
    folder.mkdir()
    report = write_artifact(folder, {"model.onnx": bytes(9000)})
    made = report.artifacts[0]
    loss = {"kl": 0.25, "argmax_equal": 0.5, "max_abs": 1.0}
    lossy = dataclasses.replace(made, weights="int8", parity={**made.parity, "scheme_loss": loss})
    (folder / "report.json").write_bytes(dump_report(dataclasses.replace(report, artifacts=(lossy,))))
    return folder


def test_in_every_form(run: Run, dist: Path, other: Path) -> None:
    folders = [str(dist), str(other)]
    found = compare([(folder, load_report(folder)) for folder in folders])
    assert run("compare", *folders).stdout == render(found, "text")
    assert run("compare", *folders, "--format", "markdown").stdout == render(found, "markdown")
    for flags in (["--format", "json"], ["--json"]):
        assert run("compare", *folders, *flags).stdout == render(found, "json")
    result = run("compare", *folders, "--format", "markdown", "--out", "c.md")
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path("c.md").read_text() == render(found, "markdown")


def test_it_says_what_there_is(run: Run, dist: Path, other: Path) -> None:
    result = run("compare", "dist", "other/report.json")
    assert result.exit_code == 0 and result.stderr == ""
    rows = [line.split() for line in result.stdout.splitlines() if " onnx " in line]
    # The loss of the first isn't in its report, so it can't be marked.
    # And the long name of the second has no room in one line.
    assert [row[:4] for row in rows] == [["dist", "onnx", "fp32", "2.15"], ["*", "other/report.", "onnx", "int8"]]
    assert rows[1][4:] == ["9.00", "700", "128.0", "2.50", "3,200", "0.25", "50.0", "1.3e-06", "90.0"]
    assert "can't be marked, as the loss is unknown: dist\n" in result.stdout


@pytest.mark.parametrize("sort", SORTS)
def test_every_column_sorts(run: Run, dist: Path, other: Path, sort: str) -> None:
    result = run("compare", "dist", "other", "--sort", sort.replace("_", "-"), "--json")
    answer = json.loads(result.stdout)
    assert answer["sort"] == sort
    first = "other" if sort in ("kl", "token_agreement") else "dist"
    assert answer["rows"][0]["folder"] == first


def test_an_unknown_column_and_no_folder_are_usage(run: Run, dist: Path) -> None:
    assert run("compare", "dist", "--sort", "beauty").exit_code == 2
    result = run("compare")
    assert result.exit_code == 2 and result.stdout == ""


def spoil_report(folder: Path) -> None:
    (folder / "report.json").write_text("{")


def spoil_schema(folder: Path) -> None:
    raw = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**raw, "schema": 1}))


def drop_memory(folder: Path) -> None:
    raw = json.loads((folder / "report.json").read_text())
    del raw["artifacts"][0]["memory"]
    (folder / "report.json").write_text(json.dumps(raw))


def cut_file(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"cut")


def drop_file(folder: Path) -> None:
    (folder / "model.onnx").unlink()


def drop_report(folder: Path) -> None:
    (folder / "report.json").unlink()


@pytest.mark.parametrize(("spoil", "sentence"), [
    (spoil_report, "report.json: line 1 isn't valid JSON"),
    (spoil_schema, "report.json: schema: the report has schema 1, and this version reads 5"),
    (drop_memory, "report.json: artifacts[0].memory: the key is missing"),
    (cut_file, "model.onnx: this file has 3 bytes, and the report says 9000"),
    (drop_file, "model.onnx: this file of the artifact is missing"),
    (drop_report, "there is no such report"),
])
def test_a_damaged_folder_is_one_sentence(run: Run, dist: Path, other: Path, spoil, sentence: str) -> None:
    spoil(other)
    result = run("compare", "dist", "other", "--out", "c.txt")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: other") and sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not Path("c.txt").exists()
    failed = json.loads(run("compare", "dist", "other", "--json").stdout)
    assert failed["error"]["exit_code"] == 3


def test_a_missing_folder_is_one_sentence(run: Run, dist: Path) -> None:
    result = run("compare", "dist", "absent")
    assert result.exit_code == 3 and "absent: there is no such report" in result.stderr


def test_a_folder_stranded_between_two_renames_is_recovered(run: Run, dist: Path) -> None:
    dist.rename(dist.with_name(".dist.previous"))
    assert run("compare", "dist").exit_code == 0
    assert is_whole(dist)
