"""onnxruntime-web's files: from a folder, or through npm, and never without being checked."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from needle_export.errors import BadInput, Unsupported
from needle_export.web import runtime
from needle_export.web.runtime import FILES, MODULE, put_runtime


def dist(folder: Path, version: str = "9.8.7") -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f"/*!\n * ONNX Runtime Web v{version}\n */ {name}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("place", ["", "dist"], ids=["the files' own folder", "the package's"])
def test_a_folder_of_files_is_copied_and_tells_its_version(tmp_path: Path, place: str) -> None:
    dist(tmp_path / "given" / place)
    out = tmp_path / "out"
    out.mkdir()
    assert put_runtime(out, tmp_path / "given", None) == "9.8.7"
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)


def test_a_folder_without_a_file_says_which(tmp_path: Path) -> None:
    dist(tmp_path / "given")
    (tmp_path / "given" / FILES[2]).unlink()
    with pytest.raises(BadInput, match=rf"there is no {FILES[2]}; give the dist folder of the npm package"):
        put_runtime(tmp_path, tmp_path / "given", None)


def test_another_module_of_that_name_is_refused(tmp_path: Path) -> None:
    (dist(tmp_path / "given") / MODULE).write_text("export default 1", encoding="utf-8")
    with pytest.raises(BadInput, match="this isn't onnxruntime-web's"):
        put_runtime(tmp_path, tmp_path / "given", None)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program called npm that hands out ``package.tgz`` of its folder, or fails; it counts its calls."""
    folder = tmp_path / "npm"
    folder.mkdir()
    program = folder / "npm"
    program.write_text(
        f"#!/bin/sh\necho \"$@\" >>{folder}/calls\n"
        f"[ -f {folder}/package.tgz ] || {{ echo 'npm error nothing there' >&2; exit 1; }}\n"
        f"cp {folder}/package.tgz \"$4\"/onnxruntime-web.tgz\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def package(folder: Path) -> str:
    """A package of three files; its hash as npm has it."""
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w:gz") as archive:
        for name in FILES:
            entry = tarfile.TarInfo(f"package/dist/{name}")
            data = f"content of {name}".encode()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    (folder / "package.tgz").write_bytes(blob.getvalue())
    return "sha512-" + base64.b64encode(hashlib.sha512(blob.getvalue()).digest()).decode()


def test_it_is_fetched_once_and_kept(tmp_path: Path, npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTEGRITY", package(npm))
    for name in ("one", "two"):
        out = tmp_path / name
        out.mkdir()
        assert put_runtime(out, None, tmp_path / "cache") == runtime.VERSION
        assert (out / MODULE).read_text(encoding="utf-8") == f"content of {MODULE}"
    calls = (npm / "calls").read_text(encoding="utf-8").splitlines()
    assert len(calls) == 1
    assert calls[0].startswith(f"pack onnxruntime-web@{runtime.VERSION} ")


def test_a_kept_package_that_was_damaged_is_fetched_again(
    tmp_path: Path, npm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "INTEGRITY", package(npm))
    put_runtime(tmp_path, None, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"damaged")
    put_runtime(tmp_path, None, tmp_path / "cache")
    assert "damaged" in caplog.text
    assert kept.read_bytes() == (npm / "package.tgz").read_bytes()


def test_another_package_than_the_tested_one_is_refused(tmp_path: Path, npm: Path) -> None:
    package(npm)
    with pytest.raises(BadInput, match=r"its hash is sha512-.*so it isn't the one that was tested"):
        put_runtime(tmp_path, None, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_npm_says_is_handed_on(tmp_path: Path, npm: Path) -> None:
    with pytest.raises(Unsupported, match=r"npm couldn't fetch onnxruntime-web .*npm error nothing there.*--runtime"):
        put_runtime(tmp_path, None, None)


def test_without_npm_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"no npm to fetch it with; install Node.js, or give --runtime") as told:
        put_runtime(tmp_path, None, None)
    assert told.value.exit_code == 5
