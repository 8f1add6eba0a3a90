"""What to build, resolved: options of the command line before a recipe's before a device's before ours.

:func:`resolve` decides and reads no checkpoint; :func:`forecast` says what a plan would make of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from needle_export.checkpoint.geometry import Geometry
from needle_export.config.budget import Budget
from needle_export.config.device import Device
from needle_export.config.metrics import LATENCIES
from needle_export.config.options import BuildOptions
from needle_export.config.recipe import KEYS, Named, Recipe, placed, written
from needle_export.config.rules import Rules
from needle_export.errors import NeedleExportError, Unsupported, UsageError
from needle_export.measure.estimate import Estimate, estimate
from needle_export.measure.inventory import Imported, tensors
from needle_export.measure.predict import Predicted, longest_chunk, predict
from needle_export.measure.predict_work import predict_work, uncounted
from needle_export.measure.work import decode_position
from needle_export.report.schema import REPORT_NAME, PlanInfo

PROMPTS = (64, 256)
"""Lengths of the prompts that an estimate is made for, in tokens, as far as they fit; the longest stands for all."""

COMMAND_LINE, DEFAULT = "command line", "default"

#: Options by the name that an error of ``BuildOptions`` gives them.
_ERRORS = {"--rule": "rules"}


@dataclass(frozen=True)
class Plan:
    """One build, resolved.

    Attributes:
        options: of it.
        sources: by option, who chose it: the command line, a recipe or a device by id, or nobody ("default").
        recipe: that it follows, or None.
        device: that it is for, or None.
        budgets: of both; where both bound the same figure, the recipe's.
        refusals: what the device can't do with it, a sentence each.
    """

    options: BuildOptions
    sources: dict[str, str]
    recipe: Named | None
    device: Device | None
    budgets: tuple[Budget, ...]
    refusals: tuple[str, ...]

    def check(self) -> None:
        """Stop where the device refuses.

        Raises:
            Unsupported: with the first reason.
        """
        refused(self.device, self.refusals)

    def info(self) -> PlanInfo | None:
        """What the report of the build is to say of it; None without a recipe and a device."""
        if self.recipe is None and self.device is None:
            return None
        entries = tuple(b.model_dump(exclude_none=True, exclude_defaults=True) for b in self.budgets)
        recipe = None if self.recipe is None else self.recipe.id
        return PlanInfo(recipe, None if self.device is None else self.device.id, entries)

    def as_recipe(self, description: str, folder: Path) -> Recipe:
        """A recipe that resolves to the same options and budgets without this one, and for the same device with it.

        Args:
            folder: that its file will be in.
        """
        o = self.options
        calibrate = None if o.calibrate is None else os.path.relpath(o.calibrate, folder)
        fixed = {name: getattr(o, name) for name in KEYS}
        fixed |= {
            "rules": tuple(map(str, o.rules)) or None,
            "heads": o.heads or None,
            "tolerances": dict(o.tolerances) or None,
            "calibrate": calibrate,
            # Of caches and rounding the target's own, and prompts', stay such.
            "rounding": None if calibrate is not None else o.rounding,
        }
        return Recipe(description=description, budget=self.budgets, **fixed)

    def saved(self, path: Path, checkpoint: str) -> str:
        """The text of a recipe file for it."""
        start = self.recipe.recipe.description if self.recipe else f"what was planned for {Path(checkpoint).name}"
        return written(self.as_recipe(start, path.parent))


def resolve(recipe: Named | None, device: Device | None, given: Mapping[str, Any], **fixed: Any) -> Plan:
    """One plan.

    Args:
        given: options of the command line; those left out aren't in it. Rules of both are kept, these last, so that
            they win.
        fixed: options that nobody but the caller chooses: the checkpoint and the folder.

    Raises:
        UsageError: options that don't go together; of a recipe's, with its file and key.
    """
    chosen = {} if recipe is None else recipe.recipe.choices(recipe.path.parent)
    told = {**dict.fromkeys(chosen, f"recipe {recipe.id}" if recipe else ""), **dict.fromkeys(given, COMMAND_LINE)}
    values = {**chosen, **given}
    if "rules" in chosen and "rules" in given:
        values["rules"] = (*chosen["rules"], *given["rules"])
    by_device: dict[str, Any] = {}
    if device is not None and device.targets:
        by_device = {"target": values.get("target", device.targets[0])}
        by_device |= device.defaults(by_device["target"])
        by_device = {name: value for name, value in by_device.items() if name not in values}
    try:
        options = BuildOptions(**{**by_device, **values}, **fixed)
    except UsageError as error:
        # What the device would choose doesn't go with the rest: then it says itself what it refuses, and why.
        target = {name: value for name, value in by_device.items() if name == "target"}
        if target == by_device:
            raise _placed(error, recipe, told) from None
        by_device = target
        try:
            options = BuildOptions(**{**by_device, **values}, **fixed)
        except UsageError as second:
            raise _placed(second, recipe, told) from None
    told |= dict.fromkeys(by_device, f"device {device.id}" if device else "")
    sources = {f.name: told.get(f.name, DEFAULT) for f in fields(BuildOptions) if f.name not in fixed}
    refusals = () if device is None else device.refuses(options)
    return Plan(options, sources, recipe, device, _budgets(recipe, device), refusals)


def resolve_all(
    recipes: Sequence[Named | None],
    devices: Sequence[Device | None],
    given: Mapping[str, Any],
    *,
    out: Path,
    **fixed: Any,
) -> list[tuple[str, Path, Plan | NeedleExportError]]:
    """A plan for each recipe on each device, with its name and its folder; or why there can't be one.

    A single one is named nothing, and its folder is ``out``; several are ``<recipe>-<device>`` in it.

    Args:
        given, fixed: as of :func:`resolve`, for all of them.

    Raises:
        UsageError: they can't be told apart or have no place; of a single plan, whatever is wrong with it.
    """
    if len(devices) == len(recipes) == 1:
        return [("", out, resolve(recipes[0], devices[0], given, out=out, **fixed))]
    if out.exists() and (not out.is_dir() or (out / REPORT_NAME).exists()):
        raise UsageError("several builds are published into folders in it, and this is a build itself or a file",
                         where=str(out), fix="choose another --out")
    found: dict[str, tuple[Path, Plan | NeedleExportError]] = {}
    for recipe, device in product(recipes, devices):
        name = "-".join(x.id for x in (recipe, device) if x is not None)
        if name in found:
            raise UsageError(f"two builds would be {name}", where="--out", fix="give each recipe and device once")
        try:
            found[name] = out / name, resolve(recipe, device, given, out=out / name, **fixed)
        except NeedleExportError as error:
            found[name] = out / name, error
    return [(name, folder, plan) for name, (folder, plan) in found.items()]


def _placed(error: UsageError, recipe: Named | None, told: Mapping[str, str]) -> UsageError:
    key = _ERRORS.get(error.where, error.where.removeprefix("--").replace("-", "_"))
    if recipe is None or told.get(key) != f"recipe {recipe.id}":
        return error
    return placed(error, recipe, key)


def _budgets(recipe: Named | None, device: Device | None) -> tuple[Budget, ...]:
    own = () if recipe is None else recipe.recipe.budget
    about = {_about(b) for b in own}
    more = () if device is None else tuple(b for b in device.budgets if _about(b) not in about)
    return (*own, *more)


def _about(budget: Budget) -> tuple[Any, ...]:
    return budget.metric, budget.target, budget.weights, budget.role, budget.prompt, budget.upper


def refused(device: Device | None, reasons: Sequence[str]) -> None:
    """Stop where a device refuses.

    Raises:
        Unsupported: with the first reason, and how many more there are.
    """
    if device is None or not reasons:
        return
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    raise Unsupported(f"{reasons[0].rstrip('.')}{more}", where=f"--device {device.id}",
                      fix="needle-export plan says all that the device refuses")


@dataclass(frozen=True)
class Verdict:
    """A budget before the build.

    Attributes:
        value: what is predicted or estimated, in the metric's unit; None where that isn't known before a build.
        within: whether it keeps to the bound; None where that can't be said.
        why: it can't, or empty.
        decides: whether a breach is one now: of a size or a state, or of an estimate that the budget lets decide.
    """

    budget: Budget
    value: float | None
    within: bool | None
    why: str = ""
    decides: bool = True


@dataclass(frozen=True)
class Forecast:
    """What a plan would make of a checkpoint.

    Attributes:
        plan: with what the device refuses now that sizes are known too.
        geometry: of the rung.
        predicted: sizes.
        verdicts: of the budgets, in order.
        estimate: of latency, by the device's rates; None where there is none.
        no_estimate: why there is none, or empty.
    """

    plan: Plan
    geometry: Geometry
    predicted: Predicted
    verdicts: tuple[Verdict, ...]
    estimate: Estimate | None = None
    no_estimate: str = ""

    @property
    def exceeded(self) -> tuple[Verdict, ...]:
        """Budgets that the build would break."""
        return tuple(v for v in self.verdicts if v.within is False and v.decides)


def forecast(plan: Plan, checkpoint: Any) -> Forecast:
    """Sizes, and what of the budgets and of the device follows from them.

    Args:
        checkpoint: read, merged and cut to the plan's depth.

    Raises:
        UsageError: the context, a head or a rule doesn't fit the checkpoint.
    """
    g: Geometry = checkpoint.geometry
    options = plan.options
    try:
        _check(options, g)
    except UsageError as error:
        raise _placed(error, plan.recipe, plan.sources) from None
    predicted = predict(options, g, imported(checkpoint.packed))
    made, why = _estimate(plan, g, predicted)
    verdicts = tuple(_verdict(budget, plan, predicted, made) for budget in plan.budgets)
    if plan.device is not None:
        resident = predicted.total_bytes + sum(predicted.state_bytes.values())
        plan = replace(plan, refusals=plan.device.refuses(options, resident=resident))
    return Forecast(plan, g, predicted, verdicts, made, why)


def _check(options: BuildOptions, g: Geometry) -> None:
    """What a build would refuse after it has read the checkpoint, as far as the geometry tells."""
    if not 2 <= options.context <= g.max_seq_len:
        raise UsageError(f"a context of {options.context} positions is outside 2..{g.max_seq_len}", where="--context",
                         fix="choose a length that the model was trained for")
    longest = longest_chunk(options, g)
    for bucket in options.buckets or ():
        if bucket > longest:
            raise UsageError(f"{bucket} tokens are more than the window of {longest}", where="--buckets")
    for head in options.heads:
        if g.head(head) is None:
            has = ", ".join(h.name for h in g.heads) or "none"
            raise UsageError(f"this checkpoint has no {head} head", where="--heads", fix=f"it has: {has}")
    rules: Rules = options.schemes
    rules.check({(t.source, t.role) for t in tensors(g, options.heads)})


def imported(packed: Mapping[str, Any]) -> Imported:
    """A container's codes by tensor, for ``measure.inventory``.

    Args:
        packed: matrices by the container's names.
    """

    def codes(source: str, layer: int, site: int) -> tuple[int, int] | None:
        name = source if layer < 0 else f"{source}#{layer}"
        if source.startswith("engrams/"):
            name = f"engrams_{site}/{source.removeprefix('engrams/')}"
        found = packed.get(name)
        # Rows that aren't whole groups stay floats.
        return None if found is None or found.in_pad != found.shape[1] else (found.bits, found.group)

    return codes


def _estimate(plan: Plan, g: Geometry, predicted: Predicted) -> tuple[Estimate | None, str]:
    """Latency by the device's rates, or why there is none."""
    if plan.device is None:
        return None, "no device was named"
    rates = plan.device.rates(plan.options.target)
    if rates is None:
        return None, "nothing is known of the device's rates"
    kinds = uncounted(plan.options, predicted)
    if kinds:
        return None, f"ops of {plan.options.target} graphs of {', '.join(kinds)} haven't been counted"
    context = plan.options.context
    prompts = tuple(n for n in PROMPTS if n <= context) or (context,)
    return estimate(predict_work(plan.options, g, predicted, decode_position(context), prompts), rates), ""


