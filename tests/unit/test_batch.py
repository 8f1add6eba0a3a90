"""Several builds: what is the same is made once, with or without a cache that outlives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import needle_export
from needle_export import batch
from needle_export.batch import Job
from needle_export.bundle.cache import Cache
from needle_export.bundle.publish import publish, stage
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, NeedleExportError, UsageError
from needle_export.report.schema import Report
from needle_export.reuse import Earlier
from tests.support.reports import is_whole, write_artifact

Run = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders of artifacts that weren't taken from a cache, by a pipeline that makes nothing real."""
    made: list[str] = []
    checkpoint: Any = SimpleNamespace(
        source=SimpleNamespace(sha256="0" * 64, path_name="x"), geometry=SimpleNamespace(num_layers=3)
    )

    def build(options: BuildOptions, progress: Any, plan: Any, cache: Cache | None, device: Any) -> Report:
        def make() -> Report:
            made.append(options.out.name)
            if options.seed == 13:
                raise BadInput("unlucky")
            return write_artifact(folder)

        with stage(options.out) as folder:
            report = Earlier(cache, options, checkpoint, ()).built((), folder, progress, make)
            publish(folder, options.out)
        return report

    monkeypatch.setattr(needle_export, "pipeline", SimpleNamespace(build=build), raising=False)
    return made


def job(folder: Path, name: str, **changes: Any) -> Job:
    return Job(name, BuildOptions("x", folder / name, **changes))


def run(jobs: list[Job], cache: Cache | None = None) -> list[tuple[str, str, str]]:
    return [(o.job.name, o.status, o.same_as) for o in batch.run(jobs, NullProgress(), cache)]


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_the_same_is_built_once(made: list[str], tmp_path: Path, cached: bool) -> None:
    cache = Cache(tmp_path / "cache", 10**6) if cached else None
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", context=64), job(tmp_path, "c", threads=2, bench=False)]
    assert run(jobs, cache) == [("a", "built", ""), ("b", "built", ""), ("c", "same", "a")]
    assert made == ["a", "b"] and all(is_whole(tmp_path / name) for name in "abc")
    again = [(n, "from the cache" if cached else "built", "") for n in "ab"]
    assert run(jobs, cache) == [*again, ("c", "same", "a")]
    assert made == (["a", "b"] if cached else ["a", "b", "a", "b"])


def test_without_a_cache_nothing_stays(made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run([job(tmp_path, "a"), job(tmp_path, "b")])
    assert made == ["a"] and not list((tmp_path / "temporary").iterdir())


def test_what_failed_is_not_tried_twice(made: list[str], tmp_path: Path) -> None:
    wrong: NeedleExportError = UsageError("no")
    jobs = [job(tmp_path, "a", seed=13), Job("b", wrong), job(tmp_path, "c", seed=13), job(tmp_path, "d")]
    outcomes = list(batch.run(jobs, NullProgress(), None))
    assert [(o.status, o.same_as) for o in outcomes] == [("failed", ""), ("failed", ""), ("failed", "a"), ("built", "")]
    assert outcomes[0].error is outcomes[2].error and outcomes[1].error is wrong
    assert made == ["a", "d"]


def test_what_is_refused_is_not_built(made: list[str], tmp_path: Path) -> None:
    refused = Job("a", BuildOptions("x", tmp_path / "a"), ("the phone can't",))
    assert run([refused, job(tmp_path, "b")]) == [("a", "refused", ""), ("b", "built", "")]
    assert made == ["b"]


def test_an_interrupt_is_no_failure(made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(needle_export, "pipeline", SimpleNamespace(build=interrupt))
    with pytest.raises(KeyboardInterrupt):
        run([job(tmp_path, "a"), job(tmp_path, "b")])
