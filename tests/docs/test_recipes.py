"""docs/recipes.md and the guide tell what recipes there are and what they may say."""

from __future__ import annotations

import re
from pathlib import Path

from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.ladder import ladder_geometry
from needle_export.config.options import BuildOptions
from needle_export.config.recipe import Recipe, load_recipe, recipe_names
from needle_export.config.strict import read_toml
from needle_export.measure.predict import predict
from needle_export.report.units import size

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def table() -> str:
    """Every recipe with what it makes of the published geometry, as Markdown."""
    lines = ["| id | for | target | weights | predicted size | state |", "| --- | --- | --- | --- | --- | --- |"]
    for name in recipe_names():
        found = load_recipe(name)
        options = BuildOptions("x", Path("out"), **found.recipe.choices(found.path.parent))
        geometry = ladder_geometry(PUBLISHED, options.layers or PUBLISHED.num_layers)
        told = predict(options, geometry)
        whom = found.recipe.description.partition(":")[0]
        layers = f", {options.layers} layers" if options.layers else ""
        sizes = f"{size(told.total_bytes)} | {size(sum(told.state_bytes.values()))}"
        lines.append(f"| `{name}` | {whom} | `{options.target}` | {options.schemes}{layers} | {sizes} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_comes_along() -> None:
    assert table() in PAGE


def test_every_key_is_described() -> None:
    section = PAGE.partition("## What a recipe says")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", section, re.M) == list(Recipe.model_fields)


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    section = PAGE.partition("## What a recipe says")[2]
    path = tmp_path / "example.toml"
    path.write_text("\n".join(re.findall(r"^    (.*)$|^$", section.partition("| key |")[0], re.M)), encoding="utf-8")
    made = read_toml(Recipe, path)
    assert made.target == "tflite" and made.tolerances == {"logits": 5e-5} and made.budget[0].max == "40 MB"
