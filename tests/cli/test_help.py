"""Help: quick, complete, and true."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click
import pytest

from needle_export import __version__
from needle_export.cli.app import COMMANDS, program
from needle_export.cli.failures import EXIT_CODES
from needle_export.cli.shared import Command
from tests.cli.conftest import Run

HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "ai_edge_litert", "litert_converter", "litert_torch", "numpy",
         "rich", "huggingface_hub", "safetensors")

_PROBE = f"""
import sys
from needle_export.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    print(loaded, file=sys.stderr)
    raise
"""


def command_of(name: str) -> Command:
    command = program.get_command(click.Context(program), name)
    assert isinstance(command, Command)
    return command


@pytest.mark.parametrize("arguments", [
    ["--help"], ["--version"], [], *([name, "--help"] for name in COMMANDS),
    ["build"], ["build", "x", "--target", "nope"], ["nope"],
])
def test_help_and_mistakes_import_no_library(arguments: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", _PROBE, *arguments], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_the_probe_can_fail() -> None:
    result = subprocess.run([sys.executable, "-c", _PROBE, "inspect", "absent"], capture_output=True,
                            text=True)
    assert "numpy" in result.stderr.splitlines()[-1]


def test_the_root_lists_all_commands_and_codes(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        line = next(line for line in result.stdout.splitlines() if line.strip().startswith(f"{name} "))
        assert not line.endswith("..."), "the short description is cut off"
    for code in EXIT_CODES:
        assert f"\n  {code} " in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.stdout == run(name, "-h").stdout
    for part in ("Options:", "Examples:", "Exit codes:", "--json", "--debug", f"needle-export {name} "):
        assert part in result.stdout, part
    for code in EXIT_CODES:
        assert f"\n  {code} " in result.stdout
    for parameter in command_of(name).params:
        assert isinstance(parameter, click.Argument) or parameter.help, parameter.name


def test_build_tells_what_targets_take(run: Run) -> None:
    text = " ".join(run("build", "--help").stdout.split())
    for part in ("--target [onnx|tflite|coreml]", "--weights [fp32|fp16|int8|int4|int2|cq4|cq2|codebook|palette4]",
                 "--opset [21|23|24]", "24 if left out", "--os [ios17|ios18|ios26]", "--buckets T,T,...",
                 "Prefill lengths of a TFLite file or a Core ML package; 64,128", "--heads NAME,...",
                 "Probe heads that a TFLite file is to have"):
        assert part in text, part


@pytest.mark.parametrize("name", COMMANDS)
def test_each_example_is_a_valid_command_line(name: str) -> None:
    examples = command_of(name).examples
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[0] == name
        with command_of(name).make_context(name, words[1:]):
            pass


def test_the_version(run: Run) -> None:
    assert run("--version").stdout == f"needle-export {__version__}\n"


def test_without_a_command_help_goes_to_stderr(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr
