"""Publishing over a build with files that its manifest lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.bundle import publish as module
from needle_export.errors import UsageError
from needle_export.report.manifest import FORMAT, MANIFEST_NAME
from tests.support.reports import is_whole
from tests.unit.bundle.test_publish import NEW, OLD, build, names


@pytest.mark.parametrize("exchanged", [True, False])
def test_what_the_manifest_lists_is_replaced_too_and_nothing_else(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: bool) -> None:
    if not exchanged:
        monkeypatch.setattr(module, "exchange", lambda first, second: False)
    out = tmp_path / "dist"
    build(out, OLD)
    (out / "tokenizer.model").touch()
    with pytest.raises(UsageError, match=r"tokenizer\.model, which no build of this tool made"):
        build(out, NEW)
    listing = {"format": FORMAT, "schema": 99, "files": [{"name": "tokenizer.model"}, {"name": "loop.py"}]}
    (out / MANIFEST_NAME).write_text(json.dumps(listing))
    (out / "other.model").touch()
    with pytest.raises(UsageError, match=r"other\.model, which no build of this tool made"):
        build(out, NEW)
    (out / "other.model").unlink()
    # What Python leaves of a file that was run is the build's, and of no other.
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "mine.cpython-311.pyc").touch()
    with pytest.raises(UsageError, match=r"mine\.cpython-311\.pyc, which no build of this tool made"):
        build(out, NEW)
    (out / "__pycache__" / "mine.cpython-311.pyc").rename(out / "__pycache__" / "loop.cpython-311.pyc")
    build(out, NEW)
    assert is_whole(out) and names(tmp_path) == ["dist"]
    (out / MANIFEST_NAME).write_text("somebody's own")
    with pytest.raises(UsageError, match=r"a manifest\.json that can't be read"):
        build(out, OLD)
