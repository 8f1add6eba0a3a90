"""Every documented exit code can be had, each with one sentence on stderr and never a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from needle_export import errors
from needle_export.cli.failures import EXIT_CODES
from needle_export.report.schema import SCHEMA
from tests.cli.conftest import Run, Start
from tests.support.reports import is_whole

# Exit code, what the pipeline does, a part of the sentence.
CASES = [
    (0, "", ""),
    (1, "check", "size.total_bytes: it is too large; allow more"),
    (2, "usage", "layers: depth 30 isn't between 2 and 20"),
    (3, "input", "x/kernel: the tensor is missing; fetch it again"),
    (3, "disk", "/a/file: permission denied"),
    (4, "verification", "onnx: logits differ by 1e-2 in layer 3"),
    (4, "fusion", "layer 1: attention fired 2 of 3 times"),
    (5, "unsupported", "there is no such runtime here"),
    (5, "memory", "there isn't enough memory for this"),
    (5, "runtime", "onnxruntime.capi isn't installed; install it with: pip install 'needle-export[onnx]'"),
    (70, "module", "internal error: ModuleNotFoundError: No module named 'elsewhere'"),
    (70, "crash", "internal error: KeyError: 'x'; please report it"),
    (70, "silent crash", "internal error: AssertionError; please report it"),
    (70, "helper", "internal error: ChildProcessError: a helper process ended early"),
    (130, "end of file", "interrupted"),
]
SIGNALS = [(130, signal.SIGINT, "interrupted"), (143, signal.SIGTERM, "terminated")]


def test_the_tables_here_cover_every_documented_code() -> None:
    assert {code for code, *_ in CASES} | {code for code, *_ in SIGNALS} == set(EXIT_CODES)


def test_every_error_of_the_tree_has_a_documented_code() -> None:
    kinds = [kind for kind in vars(errors).values()
             if isinstance(kind, type) and issubclass(kind, errors.NeedleExportError)]
    assert len(kinds) > 6
    assert {kind.exit_code for kind in kinds} <= set(EXIT_CODES)


@pytest.mark.parametrize(("code", "fake", "sentence"), CASES)
def test_exit_codes(run: Run, code: int, fake: str, sentence: str) -> None:
    result = run("build", "x.safetensors", "--out", "out", fake=fake)
    assert result.exit_code == code
    assert Path("out").exists() == (code == 0)
    if code:
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert sentence in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("code", "fake", "sentence"), CASES)
def test_exit_codes_as_json(run: Run, code: int, fake: str, sentence: str) -> None:
    result = run("build", "x.safetensors", "--out", "out", "--json", fake=fake)
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    if code:
        error = answer["error"]
        assert set(error) == {"message", "where", "fix", "exit_code"}
        assert error["exit_code"] == code
        head, tail = error["where"] and f"{error['where']}: ", error["fix"] and f"; {error['fix']}"
        assert result.stderr == f"error: {head}{error['message']}{tail}\n"
    else:
        assert answer["schema"] == SCHEMA


@pytest.mark.parametrize(("code", "number", "sentence"), SIGNALS)
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_signals_end_cleanly(start: Start, dist: Path, code: int, number: signal.Signals, sentence: str,
                             json_flag: list[str]) -> None:
    before = (dist / "report.json").stat().st_ino
    process = start("build", "x", "--out", str(dist), *json_flag, fake="sleep")
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    process.send_signal(number)
    output, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert error == f"error: {sentence}\n"
    assert is_whole(dist)
    assert (dist / "report.json").stat().st_ino == before
    assert [path.name for path in dist.parent.iterdir()] == ["dist"]
    if json_flag:
        assert json.loads(output)["error"]["exit_code"] == code


def test_a_second_termination_ends_at_once(start: Start, tmp_path: Path) -> None:
    process = start("build", "x", "--out", str(tmp_path / "out"), fake="stubborn")
    assert process.stderr is not None
    for word in ("started\n", "clinging\n"):
        assert process.stderr.readline() == word
        process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM


@pytest.mark.parametrize("arguments", [
    ["inspect", "absent"], ["build", "absent", "--out", "o"], ["verify", "absent"], ["bench", "absent"],
    ["eval", "absent", "--tokens", "a", "--out", "b"], ["report", "absent"]])
def test_a_missing_input_is_bad_input_everywhere(run: Run, arguments: list[str]) -> None:
    result = run(*arguments, fake="input" if arguments[0] == "build" else "")
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1


def test_success_says_nothing_on_stderr(run: Run, dist: Path) -> None:
    result = run("verify", str(dist))
    assert result.exit_code == 0
    assert result.stderr == ""


def test_the_installed_program_is_this_one() -> None:
    program = Path(sys.executable).with_name("needle-export")
    result = subprocess.run([program, "inspect", "absent"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == "error: absent: there is no such file; check the path\n"
