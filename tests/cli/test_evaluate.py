"""needle-export evaluate: what it is asked reaches the evaluation, and what is found is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needle_export import evaluation
from needle_export.evaluation import Evaluated, EvaluationOptions
from needle_export.report.evaluation import Evaluation
from tests.cli.conftest import Run
from tests.support.reports import make_evaluation


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, EvaluationOptions]]:
    calls: list[tuple[Any, EvaluationOptions]] = []

    def evaluate(folders: Any, options: EvaluationOptions, progress: Any) -> tuple[Evaluated, ...]:
        calls.append((folders, options))
        return tuple(Evaluated(str(f), "onnx", "int4", "random" in f.name, "q.jsonl", "t.json",
                               told(options)) for f in folders)

    def told(options: EvaluationOptions) -> Evaluation:
        if options.checkpoint is not None:
            return make_evaluation()
        return make_evaluation(nothing_precision=None, reference=None, reference_why=evaluation.NO_REFERENCE)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    return calls


def test_with_defaults(run: Run, asked: list[Any]) -> None:
    result = run("evaluate", "dist", "--data", "q.jsonl")
    assert result.exit_code == 0, result.stderr
    assert asked == [((Path("dist"),), EvaluationOptions(Path("q.jsonl")))]
    text = " ".join(result.stdout.split())
    for said in ("dist onnx int4", "90.0 %", "180/200", "89.0 to", "91.0", "not compared: no --checkpoint was given",
                 "queries: q.jsonl",
                 "tools of lines that have none: t.json", "of heldout.jsonl ffffffff",
                 "200 queries, with the grammar", "ran in onnxruntime 1.32.0"):
        assert said in text, said
    assert "RANDOM" not in text and max(map(len, result.stdout.splitlines())) <= 100


def test_with_everything(run: Run, asked: list[Any]) -> None:
    line = ("evaluate a random --data q.jsonl --tools t.json --limit 7 --unconstrained --checkpoint c --lora l "
            "--tokenizer m --max-new-tokens 9 --threads 2")
    result = run(*line.split())
    assert result.exit_code == 0, result.stderr
    assert asked == [((Path("a"), Path("random")), EvaluationOptions(
        Path("q.jsonl"), Path("t.json"), 7, False, 9, "c", "l", Path("m"), 2))]
    assert result.stdout.startswith("! RANDOM WEIGHTS")
    assert "the float32 reference itself: exact calls 91.0 % (182 of 200)" in " ".join(result.stdout.split())


def test_as_json(run: Run, asked: list[Any]) -> None:
    result = run("evaluate", "a", "b", "--data", "q.jsonl", "--json")
    found = json.loads(result.stdout)["evaluated"]
    assert [(f["folder"], f["target"], f["weights"], f["random"]) for f in found] == [
        ("a", "onnx", "int4", False), ("b", "onnx", "int4", False)]
    assert (found[0]["data"], found[0]["tools"]) == ("q.jsonl", "t.json")
    assert found[0]["evaluation"]["exact_calls"] == {
        "count": 180, "of": 200, "share": 0.9, "low": 0.89, "high": 0.91}
    assert found[0]["evaluation"]["reference"] is None


@pytest.mark.parametrize(("line", "code", "said"), [
    ("evaluate --data x", 2, "DIR"), ("evaluate d --data x --limit 0", 2, "--limit"),
    ("evaluate d --data x --lora l", 2, "give --checkpoint too"),
    ("evaluate d --data nowhere.jsonl", 3, "there is no such file")])
def test_what_is_refused(run: Run, line: str, code: int, said: str) -> None:
    result = run(*line.split())
    assert result.exit_code == code and said in result.stderr
    assert len(result.stderr.splitlines()) <= 3 and not result.stdout