def _verdict(budget: Budget, plan: Plan, predicted: Predicted, made: Estimate | None) -> Verdict:
    options, bound = plan.options, budget.bound
    about = (budget.target in (None, options.target)
             and (budget.weights is None or fnmatchcase(str(options.schemes), budget.weights))
             and (budget.device is None or (plan.device is not None and plan.device.id == budget.device)))
    if not about:
        return Verdict(budget, None, None, "it isn't about this artifact")
    if bound.relative:
        return Verdict(budget, None, None, "it needs a baseline")
    if budget.metric == "size":
        value = float(predicted.by_role.get(budget.role, 0) if budget.role else predicted.total_bytes)
    elif budget.metric == "state":
        value = float(sum(predicted.state_bytes.values()))
    elif budget.metric in LATENCIES and made is not None:
        rate = next((p.tokens_per_s for p in reversed(made.prompts) if budget.prompt in (None, p.tokens)), None)
        if budget.metric == "prefill" and rate is None:
            return Verdict(budget, None, None, "there is no estimate for such a prompt")
        value = made.decode_ms if budget.metric == "decode" else float(rate or 0)
    else:
        return Verdict(budget, None, None, "known after the build alone")
    within = value <= bound.value if budget.upper else value >= bound.value
    return Verdict(budget, value, within, "", budget.metric not in LATENCIES or budget.estimated)


