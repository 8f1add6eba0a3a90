"""A site is replaced by a site, and by nothing that would take somebody's files away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.bundle.publish import publish, stage
from needle_export.bundle.site import FORMAT, SITE_NAME
from needle_export.errors import UsageError


def site(out: Path, text: str) -> None:
    with stage(out) as staging:
        (staging / "data").mkdir()
        (staging / "data" / "page.html").write_text(text)
        (staging / SITE_NAME).write_text(json.dumps({"format": FORMAT, "files": [{"path": "data/page.html"}]}))
        publish(staging, out)


def test_a_site_is_known_by_its_list(tmp_path: Path) -> None:
    for text in ("one", "two"):
        site(tmp_path / "site", text)
    assert (tmp_path / "site" / "data" / "page.html").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize(("name", "what"), [
    ("data/notes.txt", "data/notes.txt"),
    (SITE_NAME, f"a {SITE_NAME} that can't be read"),
])
def test_a_site_with_anything_else_in_it_stays(tmp_path: Path, name: str, what: str) -> None:
    site(tmp_path / "site", "one")
    (tmp_path / "site" / name).write_text('{"files": [], "format": "another"}')
    with pytest.raises(UsageError, match=f"the folder holds {what}"):
        site(tmp_path / "site", "two")
    assert (tmp_path / "site" / "data" / "page.html").read_text() == "one"


@pytest.mark.parametrize("text", ["[]", "{}", "{", "[" * 100_000, '{"format": "needle-export site", "files": [3]}'])
def test_a_list_that_is_none_is_somebody_elses(tmp_path: Path, text: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / SITE_NAME).write_text(text)
    with pytest.raises(UsageError, match="which no build of this tool made"):
        site(tmp_path / "site", "mine")
    assert (tmp_path / "site" / SITE_NAME).read_text() == text
