"""needle-export inspect on Core ML packages: ours, another's, damaged ones, and what isn't one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from needle_export.cli.app import program
from needle_export.inspection import inspect
from needle_export.report.inspection_text import render_inspection
from tests.targets.coreml.op_cases import mb
from tests.targets.coreml.packages import SPEC, WEIGHTS, copied, numbers, read_spec, write, write_spec
from tests.targets.coreml.stepping import two_functions


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_functions(tmp_path_factory.mktemp("functions"))


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(program, ["inspect", *(str(a) for a in arguments)])


def table(text: str, title: str) -> dict[str, list[str]]:
    """Rows of a table below its title, by their first cell."""
    part = text.split(f"\n{title}\n")[1].split("\n\n")[0]
    return {words[0]: words[1:] for line in part.splitlines()[1:] if (words := line.split())}


def test_a_package_of_another_tool(package: Path) -> None:
    result = run(package)
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert text.startswith("both.mlpackage: Core ML package, ")
    assert "specification 9, runs from iOS 18, macOS 15 on" in text
    assert "decode (runs if none is named), prefill" in text
    assert "100.0 % of the constants' bytes between functions" in text
    assert "RANDOM" not in text and "SHA-256" not in text and "checkpoint" not in text
    assert table(text, "States") == {"cache": ["float16", "1", "x", "48", "x", "20"]}
    decode = text.split("\nFunction decode, opset CoreML8\n")[1].split("\n\n")[0]
    assert [line.split()[:2] for line in decode.splitlines()[1:]] == [
        ["input", "x"], ["input", "slot"], ["output", "out0"], ["output", "out1"],
    ]
    ops = table(text, "Ops")
    assert ops["linear"] == ["2", "2"]
    assert table(text, "Computes in")["total"] == ops["total"]
    stored = table(text, "Constants by form")
    assert stored["total"][1] == "100.0"
    assert f"({(package / WEIGHTS).stat().st_size:,} bytes)" in text


def test_as_json(package: Path) -> None:
    told = json.loads(run(package, "--json").stdout)
    assert told["model"] is None and told["adapter"] is None
    assert told["file"]["format"] == "mlpackage" and told["file"]["sha256"] is None
    assert told["file"]["bytes"] == sum(p.stat().st_size for p in package.rglob("*") if p.is_file())
    described = told["package"]
    assert list(described["functions"]) == ["decode", "prefill"] and described["state_bytes"] == 2 * 48 * 20
    assert described["constants"]["shared"] == 1.0


def test_the_folder_of_a_build(package: Path, tmp_path: Path) -> None:
    copied(package, tmp_path / "model.mlpackage")
    assert run(tmp_path).stdout.startswith("model.mlpackage: Core ML package")
    copied(package, tmp_path / "model_prefill_8.mlpackage")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "the folder holds 2 packages; name one of them: model.mlpackage, model_prefill_8.mlpackage" in result.stderr


def test_what_our_builds_say_of_themselves(package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "model.mlpackage")
    model = read_spec(path)
    said = model.description.metadata.userDefined
    recipe = {"target": "coreml", "weights": "int4", "context": 64, "lora": None, "heads": []}
    said["needle.tool"], said["needle.checkpoint.sha256"] = "needle-export 9", "ab" * 32
    said["needle.checkpoint.random"], said["needle.recipe"] = "true", json.dumps(recipe)
    said["needle.contract"], said["com.example.note"] = "{}", "a\x1b[31mb"
    write_spec(path, model)
    text = render_inspection(inspect(str(path)), width=200)
    assert "! RANDOM WEIGHTS" in text and "needle-export 9" in text and "ab" * 32 in text
    assert "target coreml, weights int4, context 64\n" in text
    assert "com.example.note = a\N{REPLACEMENT CHARACTER}[31mb" in text
    for anything in ("nothing", "[1]", "{}"):
        said["needle.recipe"] = anything
        write_spec(path, model)
        assert "recipe" not in render_inspection(inspect(str(path)))


def test_functions_with_different_states(package: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mlpackage", lambda x: mb.add(x=x, y=numbers(3)), {"x": ((3,), "fp32")})
    text = run(path).stdout
    assert "states       none" in text and "\nStates\n" not in text
    assert "Function main, opset CoreML" in text and "between functions" not in text


def older(model: Any) -> None:
    """As iOS 16 has it: the evaluator doesn't know its opset, a description needs no more than its names."""
    function = model.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    function.block_specializations["CoreML6"].CopyFrom(block)
    del function.block_specializations[function.opset]
    function.opset, model.specificationVersion = "CoreML6", 7


def test_a_package_that_the_evaluator_does_not_know(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mlpackage", lambda x: mb.add(x=x, y=numbers(3)), {"x": ((3,), "fp32")})
    model = read_spec(path)
    older(model)
    write_spec(path, model)
    result = run(path)
    assert result.exit_code == 0 and "runs from iOS 16, macOS 13 on" in result.stdout
    assert "Function main, opset CoreML6" in result.stdout


BAD = {
    "no manifest": (lambda p: (p / "Manifest.json").unlink(), "isn't a Core ML package"),
    "no model": (lambda p: (p / SPEC).unlink(), "which isn't there"),
    "half a model": (lambda p: (p / SPEC).write_bytes((p / SPEC).read_bytes()[:200]), "cut short"),
    "half the weights": (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:200]), "outside the file"),
    "an empty folder": (lambda p: [q.unlink() for q in p.rglob("*") if q.is_file()], "isn't a Core ML package"),
}


@pytest.mark.parametrize(("spoil", "said"), BAD.values(), ids=BAD)
def test_a_bad_package_is_refused_in_a_sentence(spoil: Any, said: str, package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "bad.mlpackage")
    spoil(path)
    result = run(path, "--json")
    assert result.exit_code == 3
    assert said in result.stderr and result.stderr.count("\n") == 1
    assert json.loads(result.stdout)["error"]["exit_code"] == 3


def test_another_kind_of_model_is_not_supported(package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "other.mlpackage")
    model = read_spec(path)
    model.neuralNetwork.SetInParent()
    write_spec(path, model)
    result = run(path)
    assert result.exit_code == 5
    assert "the package holds no ML program (it is a neuralNetwork)" in result.stderr


def test_folders_without_a_package_are_left_to_the_readers_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    assert run(tmp_path).exit_code == 3
    assert run(tmp_path / "absent.mlpackage").exit_code == 3
