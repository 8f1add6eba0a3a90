"""Recipes: what a file may say, what is refused and how, and those that come along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.config.options import BuildOptions
from needle_export.config.recipe import KEYS, Recipe, load_recipe, recipe_names, written
from needle_export.config.rules import Rule
from needle_export.config.strict import read_toml
from needle_export.errors import BadInput, UsageError

LINE = 'description = "d"\n'


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ours.toml"
    path.write_text(LINE + text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        load_recipe(path)
    assert caught.value.exit_code == 3
    return caught.value.sentence.replace(str(path), "ours.toml")


@pytest.mark.parametrize(("text", "said"), [
    ("weigths = 'int4'", "ours.toml: weigths: there is no such key; did you mean weights?"),
    ("weights = 'pallete4'", "ours.toml: weights: there is no 'pallete4'; did you mean palette4?"),
    ("target = 'tflit'", "ours.toml: target: there is no 'tflit'; did you mean tflite?"),
    ("opset = 22", "ours.toml: opset: there is no 22; "),
    ("layers = 0", "ours.toml: layers: input should be greater than or equal to 1"),
    ("layers = '8'", "ours.toml: layers: input should be a valid integer"),
    ("rules = ['content']", "ours.toml: rules: 'content' isn't a rule; write PATTERN=SCHEME, such as content=int8"),
    ("rules = ['content=int9']", "ours.toml: rules: there is no 'int9'; did you mean int8?"),
    ("[tolerances]\nlogit = 1e-5", "ours.toml: tolerances: there is no 'logit'; did you mean logits?"),
    ("[[budget]]\nmetric = 'sise'\nmax = '3 MB'", "ours.toml: budget[1].metric: "),
    ("[[budget]]\nmetric = 'size'\nmaximum = '3 MB'",
     "ours.toml: budget[1].maximum: there is no such key; did you mean max?"),
])
def test_what_is_wrong_is_named_with_its_key(text: str, said: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text).startswith(said)


def test_a_recipe_says_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text("weights = 'int4'\n", encoding="utf-8")
    with pytest.raises(BadInput, match="description: the key is missing"):
        load_recipe(path)


def test_an_unknown_id_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no recipe 'ios-smalest'; did you mean ios-smallest"):
        load_recipe("ios-smalest")
    with pytest.raises(BadInput, match="there is no such file"):
        load_recipe("nowhere/ours.toml")


def test_at_least_eight_come_along() -> None:
    assert {"ios-balanced", "ios-smallest", "android-balanced", "android-legacy", "onnx-desktop", "web", "tiny-rung",
            "reference-fp32"} <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_those_that_come_along_can_be_built(name: str) -> None:
    found = load_recipe(name)
    options = BuildOptions("x.safetensors", Path("out"), **found.recipe.choices(found.path.parent))
    assert options.target == found.recipe.target  # each says it, so that it is the same for every device
    assert found.recipe.calibrate is None  # nothing comes along to calibrate with
    assert any(b.metric == "size" for b in found.recipe.budget) or name == "reference-fp32"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Every key, with text that TOML must escape."""
    text = 'It is "ours"\\ and\nof two lines'
    budget = [{"metric": "size", "max": "35.5 MB", "role": "memory"}, {"metric": "kl", "max": 0.05}]
    made = Recipe.model_validate_json(json.dumps({
        "description": text, "target": "tflite", "layers": 8, "context": 512, "weights": "int4", "rounding": "search",
        "calibrate": "a b.jsonl", "cache": "fp32", "opset": 24, "os": "ios18", "seed": 3, "rules": ["content=int8"],
        "buckets": [8, 16], "heads": ["confidence"], "tolerances": {"logits": 1e-5}, "budget": budget}))
    assert all(getattr(made, key) is not None for key in KEYS)
    path = tmp_path / "again.toml"
    path.write_text(written(made), encoding="utf-8")
    assert read_toml(Recipe, path) == made


def test_paths_start_from_the_recipes_folder(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(LINE + "calibrate = 'p.jsonl'\nrules = ['content=int8']", encoding="utf-8")
    found = load_recipe(tmp_path / "ours.toml")
    assert found.id == "ours"
    assert found.recipe.choices(found.path.parent) == {
        "calibrate": str(tmp_path / "p.jsonl"), "rules": (Rule("content", "int8"),)}
