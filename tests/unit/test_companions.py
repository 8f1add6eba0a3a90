"""Files that builds of the model that comes along have of their own, and that others must be given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from needle_export import demo
from needle_export.checkpoint.files import file_sha256
from needle_export.companions import given_or_demos
from needle_export.errors import BadInput, UsageError
from needle_export.report.schema import dump_report, load_report
from tests.support.reports import write_artifact


def build(folder: Path, *, of_demo: bool) -> Path:
    folder.mkdir()
    write_artifact(folder)
    if of_demo:
        report = load_report(folder)
        # A rung of it as well: what is asked of the model doesn't depend on its depth.
        made = dataclasses.replace(report.checkpoint, sha256=file_sha256(demo.files().checkpoint))
        (folder / "report.json").write_bytes(dump_report(dataclasses.replace(report, checkpoint=made)))
    return folder


def test_builds_of_the_demo_have_its_files(tmp_path: Path) -> None:
    builds = [build(tmp_path / name, of_demo=True) for name in "ab"]
    assert given_or_demos("--tools", None, builds) == demo.files().tools
    assert given_or_demos("--data", None, builds) == demo.files().heldout


def test_what_is_given_is_taken_whatever_the_build_is(tmp_path: Path) -> None:
    given = tmp_path / "mine.json"
    for folder in (build(tmp_path / "a", of_demo=True), build(tmp_path / "b", of_demo=False), tmp_path / "none"):
        assert given_or_demos("--tools", given, [folder]) == given


@pytest.mark.parametrize("option", ["--tools", "--data"])
def test_other_builds_must_be_given_them(option: str, tmp_path: Path) -> None:
    other, own = build(tmp_path / "other", of_demo=False), build(tmp_path / "own", of_demo=True)
    for folders in ([other], [own, other]):
        with pytest.raises(UsageError) as refused:
            given_or_demos(option, None, folders)  # type: ignore[arg-type]  # of a parameter
        assert str(refused.value).startswith(f"{option}: {other} needs one, ")
        assert str(refused.value).endswith(f"give {option} FILE")


def test_no_build_at_all_is_told_first(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none"):
        given_or_demos("--tools", None, [tmp_path / "none"])


def test_an_installation_without_the_demo_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path / "own", of_demo=True)

    def files() -> demo.Files:
        raise BadInput("this file of the demo model is missing", where="tools.json")

    monkeypatch.setattr(demo, "files", files)
    with pytest.raises(UsageError, match=r"^--tools: there is none to take: this file of the demo model is missing"):
        given_or_demos("--tools", None, [folder])
