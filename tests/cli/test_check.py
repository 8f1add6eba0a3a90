"""needle-export check and diff: every form, every exit code, and a sentence for what can't be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import junitparser
import pytest

from needle_export.report.schema import dump_report, load_report
from tests.cli.conftest import Run
from tests.support.reports import write_artifact

LARGE = '[[budget]]\nmetric = "size"\nmax = "10 kB"\n'
SMALL = '\n[[budget]]\nmetric = "size"\nrole = "routing"\nmax = "500 B"\n'
LOST = '[[budget]]\nmetric = "size"\ntarget = "coreml"\nmax = "1 MB"\n'


@pytest.fixture
def budgets(tmp_path: Path) -> Path:
    path = tmp_path / "budgets.toml"
    path.write_text(LARGE)
    return path


def test_within(run: Run, dist: Path, budgets: Path) -> None:
    result = run("check", "dist", "--budgets", "budgets.toml")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "within" in result.stdout and "budgets.toml, line 1" in result.stdout
    assert run("check", "dist/report.json", "--budgets", "budgets.toml").exit_code == 0


def test_exceeded_in_every_form(run: Run, dist: Path, budgets: Path) -> None:
    budgets.write_text(LARGE + SMALL)
    for style, part in (("text", "EXCEEDED"), ("markdown", "not met"), ("json", '"exceeded"'),
                        ("github", "::error file=budgets.toml,line=5,")):
        result = run("check", "dist", "--budgets", "budgets.toml", "--format", style)
        assert result.exit_code == 1 and part in result.stdout, style
        assert result.stderr == "error: 1 budget exceeded; see the table\n"
    result = run("check", "dist", "--budgets", "budgets.toml", "--json")
    # One document, and no second one for the error.
    assert json.loads(result.stdout)["exit_code"] == result.exit_code == 1


def test_files_are_written_whatever_the_verdict(run: Run, dist: Path, budgets: Path) -> None:
    budgets.write_text(LARGE + SMALL)
    files = ("--junit", "b.xml", "--markdown", "b.md", "--out", "b.txt")
    result = run("check", "dist", "--budgets", "budgets.toml", *files)
    assert (result.exit_code, result.stdout) == (1, "")
    (suite,) = list(junitparser.JUnitXml.fromfile("b.xml"))
    assert (suite.tests, suite.failures) == (2, 1)
    assert Path("b.md").read_text().startswith("## Budgets: **not met**")
    assert "EXCEEDED" in Path("b.txt").read_text()


def test_several_files_and_a_baseline(run: Run, dist: Path, budgets: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write_artifact(tmp_path / "old", {"model.onnx": bytes(2000)})
    Path("more.toml").write_text('[[budget]]\nmetric = "size"\nmax = "+7 %"\n')
    files = ("--budgets", "budgets.toml", "--budgets", "more.toml")
    result = run("check", "dist", *files, "--baseline", "old", "--json")
    assert result.exit_code == 1
    assert [(v["file"], v["status"], v["baseline"]) for v in json.loads(result.stdout)["verdicts"]] == [
        ("budgets.toml", "within", None), ("more.toml", "exceeded", 2000)]
    result = run("check", "dist", *files)
    assert (result.exit_code, result.stdout) == (2, "") and "give --baseline" in result.stderr


def test_a_budget_that_nothing_matches_ends_with_2(run: Run, dist: Path, budgets: Path) -> None:
    budgets.write_text(LARGE + LOST)
    result = run("check", "dist", "--budgets", "budgets.toml")
    assert result.exit_code == 2 and "NOTHING MATCHES" in result.stdout
    assert result.stderr.startswith("error: budgets.toml, line 4: size, coreml: at most 1 MB: no artifact is meant")


@pytest.mark.parametrize(("text", "sentence", "code"), [
    ("", "budgets.toml: there is no budget in it", 3),
    ("budget", "budgets.toml: this isn't valid TOML", 3),
    ('[[budget]]\nmetric = "size"\nmaks = "1 MB"', "budget[1].maks: there is no such key; did you mean max?", 3),
    ('[[budget]]\nmetric = "size"\nrole = "rooting"\nmax = "1 MB"', "did you mean routing?", 2),
])
def test_what_is_no_budget_is_one_sentence(run: Run, dist: Path, budgets: Path, text: str, sentence: str,
                                           code: int) -> None:
    budgets.write_text(text)
    result = run("check", "dist", "--budgets", "budgets.toml")
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr and result.stderr.count("\n") == 1
    error = json.loads(run("check", "dist", "--budgets", "budgets.toml", "--json").stdout)["error"]
    assert error["exit_code"] == code


def test_no_budgets_and_no_report_are_sentences(run: Run, dist: Path, budgets: Path) -> None:
    made = load_report(dist)
    (dist / "report.json").write_bytes(dump_report(replace(made, plan=None)))
    result = run("check", "dist")
    assert result.exit_code == 2 and "there are no budgets to check" in result.stderr
    assert run("check", "dist", "--budgets", "absent.toml").exit_code == 3
    assert run("check", "absent", "--budgets", "budgets.toml").exit_code == 3
    assert run("check", "--budgets", "budgets.toml").exit_code == 2
    assert run("check", "dist", "--budgets", "budgets.toml", "--baseline", "absent").exit_code == 3
    (dist / "model.onnx").write_bytes(b"cut")
    assert "this file has 3 bytes" in run("check", "dist", "--budgets", "budgets.toml").stderr


def test_an_array_of_tables_in_one_line_has_no_lines(run: Run, dist: Path, budgets: Path) -> None:
    budgets.write_text('budget = [{metric = "size", max = "10 kB"}]')
    verdict, = json.loads(run("check", "dist", "--budgets", "budgets.toml", "--json").stdout)["verdicts"]
    assert (verdict["status"], verdict["line"]) == ("within", None)


def test_a_report_s_own_budgets(run: Run, dist: Path) -> None:
    (verdict,) = json.loads(run("check", "dist", "--json").stdout)["verdicts"]
    assert (verdict["status"], verdict["file"]) == ("within", "ios-balanced and iphone-12")


def test_a_device_s_own_budgets(run: Run, dist: Path, budgets: Path) -> None:
    result = run("check", "dist", "--device", "pixel-8", "--json")
    verdicts = json.loads(result.stdout)["verdicts"]
    assert result.exit_code == 0 and {(v["file"], v["in_file"]) for v in verdicts} == {("pixel-8", False)}
    assert {"size", "state", "load_rss"} <= {v["metric"] for v in verdicts}
    # A file of budgets takes their place, and entries for other devices are skipped.
    budgets.write_text(LARGE + '[[budget]]\nmetric = "size"\nmax = "1 B"\ndevice = "iphone-16-pro"\n')
    result = run("check", "dist", "--device", "pixel-8", "--budgets", "budgets.toml", "--json")
    statuses = [v["status"] for v in json.loads(result.stdout)["verdicts"]]
    assert (result.exit_code, statuses) == (0, ["within", "skipped"])
    assert run("check", "dist", "--budgets", "budgets.toml").exit_code == 1
    result = run("check", "dist", "--device", "pixel-9000")
    assert result.exit_code == 2 and "there is no device 'pixel-9000'; did you mean" in result.stderr


def test_diff_in_every_form(run: Run, dist: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write_artifact(tmp_path / "old", {"model.onnx": bytes(2000)})
    result = run("diff", "old", "dist")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "old onnx fp32 → dist onnx fp32" in result.stdout and "Bytes by tensor" in result.stdout
    assert json.loads(run("diff", "old", "dist/report.json", "--json").stdout)["artifacts"][0]["total"]["delta"] == 148
    run("diff", "old", "dist", "--format", "markdown", "--out", "d.md")
    assert Path("d.md").read_text().startswith("## old onnx fp32")
    assert run("diff", "old", "absent").exit_code == 3
    assert run("diff", "old").exit_code == 2
