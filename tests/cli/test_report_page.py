"""needle-export report --format html: one page over one or several builds, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.report.page import render_page
from needle_export.report.schema import load_report
from tests.cli.conftest import Run
from tests.support.reports import write_artifact


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another published folder."""
    folder = tmp_path / "other"
    folder.mkdir()
    write_artifact(folder, {"model.onnx": bytes(9000)})
    return folder


def test_one_and_several(run: Run, dist: Path, other: Path) -> None:
    for folders in (["dist"], ["dist", "other"], ["other", "dist/report.json"]):
        expected = render_page([(folder, load_report(folder)) for folder in folders])
        result = run("report", *folders, "--format", "html")
        assert (result.exit_code, result.stdout, result.stderr) == (0, expected, "")
    result = run("report", "dist", "other", "--format", "html", "--out", "r.html")
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path("r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>\n")


def test_several_are_a_page_only_as_html(run: Run, dist: Path, other: Path) -> None:
    for form in (["--format", "text"], ["--format", "markdown"], ["--json"], []):
        result = run("report", "dist", "other", *form)
        assert result.exit_code == 2 and "--format html" in result.stderr


def test_a_damaged_report_leaves_the_earlier_page(run: Run, dist: Path, other: Path) -> None:
    Path("r.html").write_text("earlier")
    (other / "report.json").write_text("{")
    result = run("report", "dist", "other", "--format", "html", "--out", "r.html")
    assert result.exit_code == 3 and len(result.stderr.splitlines()) == 1
    assert Path("r.html").read_text() == "earlier"
    assert sorted(p.name for p in Path().iterdir()) == ["dist", "other", "r.html"]


def test_a_number_beyond_all_numbers_is_refused(run: Run, dist: Path) -> None:
    raw = json.loads((dist / "report.json").read_text())
    raw["artifacts"][0]["parity"]["kl"] = 7
    (dist / "report.json").write_text(json.dumps(raw).replace('"kl": 7', '"kl": 1e999'))
    for form in ("html", "json", "text"):
        result = run("report", "dist", "--format", form)
        assert result.exit_code == 3 and "1e999 isn't a number" in result.stderr


def test_text_that_no_file_can_hold_is_replaced(run: Run, dist: Path) -> None:
    raw = json.loads((dist / "report.json").read_text())
    raw["artifacts"][0]["notes"] = ["lone \ud800"]
    (dist / "report.json").write_text(json.dumps(raw))
    assert run("report", "dist", "--format", "html", "--out", "r.html").exit_code == 0
    assert "lone \ufffd" in Path("r.html").read_text(encoding="utf-8")
