"""What a report is given when its artifacts are measured: times, memory, and a word where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from needle_export import timing
from needle_export.config.progress import NullProgress
from needle_export.report.measured import Loaded
from needle_export.report.schema import Report
from tests.support.reports import make_artifact, make_report

TIMES = {"load_ms": 1.0, "first_ms": 1.0, "prefill": [], "peak_rss_bytes": None, "told": [],
         "decode": {"ms_p50": 1.0, "ms_p95": 2.0, "tokens_per_s": 1000.0, "position": 3}}
TAKEN = {"baseline_bytes": 50, "rss_bytes": 90, "mapped_bytes": None, "peak_bytes": 95}


def measured(monkeypatch: pytest.MonkeyPatch, taken: object, **options: Any) -> tuple[Report, list[dict[str, Any]]]:
    """A report measured by stand-ins, and what the memory's processes were asked for."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(timing.latency, "measure", lambda *_, **__: TIMES)

    def measure(target: str, folder: Path, vocab: int, **request: Any) -> object:
        asked.append(request)
        return taken

    monkeypatch.setattr(timing.memory, "measure", measure)
    before = make_report(make_artifact(latency=None, memory=None), options={"context": 1024, **options})
    after = timing.with_measurements(before, Path("dist"), threads=2, steps=4, prompts=(8,), progress=NullProgress(),
                                     shown=Path("dist"))
    return after, asked


def test_memory_is_measured_of_decode_alone_and_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    report, asked = measured(monkeypatch, TAKEN)
    memory, latency = report.artifacts[0].memory, report.artifacts[0].latency
    assert memory is not None and latency is not None
    assert memory.decode == memory.all == Loaded(50, 90, None, 95)
    assert (memory.host, memory.threads, memory.command) == (latency.host, 2, latency.command)
    assert asked == [{"threads": 2, "prompt": 0, "decode_alone": True},
                     {"threads": 2, "prompt": 64, "decode_alone": False}]
    assert memory.prompt_tokens == 64


@pytest.mark.parametrize(("context", "prompt"), [(65, 64), (64, 63), (2, 1), (1, 0)])
def test_the_prompt_leaves_room_for_a_step(monkeypatch: pytest.MonkeyPatch, context: int, prompt: int) -> None:
    _, asked = measured(monkeypatch, TAKEN, context=context)
    assert [request["prompt"] for request in asked] == [0, prompt]


def test_where_the_system_does_not_tell_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = measured(monkeypatch, None)
    assert report.artifacts[0].memory is None and report.artifacts[0].latency is not None
    assert "load memory wasn't measured" in report.artifacts[0].notes[-1]
