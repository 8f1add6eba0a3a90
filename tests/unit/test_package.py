"""A wheel holds the data that the program reads, and finds it where it was installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from needle_export import demo
from needle_export.config.device import device_names
from needle_export.config.shipped import shipped

ROOT = Path(__file__).parents[2]

_ASK = """
from needle_export.config.device import device_names, load_device
from needle_export.config.shipped import shipped
names = device_names()
assert all(load_device(name).id == name for name in names)
print(shipped("devices").parent, *names)
"""


def test_a_wheel_holds_devices_and_recipes(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source, wheels, installed = tmp_path / "source", tmp_path / "wheels", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("needle_export", "devices", "recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    wheels.mkdir()
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        archive.extractall(installed)
    for kind in ("devices", "recipes"):
        expected = {f"needle_export/{kind}/{path.name}" for path in (ROOT / kind).glob("*.toml")}
        assert {name for name in held if name.startswith(f"needle_export/{kind}/")} == expected
    for path in (ROOT / "needle_export" / "report" / "templates").iterdir():
        assert f"needle_export/report/templates/{path.name}" in held
    assert "needle_export/measure/overheads.json" in held
    for file in vars(demo.files()).values():
        assert f"needle_export/demo/model/{file.name}" in held
    for kind in ("static", "templates"):
        for path in (ROOT / "needle_export" / "web" / kind).iterdir():
            assert f"needle_export/web/{kind}/{path.name}" in held
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", _ASK], cwd=tmp_path, env=environment, capture_output=True, text=True,
                         check=True)
    assert run.stdout.split() == [str(installed / "needle_export"), *device_names()]


def test_a_checkout_reads_the_folders_beside_the_package() -> None:
    assert shipped("devices").resolve() == ROOT / "devices" and shipped("recipes").resolve() == ROOT / "recipes"
