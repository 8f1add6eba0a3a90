"""Recipes: how to compile, as TOML files with the options of ``build`` in them, and what the result is held to.

docs/recipes.md describes the format.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic

from needle_export.config.budget import Budget
from needle_export.config.options import CACHE_FORMS, OPSETS, ROUNDINGS, SYSTEMS, TARGETS, TOLERANCES, WEIGHTS
from needle_export.config.rules import Rule
from needle_export.config.shipped import find, shipped_names
from needle_export.config.strict import Strict, read_toml
from needle_export.errors import NeedleExportError, UsageError

_COMMENT = "# Written by needle-export --save-recipe; docs/recipes.md describes the format.\n"

Positive = Annotated[int, pydantic.Field(ge=1)]
Name = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=200)]


class Recipe(Strict):
    """A recipe; what is left out is left to the device and the defaults of ``build``.

    Attributes:
        description: what it is for.
        target, layers, context, weights, rounding, cache, opset, os, seed: as the options of ``build``.
        rules: ``PATTERN=SCHEME`` each, in order.
        calibrate: a file of prompts, from the recipe's own folder on.
        buckets: lengths of prefills.
        heads: probe heads by name.
        tolerances: bounds of the verification by name, tighter than a scheme's own.
        budget: what the artifact is held to.
    """

    description: Annotated[str, pydantic.StringConstraints(min_length=1, max_length=2000, strip_whitespace=True)]
    target: str | None = None
    layers: Positive | None = None
    context: Positive | None = None
    weights: str | None = None
    rules: tuple[str, ...] | None = None
    rounding: str | None = None
    calibrate: Name | None = None
    cache: str | None = None
    opset: int | None = None
    os: str | None = None
    buckets: tuple[Positive, ...] | None = None
    heads: tuple[Name, ...] | None = None
    seed: int | None = None
    tolerances: dict[str, float] | None = None
    budget: tuple[Budget, ...] = ()

    @pydantic.field_validator("target", "weights", "rounding", "cache", "opset", "os")
    @classmethod
    def _known(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        known: dict[str, tuple[Any, ...]] = {
            "target": TARGETS, "weights": WEIGHTS, "rounding": ROUNDINGS, "cache": CACHE_FORMS, "opset": OPSETS,
            "os": SYSTEMS,
        }
        return value if value is None else _one_of(value, known[str(info.field_name)])

    @pydantic.field_validator("rules")
    @classmethod
    def _rules(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in value or ():
            try:
                rule = Rule.parse(text)
            except UsageError as error:
                raise ValueError(f"{error.what}; {error.fix}") from None
            _one_of(rule.scheme, WEIGHTS)
        return value

    @pydantic.field_validator("tolerances")
    @classmethod
    def _tolerances(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name in value or ():
            _one_of(name, TOLERANCES)
        return value

    def choices(self, folder: Path) -> dict[str, Any]:
        """The options of ``BuildOptions`` that the recipe decides.

        Args:
            folder: that its paths start from.
        """
        found = {name: value for name in KEYS if (value := getattr(self, name)) is not None}
        if self.rules is not None:
            found["rules"] = tuple(Rule.parse(text) for text in self.rules)
        if self.calibrate is not None:
            found["calibrate"] = str(folder / self.calibrate)
        if self.tolerances is not None:
            found["tolerances"] = tuple(sorted(self.tolerances.items()))
        return found


KEYS = tuple(name for name in Recipe.model_fields if name not in ("description", "budget"))
"""Keys of a recipe that are options of ``build``."""

@dataclass(frozen=True)
class Named:
    """A recipe with its place.

    Attributes:
        id: the file's name without its ending.
        path: of the file.
        recipe: that it holds.
    """

    id: str
    path: Path
    recipe: Recipe


def recipe_names() -> tuple[str, ...]:
    """Ids of the recipes that come along, sorted."""
    return shipped_names("recipes")


def load_recipe(name_or_path: str | Path) -> Named:
    """A recipe that comes along, by its id, or a team's own, by the path of its file.

    Raises:
        UsageError: there is no such id; names the nearest.
        BadInput: the file isn't right, naming the key.
    """
    path = find("recipes", name_or_path, "--recipe")
    return Named(path.stem, path, read_toml(Recipe, path))


def written(recipe: Recipe) -> str:
    """The text of a file that holds a recipe, as people write it; what is left out stays so."""
    import tomlkit

    document = tomlkit.document()
    for name, value in recipe.model_dump(exclude_none=True, exclude={"tolerances", "budget"}).items():
        document.add(name, list(value) if isinstance(value, tuple) else value)
    if recipe.tolerances:
        document.add("tolerances", tomlkit.item(recipe.tolerances))
    if recipe.budget:
        entries = tomlkit.aot()
        for budget in recipe.budget:
            entries.append(tomlkit.item(budget.model_dump(exclude_none=True, exclude_defaults=True)))
        document.add("budget", entries)
    return _COMMENT + str(tomlkit.dumps(document))


def placed(error: NeedleExportError, named: Named, key: str) -> UsageError:
    """An error of an option as one of the recipe that chose it."""
    return UsageError(error.what, where=f"{named.path}: {key}", fix=error.fix)


def _one_of(value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        names = [str(k) for k in known]
        near = difflib.get_close_matches(str(value), names, 1, 0.5)
        raise ValueError(f"there is no {value!r}; " + (f"did you mean {near[0]}?" if near else
                                                       f"choose from {', '.join(names)}"))
    return value
