"""A plan before its build, as JSON and for a terminal: who chose what, what is predicted, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from needle_export.report import units
from needle_export.report.codec import encode

if TYPE_CHECKING:
    from needle_export.plan import Forecast, Verdict


def as_dict(found: Forecast) -> dict[str, Any]:
    """A forecast, JSON-able; docs/recipes.md has its keys."""
    plan, predicted = found.plan, found.predicted
    table: dict[str, Any] = encode({
        "recipe": plan.recipe and plan.recipe.id,
        "device": plan.device and plan.device.id,
        "options": {name: {"value": _plain(getattr(plan.options, name)), "from": source}
                    for name, source in plan.sources.items()},
        "layers": found.geometry.num_layers,
        "buckets": list(predicted.buckets),
        "predicted": {
            "size": {"total_bytes": predicted.total_bytes, "by_role": predicted.by_role,
                     "overhead_bytes": predicted.overhead_bytes},
            "state": {"total_bytes": sum(predicted.state_bytes.values()), "by_part": predicted.state_bytes},
        },
        "estimated": _estimated(found),
        "budgets": [{"budget": v.budget.model_dump(exclude_none=True, exclude_defaults=True), "value": v.value,
                     "within": v.within, "decides": v.decides, "why": v.why} for v in found.verdicts],
        "refusals": list(plan.refusals),
    })
    return table


def render(found: Forecast, *, color: bool = False, width: int = 100) -> str:
    """A forecast for a terminal ``width`` columns wide, ending in a newline."""
    from needle_export.report.text import Page
    from needle_export.report.view import Fact, Section

    plan, predicted = found.plan, found.predicted
    page = Page(color=color, width=width)
    page.title(f"{plan.options.target} {plan.options.schemes}, {units.plural(found.geometry.num_layers, 'layer')}: "
               "planned, not built")
    for reason in plan.refusals:
        page.warning(reason)
    state = sum(predicted.state_bytes.values())
    page.facts([
        Fact("recipe", plan.recipe.id if plan.recipe else "none"),
        Fact("device", f"{plan.device.name} ({plan.device.id})" if plan.device else "none"),
        Fact("size", f"{units.size(predicted.total_bytes)} (predicted)"),
        Fact("state", f"{units.size(state)} (predicted)"),
        *[Fact(name, value) for name, value in _latencies(found)],
    ])
    rows = tuple((name, _shown(getattr(plan.options, name), predicted.buckets if name == "buckets" else ()), source)
                 for name, source in plan.sources.items())
    page.section(Section("Options", ("option", "value", "from"), rows))
    sizes = [*predicted.by_role.items(), ("overhead", predicted.overhead_bytes)]
    page.section(Section(
        "Predicted size", ("role", "bytes", "share"),
        tuple((name, units.size(size), units.percent(size, predicted.total_bytes)) for name, size in sizes),
        frozenset({1, 2}), tuple(size / predicted.total_bytes for _, size in sizes)))
    page.section(Section("Predicted state", ("part", "bytes"),
                         tuple((name, units.size(size)) for name, size in predicted.state_bytes.items()),
                         frozenset({1})))
    page.section(Section("Budgets", ("budget", "before the build", "verdict"),
                         tuple((v.budget.sentence, _value(v), _verdict(v)) for v in found.verdicts)))
    return page.text()


def _plain(value: Any) -> Any:
    """An option's value in JSON's types."""
    if isinstance(value, tuple):
        return [list(v) if isinstance(v, tuple) else v if isinstance(v, int | float) else str(v) for v in value]
    return value


def _shown(value: Any, instead: tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join("=".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value) or "none"
    if value is None and instead:
        return f"{', '.join(map(str, instead))} (the usual ones that fit)"
    return {None: "-", True: "yes", False: "no"}.get(value, str(value)) if not isinstance(value, int) or \
        isinstance(value, bool) else str(value)


def _value(v: Verdict) -> str:
    if v.value is None:
        return v.why
    unit = v.budget.figure.unit
    if unit == "bytes":
        return f"{units.size(round(v.value))} (predicted)"
    shown = units.milliseconds(v.value) if unit == "ms" else units.rate(v.value)
    return f"{shown} (estimated)"


def _verdict(v: Verdict) -> str:
    if v.within is None:
        return "open"
    return "within" if v.within else "EXCEEDED" if v.decides else "exceeded, an estimate that doesn't decide"


def _estimated(found: Forecast) -> dict[str, Any] | None:
    made = found.estimate
    if made is None:
        return None
    return {
        "position": made.position,
        "decode_ms": made.decode_ms,
        "prefill": [{"tokens": p.tokens, "tokens_per_s": p.tokens_per_s} for p in made.prompts],
    }


def _latencies(found: Forecast) -> list[tuple[str, str]]:
    made = found.estimate
    if made is None:
        return [("latency", f"no estimate: {found.no_estimate}")]
    told = "ESTIMATED from the device's rates, never measured"
    rows = [("decode", f"{units.milliseconds(made.decode_ms)} a token ({told})")]
    return rows + [(f"prompt of {p.tokens}", f"{units.rate(p.tokens_per_s)} (ESTIMATED)") for p in made.prompts]
