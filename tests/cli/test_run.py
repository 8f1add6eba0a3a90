"""needle-export run: what a session is told as, and what options may be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from needle_export import answering
from needle_export.generate.calls import Call
from tests.cli.conftest import Run


def session(**changes: Any) -> answering.Session:
    call = Call("say", {"text": "é \"x\""})
    found = answering.Answered("q", "text", True, "", (call, call), True, 700, 31, 81.25, 312.5)
    told = {"target": "onnx", "runtime": "a runtime", "weights": "int4", "random": False, "evaluator": False,
            "threads": 2, "tools": "t.json", "constrained": True, "notes": (), "answers": (found,)}
    return answering.Session(**{**told, **changes})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for, and in ``says`` the session that it is given."""
    kept: dict[str, Any] = {"says": session()}

    def answer(*given: Any, **named: Any) -> answering.Session:
        kept.update(given=given, **named)
        told: answering.Session = kept["says"]
        return told

    monkeypatch.setattr(answering, "answer", answer)
    return kept


def test_a_session_in_words(run: Run, asked: dict[str, Any]) -> None:
    result = run("run", "dist", "q")
    assert result.exit_code == 0, result.stderr
    line = 'say {"text":"é \\"x\\""}'
    assert result.stdout.splitlines() == [
        line, line, "  31 tokens, first token after 81.2 ms (700 tokens of prompt), then 312.5 tokens/s", "",
        "in a runtime, onnx int4, 2 threads, on this machine", "tools: t.json"]
    assert asked["given"] == (Path("dist"), ["q"], None)
    names = ("tokenizer", "system", "constrained", "max_new_tokens", "max_calls", "threads")
    assert [asked[name] for name in names] == [None, "", True, 256, None, 1]


def test_random_weights_are_told_first(run: Run, asked: dict[str, Any]) -> None:
    asked["says"] = session(random=True)
    assert run("run", "dist", "q").stdout.startswith("! RANDOM WEIGHTS")


def test_everything_that_is_asked_for(run: Run, asked: dict[str, Any]) -> None:
    line = ("run dist a b --tools t.json --system s --tokenizer m --unconstrained --max-new-tokens 9 --max-calls 3 "
            "--threads 2")
    assert run(*line.split()).exit_code == 0
    assert asked["given"] == (Path("dist"), ["a", "b"], Path("t.json"))
    names = ("tokenizer", "system", "constrained", "max_new_tokens", "max_calls", "threads")
    assert [asked[name] for name in names] == [Path("m"), "s", False, 9, 3, 2]


@pytest.mark.parametrize(("line", "option"), [
    ("run dist q", "--tools"), ("evaluate dist", "--data"), ("web dist --out site", "--tools")])
def test_builds_of_other_models_need_files_of_their_own(run: Run, dist: Path, line: str, option: str) -> None:
    result = run(*line.split())
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith(f"error: {option}: ") and result.stderr.endswith(f"give {option} FILE\n")
    assert result.stderr.count("\n") == 1
