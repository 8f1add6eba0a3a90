"""A gate in all its forms: the same verdicts, and nothing in a name that steers whoever reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import junitparser
import pytest

from needle_export.report.gate import Gate, Verdict
from needle_export.report.gate_view import STATUS_WORDS, render_gate, shown, suggestions
from needle_export.report.junit import render_junit
from needle_export.report.render import GATE_STYLES
from needle_export.report.schema import FileInfo
from tests.support.budgets import artifact, budget, gate
from tests.support.reports import make_report, make_size

DOC = (Path(__file__).parents[3] / "docs" / "budgets.md").read_text()

HOSTILE = "a\x1b[2J\nb\x00::error::]]>&<c>|d,e:f%\ud800"


@pytest.fixture
def mixed() -> Gate:
    """One verdict of every status: within, exceeded, unknown, unmatched, skipped."""
    return gate(
        budget("size", max="10 kB"), budget("size", role="routing", max="500 B"),
        budget("decode", max="4 ms", device="pixel-8", estimated=True), budget("size", max="1 MB", target="coreml"),
        budget("state", max="1 MB", target="tflite", optional=True),
        reports=[make_report(artifact(), random=True)])


def test_text_in_100_columns(mixed: Gate) -> None:
    text = render_gate(mixed, "text", width=100)
    assert max(map(len, text.splitlines())) <= 100
    told = " ".join(text.split())
    assert "! RANDOM WEIGHTS" in text and "1 within, 1 exceeded, 1 not known, 1 nothing matches, 1 skipped" in told
    for row in ("within size a onnx fp32 2.15 kB ≤ 10.0 kB 7.85 kB left (78.5 %)",
                "EXCEEDED size routing a onnx fp32 537 B ≤ 500 B 37 B over (7.4 %)",
                "NOT KNOWN decode a onnx fp32 -", "NOTHING MATCHES size -", "skipped state -"):
        assert row in told, row
    assert "NOTHING MATCHES: budgets.toml, line 16: size, coreml: at most 1 MB; no artifact is meant" in told
    assert 'could be tighter: budgets.toml, line 1: size: at most 10 kB; 2.15 kB is used; max = "2.17 kB"' in told


def test_a_byte_too_many_is_seen() -> None:
    text = render_gate(gate(budget("size", max="2147 B")), "text")
    assert "1 B over (0.0 %)" in " ".join(text.split())


def test_where_measured_values_and_baselines_are_of() -> None:
    report = make_report(artifact())
    text = " ".join(render_gate(gate(budget("decode", max="4 ms"), budget("size", role="routing", max="+0 %"),
                                     baselines=[report]), "text", width=200).split())
    assert "decode: measured on Imaginary 9000, 2 cores, Linux, 1 thread, after 256 tokens" in text
    assert "baseline: size routing of a onnx fp32 was 537 B" in text


def test_markdown_leads_with_the_verdict(mixed: Gate) -> None:
    page = render_gate(mixed, "markdown")
    assert page.startswith("## Budgets: **not met**\n")
    assert "| ✅ within | size | a onnx fp32 | 2.15 kB | ≤ 10.0 kB | 7.85 kB left (78.5 %) |" in page
    assert "| ❌ EXCEEDED | size routing |" in page
    assert render_gate(gate(budget("size", max="10 kB")), "markdown").startswith("## Budgets: within\n")


def test_annotations_stand_at_the_budget_s_line(mixed: Gate) -> None:
    lines = render_gate(mixed, "github").splitlines()
    errors = [line for line in lines if line.startswith("::error ")]
    assert [line.split("::")[1] for line in errors] == [
        "error file=budgets.toml,line=6,title=Budget exceeded%3A size",
        "error file=budgets.toml,line=11,title=Budget not known%3A decode",
        "error file=budgets.toml,line=16,title=Budget nothing matches%3A size"]
    assert errors[0].endswith("::a onnx fp32: size of routing: at most 500 B; it is 537 B: 37 B over (7.4 %25)")
    assert [line for line in lines if line.startswith("::notice ")] and "::warning title=Random weights::" in lines[0]
    # Without a line the file alone is told.
    moved = dataclasses.replace(mixed, verdicts=tuple(dataclasses.replace(v, line=None) for v in mixed.verdicts))
    assert "::error file=budgets.toml,title=" in render_gate(moved, "github")
    moved = dataclasses.replace(mixed, verdicts=tuple(dataclasses.replace(v, in_file=False) for v in mixed.verdicts))
    assert "::error title=Budget exceeded%3A size::" in render_gate(moved, "github")


def test_json_has_every_field_and_is_documented(mixed: Gate) -> None:
    raw = json.loads(render_gate(mixed, "json"))
    assert (set(raw), raw["exit_code"]) == ({"verdicts", "warnings", "exit_code"}, 1)
    assert [v["status"] for v in raw["verdicts"]] == ["within", "exceeded", "unknown", "unmatched", "skipped"]
    section = DOC.split("\n## check --json\n")[1].split("\n## ")[0]
    for field in dataclasses.fields(Verdict):
        assert f"`{field.name}`" in section, field.name
    statuses = DOC.split("\n## Statuses and exit codes\n")[1].split("\n## ")[0]
    for status, word in STATUS_WORDS.items():
        assert f"| `{status}` | {word} |" in statuses


def test_junit_has_a_case_for_each_verdict(mixed: Gate) -> None:
    xml = junitparser.JUnitXml.fromstring(render_junit(mixed).encode())
    (suite,) = list(xml)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (5, 2, 1, 1)
    results = [[type(r).__name__ for r in case.result] for case in suite]
    assert results == [[], ["Failure"], ["Failure"], ["Error"], ["Skipped"]]
    (exceeded,) = [case for case in suite if case.name == "size of routing: at most 500 B"]
    assert exceeded.classname == "a onnx fp32" and "37 B over" in exceeded.result[0].message


def test_no_name_steers_a_terminal_a_log_or_an_xml_reader(mixed: Gate) -> None:
    verdicts = tuple(dataclasses.replace(v, report=HOSTILE, file=HOSTILE, why=HOSTILE, where=HOSTILE, budget=HOSTILE)
                     for v in mixed.verdicts)
    hostile = dataclasses.replace(mixed, verdicts=verdicts, warnings=(HOSTILE,))
    for style in ("text", "markdown", "github"):
        page = render_gate(hostile, style)
        assert "\x1b" not in page and "\x00" not in page, style
        page.encode()
    commands = render_gate(hostile, "github").splitlines()
    # None of the names began a line of its own.
    assert [line.split(" ")[0] for line in commands] == ["::warning", *["::error"] * 3, "::notice", "budgets:"]
    assert all(line.split(",title=")[0].count(",") == 1 for line in commands if line.startswith("::error "))
    root = ElementTree.fromstring(render_junit(hostile))
    assert len(root.findall(".//testcase")) == 5


def test_a_budget_that_one_artifact_needs_is_not_to_be_tightened() -> None:
    def sized(total: int) -> object:
        return make_report(artifact(files=(FileInfo("m", total, "d" * 64),), size=make_size(total, {})))

    both = gate(budget("size", max="1 kB"), reports=[sized(500), sized(990)])
    assert [bool(v.suggestion) for v in both.verdicts] == [True, False]
    assert suggestions(both) == []
    (line,) = suggestions(gate(budget("size", max="1 kB"), reports=[sized(500), sized(600)]))
    assert '600 B is used; max = "606 B"' in line


def test_every_unit_has_a_form() -> None:
    assert [shown(35_500_000, "bytes"), shown(4, "ms")] == ["35.5 MB", "4.00 ms"]
    assert shown(250, "tokens/s") == "250 tokens/s"
    assert [shown(0.991, "share"), shown(0.05, "nats"), shown(1e-6, "logit")] == ["99.1 %", "0.05 nats", "1e-06"]


def test_the_forms_are_documented() -> None:
    assert all(f"`{style}`" in DOC for style in GATE_STYLES)
