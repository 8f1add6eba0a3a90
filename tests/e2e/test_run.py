"""The command run: a published build of every target answers as the reference does, and tells how."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from needle_export import demo
from needle_export.cli.app import program
from needle_export.generate.assistant import Assistant
from needle_export.generate.prompt import compact
from needle_export.report.schema import REPORT_NAME
from needle_export.targets import find_target
from tests.support.demo_builds import CONTEXT, WEIGHTS, DemoBuilds

TARGETS = ("onnx", "tflite", "coreml")
RUNTIMES = {"onnx": "onnxruntime", "tflite": "ai-edge-litert", "coreml": "evaluator"}

#: Of the held-out file: one call, nothing, two calls, a title to copy. The model is wrong about the third.
LINES = (0, 3, 2, 7)
QUERY = "turn on the kitchen lights"
LIGHTS = [{"name": "set_lights", "arguments": {"room": "kitchen", "state": "on"}}]

SPEED = r"  (\d+) tokens, first token after \d+\.\d ms \((\d+) tokens of prompt\), then \d+\.\d tokens/s"


def run(folder: Path, *arguments: str, stdin: str | bytes = "", tools: Path | None = None,
        tokenizer: Path | None = None) -> click.testing.Result:
    """The command with the demo's tools and tokenizer unless others are given."""
    files = demo.files()
    line = ["run", str(folder), "--tools", str(tools or files.tools), "--tokenizer", str(tokenizer or files.tokenizer)]
    return click.testing.CliRunner().invoke(program, [*line, *arguments], input=stdin)


def found(result: click.testing.Result) -> dict[str, Any]:
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert isinstance(told, dict)
    return told


def refused(result: click.testing.Result, code: int, *said: str) -> None:
    """One sentence on stderr, the same as data on stdout where that was asked for, and the exit code."""
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not [part for part in said if part not in result.stderr], result.stderr
    assert "Traceback" not in result.output and "internal" not in result.output


@cache
def heldout() -> tuple[str, ...]:
    lines = demo.files().heldout.read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(lines[n])["query"] for n in LINES)


@pytest.fixture(scope="module")
def dist(demos: DemoBuilds) -> Path:
    """The build that answers fastest."""
    return demos.get("onnx")


@pytest.fixture(scope="module")
def wanted(demos: DemoBuilds) -> list[list[dict[str, Any]]]:
    """What the float reference calls, within the grammar."""
    assistant = Assistant(demos.reference, demos.tokenizer, demos.tools)
    answers = [assistant.ask(query) for query in heldout()]
    return [[asdict(call) for call in answer.calls or ()] for answer in answers]


@pytest.mark.parametrize("target", TARGETS)
def test_it_calls_what_the_float_reference_calls(
    target: str, demos: DemoBuilds, wanted: list[list[dict[str, Any]]]
) -> None:
    told = found(run(demos.get(target), *heldout(), "--json"))
    assert [answer["calls"] for answer in told["answers"]] == wanted
    assert [len(calls) for calls in wanted] == [1, 0, 2, 1]
    names = {call["name"] for calls in wanted for call in calls}
    assert len(names) > 1  # no model that always says the same


@pytest.mark.parametrize("target", TARGETS)
def test_every_field_of_its_json(target: str, demos: DemoBuilds) -> None:
    query = heldout()[0]
    told = found(run(demos.get(target), query, "--json", "--threads", "2"))
    (answer,) = told.pop("answers")
    assert told == {"target": target, "runtime": RUNTIMES[target], "weights": WEIGHTS, "random": False,
                    "evaluator": target == "coreml", "threads": 2, "tools": str(demo.files().tools),
                    "constrained": True, "notes": []}
    runner = find_target(target).open(demos.get(target), threads=1)
    wanted = Assistant(runner, demos.tokenizer, demos.tools).ask(query)
    assert answer.pop("first_token_ms") > 0 and answer.pop("tokens_per_s") > 0
    assert answer == {
        "query": query, "answer": wanted.text, "valid": True, "problem": "", "finished": True,
        "calls": [asdict(call) for call in wanted.calls or ()],
        "prompt_tokens": wanted.prompt_tokens, "tokens": len(wanted.tokens),
    }  # fmt: skip
    assert answer["answer"] == f"<tool_call>{compact(answer['calls'])}</tool_call>"


@pytest.mark.parametrize("target", TARGETS)
def test_its_text(target: str, demos: DemoBuilds) -> None:
    result = run(demos.get(target), QUERY, heldout()[1])
    assert (result.exit_code, result.stderr) == (0, "")
    first, second, where = result.stdout.removesuffix("\n").split("\n\n")
    asked, calls, speed = first.split("\n")
    assert (asked, calls) == (f"> {QUERY}", 'set_lights {"room":"kitchen","state":"on"}')
    counts = re.fullmatch(SPEED, speed)
    assert counts and int(counts[1]) < int(counts[2]) < CONTEXT
    assert second.split("\n")[:2] == [f"> {heldout()[1]}", "calls nothing"]
    place = f"in {RUNTIMES[target]}, {target} {WEIGHTS}"
    assert where.startswith(place) and ("says nothing about a device" in where) == (target == "coreml")
    assert ("1 thread, on this machine" in where) == (target != "coreml")
    assert where.endswith(f"\ntools: {demo.files().tools}")
    # One request has no need of its own words again.
    assert run(demos.get(target), QUERY).stdout.startswith("set_lights ")


