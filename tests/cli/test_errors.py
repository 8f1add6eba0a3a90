"""Errors in unusual places, mistakes in typing, and readers that go away."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from needle_export.cli.failures import Failure, describe
from tests.cli.conftest import ROOT, Run, Start


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["inpsect", "x"], "there is no command 'inpsect'; did you mean 'inspect'?"),
    (["zzz"], "there is no command 'zzz'; there are inspect, sample, plan, build, verify, bench, calibrate, "
              "import-latency, evaluate, eval, run"),
    (["build", "x", "--out", "o", "--laers", "8"],
     "there is no option '--laers'; did you mean --layers or --tolerances or --lora?"),
    (["build", "x", "--zzz"], "there is no option '--zzz'; see needle-export build --help"),
    (["--zzz"], "there is no option '--zzz'"),
    (["build"], "Missing argument 'CHECKPOINT'; see needle-export build --help"),
    (["build", "x"], "Missing option '--out'"),
    (["build", "x", "--out", "o", "--weights", "int3"], "'int3' is not one of 'fp32', 'fp16'"),
    (["build", "x", "--out", "o", "--opset", "22"], "'22' is not one of"),
    (["build", "x", "--out", "o", "--layers", "1"], "1 is not in the range x>=2"),
    (["build", "", "--out", "o"], "CHECKPOINT: the checkpoint's name is empty"),
    (["build", "x", "--out", "o", "--keep-confidence"], "--keep-confidence: there is no adapter to merge"),
    (["bench", "d", "--prompt", "64,x"], "'64,x' isn't a list of whole numbers above 0"),
    (["bench", "d", "--prompt", "0"], "'0' isn't a list of whole numbers above 0"),
    (["inspect", "x", "--head", "48"], "'48' isn't a pair of widths, such as 48/64"),
    (["inspect", "x", "--head", "48/64,-1/2"], "'-1/2' isn't a pair of widths"),
    (["sample", "/dev/null"], "/dev/null: this isn't a regular file"),
    (["sample", "/"], "/: this is a folder"),
    (["report", "d", "--format", "pdf"], "'pdf' is not one of 'text', 'markdown', 'json', 'html'"),
    (["verify", "d", "extra"], "unexpected extra argument"),
])
def test_usage_mistakes_are_one_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_usage_mistakes_are_json_too(run: Run) -> None:
    result = run("build", "--json", "--nope")
    assert json.loads(result.stdout)["error"]["exit_code"] == 2
    # What follows -- is no option, even if it looks like one.
    assert run("inspect", "--", "--json").stdout == ""


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_traceback_is_there_for_those_who_ask(
        run: Run, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "variable":
        monkeypatch.setenv("NEEDLE_EXPORT_DEBUG", "1")
    extra = ["--debug"] if how == "option" else []
    result = run("build", "x", "--out", "o", *extra, fake="crash")
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: internal error: KeyError: 'x'")


def test_a_variable_of_zero_asks_for_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEEDLE_EXPORT_DEBUG", "0")
    assert "Traceback" not in run("build", "x", "--out", "o", fake="crash").stderr


def test_a_sentence_is_one_line_without_control_characters() -> None:
    assert Failure("a\nb\x1b[2J", "c\r", "d", 3).sentence == "c : a b [2J; d"
    assert "\n" not in describe(RuntimeError("one\ntwo")).sentence
    assert describe(OSError("strange")).exit_code == 70


@pytest.mark.parametrize("arguments", [
    ["report", "{dist}", "--format", "json"], ["--help"], ["build", "--help"],
    ["report", "absent", "--json"]])
def test_a_reader_that_leaves_is_no_error_of_its_own(start: Start, dist: Path, arguments: list[str]) -> None:
    process = start(*(word.format(dist=dist) for word in arguments))
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    assert process.wait(timeout=30) == (3 if "absent" in arguments else 0)
    assert len(error.splitlines()) == ("absent" in arguments)
    process.stdout = None


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_no_crash(dist: Path, stream: str) -> None:
    number = {"stdout": 1, "stderr": 2}[stream]
    command = f"exec {sys.executable} -m tests.support.fake_pipeline report {dist} {number}>&-"
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_full_disk_behind_stdout_is_an_error(start: Start, dist: Path) -> None:
    with Path("/dev/full").open("w") as full:
        process = start("report", str(dist), stdout=full)
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (3, "error: no space left on device\n")


def test_a_narrow_encoding_is_no_crash(start: Start, dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    output, error = start("report", str(dist)).communicate(timeout=30)
    assert "routing" in output
    assert error == ""


def through_terminal(dist: Path, **environment: str) -> str:
    """What the report command writes to a terminal."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_pipeline", "report", str(dist)], stdout=inner,
        stdin=inner, cwd=ROOT, env={**os.environ, "TERM": "xterm", **environment})
    os.close(inner)
    written = b""
    try:
        while chunk := os.read(outer, 65536):
            written += chunk
    except OSError:  # the terminal is gone with its last writer
        pass
    os.close(outer)
    assert process.wait(timeout=30) == 0
    return written.decode()


def test_colours_on_a_terminal_only(dist: Path, start: Start) -> None:
    assert "\x1b[" in through_terminal(dist)
    assert "\x1b" not in through_terminal(dist, NO_COLOR="1")
    assert "\x1b" not in through_terminal(dist, TERM="dumb")
    assert "\x1b[" in through_terminal(dist, NO_COLOR="")
    output, _ = start("report", str(dist)).communicate(timeout=30)
    assert "\x1b" not in output
