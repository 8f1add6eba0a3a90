"""needle-export demo: a row for each target, whatever becomes of it, and exit codes that tell them apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from needle_export import answering, batch
from needle_export.errors import Unsupported, VerificationFailed
from needle_export.generate.calls import Call
from tests.cli.conftest import Run

LIGHTS = Call("set_lights", {"room": "kitchen", "state": "on"})
ABSENT = Unsupported("coremltools is not installed", fix="install it with: pip install 'needle-export[coreml]'")


def session(target: str, *calls: Call, problem: str = "") -> answering.Session:
    found = answering.Answered("a request", "text", not problem, problem, calls, not problem, 700, 31, 81.25, 312.5)
    return answering.Session(target, "a runtime", "int4", False, target == "coreml", 1, "tools.json", True, (),
                             (found,))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """How builds and requests end by target: an error of the build, an error of asking in a list, or a session."""
    found: dict[str, Any] = {"onnx": session("onnx", LIGHTS), "tflite": session("tflite", LIGHTS), "coreml": session(
        "coreml", LIGHTS)}

    def run(jobs: Any, progress: object, cache: object) -> Any:
        for job in jobs:
            assert job.options.checkpoint == "demo:" and job.options.weights in ("int4", "fp16")
            end = found[job.name]
            status = "verified-by-evaluator" if job.name == "coreml" else "verified-on-runtime"
            artifact = SimpleNamespace(status=status, size=SimpleNamespace(total_bytes=2_500_000))
            report = None if isinstance(end, Exception) else SimpleNamespace(artifacts=(artifact,))
            yield batch.Outcome(job, "failed" if report is None else "built", report,
                                error=end if report is None else None)

    def answer(dist: Path, queries: list[str], *_: object, **named: Any) -> answering.Session:
        end = found[dist.name]
        found["asked"] = queries
        assert "tokenizer" not in named  # it lies beside the build
        if isinstance(end, list):
            raise end[0]
        return end

    monkeypatch.setattr(batch, "run", run)
    monkeypatch.setattr(answering, "answer", answer)
    return found


def rows(text: str) -> dict[str, list[str]]:
    """Lines of a table by their first word."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.split()[:1] and "int4" in line}


def test_a_row_for_each_target(run: Run, ends: dict[str, Any]) -> None:
    result = run("demo")
    assert result.exit_code == 0, result.stderr
    found = rows(result.stdout)
    assert list(found) == ["onnx", "tflite", "coreml"]
    assert found["onnx"] == ["onnx", "int4", "2.50", "MB", "set_lights", "312", "81.2", "ms", "verified"]
    assert result.stdout.count('{"room":"kitchen","state":"on"}') == 3  # below the name, where a line is too short
    assert found["coreml"][-1] == "evaluated" and "not Needle 3" in result.stdout
    assert ends["asked"] == ["turn on the kitchen lights"]


def test_answers_that_are_no_calls(run: Run, ends: dict[str, Any]) -> None:
    ends |= {"onnx": session("onnx"), "tflite": session("tflite", problem="it isn't calls")}
    result = run("demo", "--targets", "onnx,tflite", "--query", "hello")
    assert result.exit_code == 0 and ends["asked"] == ["hello"]
    found = {target: " ".join(cells) for target, cells in rows(result.stdout).items()}
    assert "MB calls nothing 312" in found["onnx"] and "MB no valid calls: it isn't calls 312" in found["tflite"]


def test_what_is_not_installed_fails_alone_only(run: Run, ends: dict[str, Any]) -> None:
    ends |= {"coreml": ABSENT, "tflite": ModuleNotFoundError("No module named 'ai_edge_litert'", name="ai_edge_litert")}
    result = run("demo")
    assert result.exit_code == 0
    assert result.stdout.count("not here") == 2 and rows(result.stdout)["onnx"][-1] == "verified"
    assert "error: coreml: coremltools is not installed; install it with" in result.stderr
    assert run("demo", "--targets", "coreml,tflite").exit_code == 5


@pytest.mark.parametrize("end", [VerificationFailed("logits differ"), [VerificationFailed("logits differ")]])
def test_a_failure_is_its_own_and_told(run: Run, ends: dict[str, Any], end: Any) -> None:
    ends["onnx"] = end
    result = run("demo", "--weights", "fp16", "--json")
    assert result.exit_code == 4
    told = json.loads(result.stdout)
    assert [entry["target"] for entry in told["targets"]] == ["onnx", "tflite", "coreml"]
    failed, asked, _ = told["targets"]
    assert failed["error"] == {"message": "logits differ", "where": "", "fix": "", "exit_code": 4}
    assert failed["session"] is None and (failed["total_bytes"] is None) == isinstance(end, Exception)
    (answer,) = asked["session"]["answers"]
    assert answer["calls"] == [{"name": "set_lights", "arguments": {"room": "kitchen", "state": "on"}}]
    assert asked["error"] is None and asked["weights"] == "fp16" and asked["total_bytes"] == 2_500_000


@pytest.mark.parametrize("targets", ["nope", "", "onnx,onnx", "onnx,nope"])
def test_targets_that_can_not_be(run: Run, targets: str) -> None:
    result = run("demo", "--targets", targets)
    assert result.exit_code == 2 and result.stderr.startswith("error: --targets: ")
