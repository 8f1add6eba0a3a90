"""needle-export plan, and what of it build takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.config.device import Device, load_device
from needle_export.config.options import BuildOptions
from needle_export.config.recipe import load_recipe
from needle_export.report.schema import PlanInfo
from needle_export.report.units import size
from tests.cli.conftest import Run
from tests.support import fake_pipeline

TIGHT = '[[budget]]\nmetric = "size"\nmax = "1 kB"\n'


def recipe(text: str) -> str:
    Path("ours.toml").write_text(f'description = "d"\ncontext = 48\n{text}', encoding="utf-8")
    return "./ours.toml"


def test_a_plan_says_who_chose_what(run: Run, sample: Path) -> None:
    ours = recipe("weights = 'int8'")
    result = run("plan", str(sample), "--device", "pixel-8", "--recipe", ours, "--seed", "5", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["recipe"], told["device"]) == ("ours", "pixel-8")
    assert told["options"]["weights"] == {"value": "int8", "from": "recipe ours"}
    assert told["options"]["target"]["from"] == "device pixel-8"
    assert told["options"]["seed"] == {"value": 5, "from": "command line"}
    predicted = told["predicted"]["size"]
    assert predicted["total_bytes"] == sum(predicted["by_role"].values()) + predicted["overhead_bytes"]
    assert not fake_pipeline.CALLS  # nothing was built


def test_text_and_json_tell_the_same(run: Run, sample: Path) -> None:
    line = ("plan", str(sample), "--context", "48", "--target", "tflite")
    text, told = run(*line).stdout, json.loads(run(*line, "--json").stdout)
    assert "planned, not built" in text and "command line" in text
    assert f"{size(told['predicted']['size']['total_bytes'])} (predicted)" in text
    for role, count in told["predicted"]["size"]["by_role"].items():
        assert role in text and size(count) in text


def test_what_a_build_would_refuse_after_reading_is_refused_before(run: Run, sample: Path) -> None:
    result = run("plan", str(sample), "--context", "128", "--target", "tflite", "--buckets", "64")
    assert result.exit_code == 2 and "--buckets: 64 tokens are more than the window of 16" in result.stderr


def test_a_refusal_is_shown_whole_and_is_exit_5(run: Run, sample: Path) -> None:
    result = run("plan", str(sample), "--context", "48", "--device", "esp32-s3")
    assert result.exit_code == 5
    assert "runs none of the runtimes" in result.stderr and "Predicted size" in result.stdout


def test_a_budget_that_would_be_exceeded_is_exit_1(run: Run, sample: Path) -> None:
    result = run("plan", str(sample), "--recipe", recipe(TIGHT))
    assert result.exit_code == 1
    assert "error: budget: the build would exceed size: at most 1 kB; " in result.stderr and "EXCEEDED" in result.stdout


@pytest.mark.parametrize(("line", "code", "said"), [
    ("plan nowhere.safetensors", 3, "nowhere.safetensors"),
    ("plan x --recipe ios-smalest", 2, "--recipe: there is no recipe 'ios-smalest'; did you mean ios-smallest?"),
    ("plan x --device pixel-9", 2, "did you mean pixel-8?"),
    ("plan x --recipe web --target tflite", 2, "web.toml: "),
    ("plan x --tolerances logit=1e-5", 2, "--tolerances: there is no 'logit'"),
    ("plan x --tolerances logits", 2, "isn't a bound, such as logits=5e-5"),
    ("plan x --tolerances logits=nan", 2, "--tolerances: nan is no bound for logits"),
    ("plan x --save-recipe .", 2, "this is a folder"),
])
def test_what_cannot_be_is_one_sentence(run: Run, line: str, code: int, said: str) -> None:
    result = run(*line.split())
    assert result.exit_code == code and said in result.stderr and result.stderr.count("\n") == 1
    assert not result.stdout


def test_build_follows_a_recipe_and_tells_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PlanInfo | None] = []
    devices: list[Device | None] = []
    right = fake_pipeline.build

    def build(options, progress, plan=None, cache=None, device=None):
        told.append(plan)
        devices.append(device)
        return right(options, progress, plan, cache, device)

    monkeypatch.setattr(fake_pipeline, "build", build)
    assert run("build", "x", "--out", "o", "--device", "pixel-8", "--recipe", "android-balanced", "--seed", "3",
               "--quiet").exit_code == 0
    found = load_recipe("android-balanced")
    asked = BuildOptions("x", Path("o"), **found.recipe.choices(found.path.parent), seed=3)
    (call,) = fake_pipeline.CALLS
    assert call == ("build", vars(asked))
    assert devices == [load_device("pixel-8")]
    assert told[0] is not None and (told[0].recipe, told[0].device) == ("android-balanced", "pixel-8")
    assert told[0].budgets[0] == found.recipe.budget[0].model_dump(exclude_none=True, exclude_defaults=True)


def test_a_refusal_stops_a_build_before_anything_is_read(run: Run) -> None:
    result = run("build", "there is none", "--out", "o", "--device", "esp32-s3")
    assert result.exit_code == 5 and not fake_pipeline.CALLS and not Path("o").exists()


@pytest.mark.parametrize("command", ["build --out o", "plan"])
def test_what_is_saved_plans_the_same(command: str, run: Run, sample: Path) -> None:
    name, *more = command.split()
    line = [str(sample), "--recipe", "android-smallest", "--layers", "2", "--context", "48", "--buckets", "8"]
    assert run(name, *line, *more, "--save-recipe", "saved.toml").exit_code == 0
    first = json.loads(run("plan", *line, "--json").stdout)
    again = json.loads(run("plan", str(sample), "--recipe", "./saved.toml", "--json").stdout)
    values = [{key: chosen["value"] for key, chosen in told["options"].items()} for told in (first, again)]
    assert values[0] == values[1] and first["predicted"] == again["predicted"] and first["budgets"] == again["budgets"]
