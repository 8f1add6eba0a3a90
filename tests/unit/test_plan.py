"""Plans: who wins over whom, what a device refuses, what is written back, what is told before a build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from needle_export.checkpoint.geometry import PUBLISHED, SMALL
from needle_export.config.device import Device, load_device
from needle_export.config.options import BuildOptions
from needle_export.config.recipe import Named, load_recipe, recipe_names
from needle_export.config.rules import Rule
from needle_export.errors import Unsupported, UsageError
from needle_export.plan import Plan, forecast, refused, resolve

OUT = Path("out")


def ours(tmp_path: Path, text: str) -> Named:
    path = tmp_path / "ours.toml"
    path.write_text(f'description = "d"\n{text}', encoding="utf-8")
    return load_recipe(path)


def plan(recipe: Named | None = None, device: str | None = None, **given: Any) -> Plan:
    found = None if device is None else load_device(device)
    return resolve(recipe, found, given, checkpoint="x.safetensors", out=OUT)


def of(geometry: Any = PUBLISHED, packed: Any = None) -> Any:
    """A checkpoint as a forecast needs it."""
    return SimpleNamespace(geometry=geometry, packed=packed or {})


def test_without_anything_it_is_the_defaults() -> None:
    made = plan()
    assert made.options == BuildOptions("x.safetensors", OUT)
    assert set(made.sources.values()) == {"default"} and made.info() is None
    assert "checkpoint" not in made.sources and "out" not in made.sources


def test_command_line_beats_recipe_beats_device(tmp_path: Path) -> None:
    recipe = ours(tmp_path, "context = 512\nweights = 'int4'\nos = 'ios17'")
    made = plan(recipe, "iphone-16-pro", weights="fp16")
    assert (made.options.target, made.options.context, made.options.weights, made.options.os) \
        == ("coreml", 512, "fp16", "ios17")
    assert (made.sources["target"], made.sources["context"], made.sources["weights"], made.sources["os"]) \
        == ("device iphone-16-pro", "recipe ours", "command line", "recipe ours")
    assert made.sources["seed"] == "default"
    assert plan(None, "iphone-16-pro").options.os == load_device("iphone-16-pro").defaults("coreml")["os"]


def test_rules_of_both_are_kept_and_the_command_lines_win(tmp_path: Path) -> None:
    recipe = ours(tmp_path, "weights = 'int4'\nrules = ['content=int8', 'memory=int2']")
    made = plan(recipe, rules=(Rule("content", "fp16"),))
    schemes = made.options.schemes
    assert schemes.scheme("x", "content") == "fp16" and schemes.scheme("x", "memory") == "int2"


@pytest.mark.parametrize(("text", "given", "where"), [
    ("target = 'tflite'\nopset = 21", {}, "opset"),
    ("target = 'tflite'\nrules = ['content=cq4']", {}, "rules"),
    ("layers = 1", {}, "layers"),
    ("rounding = 'search'\nweights = 'fp32'", {}, "rounding"),
    ("opset = 21", {"weights": "int4"}, "opset"),
])
def test_a_recipes_mistake_is_named_by_file_and_key(text: str, given: Any, where: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        plan(ours(tmp_path, text), **given)
    assert caught.value.where == f"{tmp_path / 'ours.toml'}: {where}"


def test_the_command_lines_mistake_stays_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        plan(ours(tmp_path, "target = 'tflite'"), opset=21)
    assert caught.value.where == "--opset"


def test_what_a_device_cannot_run_is_refused_and_not_an_error_of_options() -> None:
    """The device's own opset wouldn't go with the scheme, but the reason is the device."""
    device = load_device("linux-x86-64")
    runtime = device.runtime_of("onnx")
    assert runtime is not None
    old = runtime.model_copy(update={"opset": runtime.opset.model_copy(update={"value": 21})})  # type: ignore[union-attr]
    aged = device.model_copy(update={"runtime": (old,)})
    made = resolve(None, aged, {"weights": "int4"}, checkpoint="x", out=OUT)
    assert made.refusals and "24" in made.refusals[0]
    with pytest.raises(Unsupported) as caught:
        made.check()
    assert caught.value.exit_code == 5 and caught.value.where == f"--device {device.id}"


def test_a_device_without_a_runtime_refuses_everything() -> None:
    with pytest.raises(Unsupported, match="runs none of the runtimes"):
        plan(None, "esp32-s3").check()
    refused(None, ())  # nothing to say


def test_refusals_are_counted() -> None:
    device = load_device("pixel-8")
    with pytest.raises(Unsupported, match=r"first \(and 1 more\)"):
        refused(device, ("first.", "second."))


@pytest.mark.parametrize("device", [None, "iphone-12", "pixel-8", "browser-desktop", "esp32-s3"])
@pytest.mark.parametrize("recipe", recipe_names())
def test_what_is_saved_resolves_to_the_same(recipe: str, device: str | None, tmp_path: Path) -> None:
    given = {"context": 600, "tolerances": (("logits", 5e-5),), "seed": 9}
    first = plan(load_recipe(recipe), device, **given)
    path = tmp_path / "saved.toml"
    path.write_text(first.saved(path, "x.safetensors"), encoding="utf-8")
    again = plan(load_recipe(path), device)
    assert again.options == first.options and again.budgets == first.budgets and again.refusals == first.refusals
    # And without the device, as every choice is written out.
    assert plan(load_recipe(path)).options == first.options


def test_prompts_are_saved_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    first = plan(weights="int4", calibrate=str(tmp_path / "p.jsonl"))
    path = tmp_path / "sub" / "saved.toml"
    path.write_text(first.saved(path, "x"), encoding="utf-8")
    again = plan(load_recipe(path)).options
    assert Path(again.calibrate or "").resolve() == tmp_path / "p.jsonl" and again.rounding == "calibrated"


def test_a_recipes_budget_stands_for_the_devices(tmp_path: Path) -> None:
    recipe = ours(tmp_path, "[[budget]]\nmetric = 'size'\nmax = '1 MB'")
    made = plan(recipe, "pixel-8")
    assert [b.max for b in made.budgets if b.metric == "size" and not b.role] == ["1 MB"]
    assert {b.metric for b in made.budgets} == {"size", *(b.metric for b in load_device("pixel-8").budgets)}
    info = made.info()
    assert info is not None and (info.recipe, info.device) == ("ours", "pixel-8")
    assert info.budgets[0] == {"metric": "size", "max": "1 MB"}


BUDGETS = """
[[budget]]
metric = "size"
max = "60 MB"
[[budget]]
metric = "size"
role = "memory"
max = "60 MB"
[[budget]]
metric = "state"
max = "1 MB"
target = "tflite"
[[budget]]
metric = "kl"
max = 0.1
[[budget]]
metric = "size"
max = "+2 %"
"""


def test_budgets_are_held_against_what_is_predicted(tmp_path: Path) -> None:
    found = forecast(plan(ours(tmp_path, BUDGETS), weights="int4"), of())
    assert [v.within for v in found.verdicts] == [False, True, None, None, None]
    assert found.verdicts[0].value == found.predicted.total_bytes
    assert found.verdicts[1].value == found.predicted.by_role["memory"]
    assert [v.why for v in found.verdicts[2:]] \
        == ["it isn't about this artifact", "known after the build alone", "it needs a baseline"]
    assert [v.budget.max for v in found.exceeded] == ["60 MB"]


def test_memory_is_known_once_sizes_are() -> None:
    device: Device = load_device("linux-x86-64")
    tight = device.model_copy(update={"memory": device.memory.model_copy(update={"value": "100 MB"})})
    made = resolve(None, tight, {}, checkpoint="x", out=OUT)
    assert not made.refusals
    assert "needs at least" in forecast(made, of()).plan.refusals[0]


@pytest.mark.parametrize(("given", "geometry", "said"), [
    ({"context": 9000}, PUBLISHED, "a context of 9000 positions is outside 2..8192"),
    ({"target": "tflite", "heads": ("router",)}, PUBLISHED, "this checkpoint has no router head; it has: confidence"),
    ({"context": 48, "rules": (Rule("contents", "fp16"),)}, SMALL,
     "no weight of this checkpoint is 'contents'; did you mean content?"),
])
def test_what_the_checkpoint_hasnt_is_told_without_a_build(given: Any, geometry: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        forecast(plan(**given), of(geometry))
    assert said in caught.value.sentence


def test_a_recipes_mistake_is_named_once_the_checkpoint_is_read_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        forecast(plan(ours(tmp_path, "context = 9000")), of())
    assert caught.value.where == f"{tmp_path / 'ours.toml'}: context"


def test_a_rung_is_smaller() -> None:
    whole, rung = (forecast(plan(weights="int4"), of(replace(PUBLISHED, num_layers=n, engram_layers=(3,),
                                                             global_layers=(4,)))) for n in (20, 6))
    assert rung.predicted.total_bytes < whole.predicted.total_bytes
