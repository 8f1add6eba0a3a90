"""The command line in this process with a fake pipeline, and as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click.testing
import pytest

import needle_export
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.cli.app import program
from tests.support import fake_pipeline
from tests.support.reports import write_artifact

ROOT = Path(__file__).parents[2]

Run = Callable[..., click.testing.Result]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FAKE", "NO_COLOR", "FORCE_COLOR", "NEEDLE_EXPORT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command line in this process, the pipeline faked; ``run("build", ..., fake="crash")``."""
    monkeypatch.setitem(sys.modules, "needle_export.pipeline", fake_pipeline)
    monkeypatch.setattr(needle_export, "pipeline", fake_pipeline, raising=False)
    fake_pipeline.CALLS.clear()
    fake_pipeline.CACHES.clear()

    def run(*arguments: str, fake: str = "") -> click.testing.Result:
        monkeypatch.setenv("FAKE", fake)
        return click.testing.CliRunner().invoke(program, arguments)

    yield run
    fake_pipeline.CALLS.clear()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command line as a process of its own, the pipeline faked, and ends it with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, fake: str = "", **options: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "FAKE": fake, "PYTHONPATH": str(ROOT)}
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen([sys.executable, "-m", "tests.support.fake_pipeline", *arguments],
                                   env=environment, **settings)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A small random checkpoint."""
    path = tmp_path / "small.safetensors"
    write_sample(path, SMALL, 0)
    return path


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A published folder."""
    folder = tmp_path / "dist"
    folder.mkdir()
    write_artifact(folder)
    return folder