def test_the_page_shows_what_is_printed(dist: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page, re.M)
    shown = next(block for block in blocks if "first token after" in block)
    lines = [line[4:] for line in shown.strip("\n").splitlines()]
    queries = [line[2:] for line in lines if line.startswith("> ")]
    assert len(queries) == 2 and page.count(" ".join(f'"{query}"' for query in queries)) == 1

    def told(printed: list[str]) -> list[str]:
        """What doesn't depend on the machine."""
        return [re.sub(r"\d+\.\d (?=ms|tokens/s)", "_ ", re.sub(r"^tools: .*/", "tools: ", line)) for line in printed]

    assert told(run(dist, *queries).stdout.splitlines()) == told(lines)


def test_a_request_from_stdin(dist: Path) -> None:
    told = found(run(dist, "-", "what is the news", "--json", stdin=f"{QUERY}\r\n"))
    assert [(answer["query"], answer["calls"]) for answer in told["answers"]] == [
        (QUERY, LIGHTS), ("what is the news", [])]
    refused(run(dist, "-", "-", stdin=QUERY), 2, "stdin holds one request")
    refused(run(dist, "-", stdin=b"caf\xe9"), 2, "stdin: this isn't UTF-8 text")
    refused(run(dist, "-", stdin="x" * (1 << 20 | 1)), 2, "stdin: this is far too large")


def test_flat_tools_and_those_of_openai_are_the_same(dist: Path, tmp_path: Path) -> None:
    flat = json.loads(demo.files().tools.read_text(encoding="utf-8"))
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([{"type": "function", "function": tool} for tool in flat]), encoding="utf-8")
    assert answers(dist) == answers(dist, path)
    path.write_text(json.dumps(flat[0]), encoding="utf-8")  # one schema need not be a list
    alone = answers(dist, path)
    path.write_text(json.dumps(flat[:1]), encoding="utf-8")
    assert alone == answers(dist, path) != answers(dist)


def answers(folder: Path, tools: Path | None = None) -> list[dict[str, Any]]:
    """To the held-out requests, without what differs each time."""
    told: list[dict[str, Any]] = found(run(folder, *heldout(), "--json", tools=tools))["answers"]
    return [{key: value for key, value in one.items() if key not in ("first_token_ms", "tokens_per_s")} for one in told]


def test_without_the_grammar(dist: Path, tmp_path: Path) -> None:
    told = found(run(dist, QUERY, "--json", "--unconstrained"))
    assert told["constrained"] is False and told["answers"][0]["calls"] == LIGHTS
    # Tools whose calls the model knows otherwise: what it writes isn't valid, is told, and is no error.
    tools = json.loads(demo.files().tools.read_text(encoding="utf-8"))
    tools[0]["parameters"]["properties"]["state"]["enum"] = ["bright", "dark"]
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(tools), encoding="utf-8")
    (answer,) = found(run(dist, QUERY, "--json", "--unconstrained", tools=path))["answers"]
    assert (answer["valid"], answer["calls"]) == (False, []) and answer["finished"]
    assert answer["problem"] == "they aren't valid calls of these tools"
    text = run(dist, QUERY, "--unconstrained", tools=path)
    assert text.exit_code == 0
    assert text.stdout.splitlines()[:2] == [f"no valid calls: {answer['problem']}", f"  {answer['answer']}"]
    (within,) = found(run(dist, QUERY, "--json", tools=path))["answers"]
    assert within["valid"] and within["calls"][0]["arguments"]["state"] in ("bright", "dark")


def test_at_most_so_many_calls(dist: Path, wanted: list[list[dict[str, Any]]]) -> None:
    assert len(wanted[2]) == 2
    (answer,) = found(run(dist, heldout()[2], "--json", "--max-calls", "1"))["answers"]
    assert answer["calls"] == wanted[2][:1] and answer["finished"]


@pytest.mark.parametrize("option", ["--max-calls", "--max-new-tokens", "--threads"])
def test_numbers_begin_at_one(option: str, dist: Path) -> None:
    refused(run(dist, QUERY, option, "0"), 2, option, "0 is not in the range")


def test_an_answer_that_is_cut_is_told_and_is_no_error(dist: Path) -> None:
    whole = found(run(dist, QUERY, "--json"))["answers"][0]
    (cut,) = found(run(dist, QUERY, "--json", "--max-new-tokens", "4"))["answers"]
    assert (cut["finished"], cut["valid"], cut["calls"], cut["tokens"]) == (False, False, [], 4)
    assert "limit of tokens" in cut["problem"] and whole["answer"].startswith(cut["answer"])
    (one,) = found(run(dist, QUERY, "--json", "--max-new-tokens", "1"))["answers"]
    assert one["tokens_per_s"] is None  # no step was timed
    text = run(dist, QUERY, "--max-new-tokens", "1")
    assert text.exit_code == 0 and text.stdout.startswith("no valid calls: it didn't end")
    assert "tokens/s" not in text.stdout


