"""The command evaluate in TFLite and the Core ML evaluator: counted as asking one by one counts, and in reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click.testing
import pytest

from needle_export import demo
from needle_export.cli.app import program
from needle_export.generate.assistant import Assistant
from needle_export.generate.examples import Example, read_examples, sample
from needle_export.report.schema import load_report
from needle_export.targets import find_target
from tests.support.demo_builds import WEIGHTS, DemoBuilds

#: ONNX is in test_answers.py, without rounded weights.
TARGETS = ("tflite", "coreml")

#: Of queries asked of two layers with 4-bit weights: so many that some answers aren't those of the float reference.
ASKED = 40

Calls = list[dict[str, Any]]


def command(*arguments: object) -> str:
    result = click.testing.CliRunner().invoke(program, [str(a) for a in arguments])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


@pytest.fixture(scope="module")
def folders(demos: DemoBuilds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the builds, into whose reports evaluations go."""
    root = tmp_path_factory.mktemp("evaluated")
    return {target: demos.copy(target, root / target) for target in TARGETS}


@pytest.fixture(scope="module")
def told(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the command says of each target."""
    files = demo.files()
    text = command("evaluate", *folders.values(), "--data", files.heldout, "--tools", files.tools, "--tokenizer",
                   files.tokenizer, "--checkpoint", "demo:", "--limit", ASKED, "--json")
    found = json.loads(text)["evaluated"]
    assert [(f["folder"], f["weights"], f["random"]) for f in found] == [
        (str(folder), WEIGHTS, False) for folder in folders.values()]
    return {f["target"]: f["evaluation"] for f in found}


@pytest.fixture(scope="module")
def examples(demos: DemoBuilds) -> tuple[Example, ...]:
    """The queries that were asked."""
    return sample(read_examples(demo.files().heldout.read_bytes(), demos.tools), ASKED)


def calls_of(runner: Any, demos: DemoBuilds, examples: Sequence[Example]) -> list[Calls]:
    """What a model calls, each prompt read from its start."""
    assistant = Assistant(runner, demos.tokenizer, demos.tools)
    return [[asdict(call) for call in assistant.ask(example.query).calls or ()] for example in examples]


@pytest.fixture(scope="module")
def reference(demos: DemoBuilds, examples: tuple[Example, ...]) -> list[Calls]:
    """What the float reference calls."""
    return calls_of(demos.reference, demos, examples)


def counts(share: dict[str, Any]) -> tuple[int, int]:
    assert share["low"] <= share["share"] == share["count"] / share["of"] <= share["high"]
    return share["count"], share["of"]


@pytest.mark.parametrize("target", TARGETS)
def test_its_counts_are_those_of_asking_one_by_one(
    target: str, demos: DemoBuilds, told: dict[str, Any], examples: tuple[Example, ...], reference: list[Calls]
) -> None:
    e = told[target]
    right = [[asdict(call) for call in example.answers] for example in examples]
    given = calls_of(find_target(target).open(demos.get(target), threads=1), demos, examples)
    assert counts(e["exact_calls"]) == (sum(a == b for a, b in zip(given, right, strict=True)), ASKED)
    assert counts(e["tool_names"])[0] == sum([c["name"] for c in a] == [c["name"] for c in b]
                                             for a, b in zip(given, right, strict=True))
    nothing = sum(a == b == [] for a, b in zip(given, right, strict=True))
    assert counts(e["nothing_precision"]) == (nothing, given.count([]))
    assert counts(e["nothing_recall"]) == (nothing, right.count([]))
    assert 0 < nothing < right.count([]) < ASKED  # neither all nor none, or the two shares tell nothing
    assert (e["invalid"]["count"], e["cut"]["count"], e["constrained"]) == (0, 0, True)
    beside = e["reference"]
    same = sum(a == b for a, b in zip(given, reference, strict=True))
    assert counts(beside["same_calls"]) == (same, ASKED) and ASKED // 2 < same < ASKED
    assert counts(beside["exact_calls"]) == (sum(a == b for a, b in zip(reference, right, strict=True)), ASKED)
    assert counts(beside["same_tokens"])[0] <= same
    assert e["runtime"].startswith("evaluator of" if target == "coreml" else find_target(target).runtime)


def test_reports_and_their_comparison_hold_them(folders: dict[str, Path], told: dict[str, Any]) -> None:
    for target, folder in folders.items():
        (artifact,) = json.loads((folder / "report.json").read_text(encoding="utf-8"))["artifacts"]
        assert artifact["evaluations"] == [told[target]]
        assert f"{told[target]['exact_calls']['count']} of {ASKED}" in command("report", folder)
    rows = json.loads(command("compare", *folders.values(), "--json"))["rows"]
    assert len(rows) == len(TARGETS)
    for row in rows:
        e = told[row["target"]]
        shares = e["exact_calls"], e["nothing_precision"], e["nothing_recall"], e["reference"]["same_calls"]
        names = "exact_call_accuracy", "nothing_precision", "nothing_recall", "reference_agreement"
        assert [row["metrics"][name]["value"] for name in names] == [share["share"] for share in shares]
        assert row["answers"]["low"] == e["exact_calls"]["low"]
    text = " ".join(command("compare", *folders.values()).split())
    assert "exact calls, 95 % interval" in text and f"{100 * told['coreml']['exact_calls']['share']:.1f}" in text


def test_another_number_of_queries_stands_beside(folders: dict[str, Path], told: dict[str, Any]) -> None:
    files = demo.files()
    common = ("evaluate", folders["tflite"], "--data", files.heldout, "--tools", files.tools, "--tokenizer",
              files.tokenizer)
    text = " ".join(command(*common, "--limit", 3).split())
    assert "3 of 1,000 queries" in text and "not compared: no --checkpoint was given" in text
    evaluations = load_report(folders["tflite"]).artifacts[0].evaluations
    assert [e.data.queries for e in evaluations] == [ASKED, 3]
    assert f"queries: {files.heldout}" in text and f"tools of lines that have none: {files.tools}" in text
    # The same file and tools are taken where none are given, since it is a build of their model.
    (bare,) = json.loads(command("evaluate", folders["tflite"], "--limit", 3, "--json"))["evaluated"]
    assert (bare["data"], bare["tools"]) == (str(files.heldout), str(files.tools))
    assert len(load_report(folders["tflite"]).artifacts[0].evaluations) == 2  # the same again takes its place