def test_tools_that_cannot_be_read(dist: Path, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    refused(run(dist, QUERY, tools=path), 3, str(path))
    for text, said in ((b"{", "isn't JSON"), (b"\xff", "isn't UTF-8"), (b"3", "tools are a list"),
                       (b'[{"description": "x"}]', "tool 1: name")):
        path.write_bytes(text)
        refused(run(dist, QUERY, tools=path), 3, str(path), said)
    path.write_text('{"name": "f", "parameters": {"properties": {"v": {"enum": []}}, "required": ["v"]}}')
    refused(run(dist, QUERY, tools=path), 3, "tool 'f': parameters", "no arguments are valid")


def test_without_tools_a_build_of_the_demo_takes_its_own(dist: Path) -> None:
    result = click.testing.CliRunner().invoke(program, ["run", str(dist), QUERY, "--json"])
    told = found(result)
    assert told["tools"] == str(demo.files().tools) and told["answers"][0]["calls"] == LIGHTS


def test_what_is_not_enforced_is_a_note(dist: Path, tmp_path: Path) -> None:
    tools = json.loads(demo.files().tools.read_text(encoding="utf-8"))
    tools[0]["parameters"]["properties"]["room"]["pattern"] = "^k"
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(tools), encoding="utf-8")
    (note,) = found(run(dist, QUERY, "--json", tools=path))["notes"]
    assert note == "tool 'set_lights', parameters.room: pattern isn't enforced"
    assert run(dist, QUERY, tools=path).stdout.endswith(f"than the schemas): {note}\n")


def test_tokenizers_that_are_not_the_models(dist: Path, demos: DemoBuilds, tmp_path: Path) -> None:
    files = demo.files()
    bare = demos.copy("onnx", tmp_path / "bare")
    (bare / "tokenizer.model").unlink(missing_ok=True)
    alone = click.testing.CliRunner().invoke(program, ["run", str(bare), "--tools", str(files.tools), QUERY])
    refused(alone, 3, str(bare), "no tokenizer lies beside this build", "--tokenizer")
    (bare / "tokenizer.model").write_bytes(files.tokenizer.read_bytes())
    beside = click.testing.CliRunner().invoke(program, ["run", str(bare), "--tools", str(files.tools), QUERY])
    assert beside.stdout.startswith("set_lights ")
    path = tmp_path / "other.model"
    refused(run(dist, QUERY, tokenizer=path), 3, str(path))
    path.write_bytes(files.tokenizer.read_bytes()[:5000])
    refused(run(dist, QUERY, tokenizer=path), 3, path.name)
    # A piece more than the model has tokens: {piece: "zzqzz", score: -1}.
    path.write_bytes(files.tokenizer.read_bytes() + b"\x0a\x0c\x0a\x05zzqzz\x15" + np.float32(-1).tobytes())
    refused(run(dist, QUERY, tokenizer=path), 3, str(path), "1025 pieces, and the model knows 1024 tokens")


def test_a_prompt_that_the_context_cannot_hold(dist: Path) -> None:
    refused(run(dist, "please " * CONTEXT), 2, "tokens, and the context holds 512", "--context")
    told = run(dist, "please " * CONTEXT, "--json")
    refused(told, 2)
    error = json.loads(told.stdout)["error"]
    assert error["exit_code"] == 2 and "--context" in error["fix"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("harm", ["flip", "cut", "away"])
def test_a_damaged_artifact_answers_nothing(target: str, harm: str, demos: DemoBuilds, tmp_path: Path) -> None:
    folder = demos.copy(target, tmp_path / "dist")
    files = json.loads((folder / REPORT_NAME).read_text())["artifacts"][0]["files"]
    path = folder / max(files, key=lambda file: file["bytes"])["name"]
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif harm == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    refused(run(folder, QUERY), 4, str(path), "missing" if harm == "away" else "not the file that the report")


def test_a_folder_without_a_build(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        refused(run(folder, QUERY), 3, str(folder))
    (tmp_path / REPORT_NAME).write_text("{}")
    refused(run(tmp_path, QUERY), 3, REPORT_NAME)


def test_as_a_process_of_its_own(dist: Path, tmp_path: Path) -> None:
    files = demo.files()
    line = [Path(sys.executable).with_name("needle-export"), "run", dist, "--tools", files.tools,
            "--tokenizer", files.tokenizer]

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*line, *arguments], input=QUERY, cwd=tmp_path, capture_output=True, text=True)

    good = start("-")
    assert (good.returncode, good.stderr) == (0, "") and good.stdout.startswith('set_lights {"room":"kitchen"')
    bad = start("-", "--max-new-tokens", "0")
    assert (bad.returncode, bad.stdout) == (2, "") and bad.stderr.count("\n") == 1
    assert start().returncode == 2  # no request
