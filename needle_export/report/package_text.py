"""What ``inspect`` found in a Core ML package, for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from needle_export.report.text import Page
from needle_export.report.units import percent, plural, size, whole
from needle_export.report.view import Fact, Section

#: Our own entries of a package's metadata that a line of text can hold.
_OURS = {"needle.tool": "built by", "needle.checkpoint.sha256": "checkpoint"}
_RECIPE = "needle.recipe"


def package_facts(page: Page, described: Mapping[str, Any]) -> None:
    """Write a description, as ``targets.coreml.evaluate.describe`` gives it, onto a page."""
    constants, functions = described["constants"], described["functions"]
    facts = [
        Fact("format", f"specification {described['specification']}, runs from {described['minimum_os']} on"),
        *_origin(described["metadata"]),
        Fact("functions", _listing(functions, described["default_function"])),
        Fact("weight file", f"{size(described['weight_file_bytes'])} ({whole(described['weight_file_bytes'])} bytes)"),
        Fact("states", f"{size(described['state_bytes'])} in {plural(len(described['states']), 'state')}"
             if described["states"] else "none"),
    ]
    if len(functions) > 1:
        facts.append(Fact("shared", f"{percent(constants['shared_bytes'], constants['bytes'])} of the constants' bytes "
                          "between functions"))
    page.facts(facts)
    page.section(_constants(constants))
    page.section(_counts("Computes in", "result", {n: f["precisions"] for n, f in functions.items()}))
    for name, function in functions.items():
        ports = [("input", *_port(key, told)) for key, told in function["inputs"].items()]
        # Functions have the same states as a rule, and these have a table of their own.
        if set(function["states"]) != set(described["states"]):
            ports += [("state", *_port(key, described["states"][key])) for key in function["states"]]
        ports += [("output", *_port(key, told)) for key, told in function["outputs"].items()]
        page.section(Section(f"Function {name}, opset {function['opset']}", ("", "name", "type", "shape"),
                             tuple(ports)))
    page.section(Section("States", ("name", "type", "shape"),
                         tuple(_port(key, told) for key, told in described["states"].items())))
    page.section(_counts("Ops", "type", {n: f["op_types"] for n, f in functions.items()}))


def _origin(metadata: Mapping[str, str]) -> list[Fact]:
    """What the package says of where it comes from."""
    found = [Fact(label, metadata[key]) for key, label in _OURS.items() if key in metadata]
    try:
        recipe = json.loads(metadata.get(_RECIPE, "{}"))
    except ValueError:
        recipe = None  # anybody may write anything there
    if isinstance(recipe, Mapping) and recipe:
        found.append(Fact("recipe", ", ".join(f"{key} {value}" for key, value in recipe.items()
                                              if value not in (None, [], False))))
    if rest := sorted(key for key in metadata if not key.startswith("needle.")):
        found.append(Fact("metadata", ", ".join(f"{key} = {metadata[key][:80]}" for key in rest)))
    return found


def _listing(functions: Mapping[str, Any], default: str) -> str:
    names = [f"{name} (runs if none is named)" if name == default and len(functions) > 1 else name
             for name in functions]
    return ", ".join(names) or "none"


def _constants(constants: Mapping[str, Any]) -> Section:
    total = constants["bytes"] + constants["in_specification"]
    named = [*constants["forms"].items(), ("in the specification", constants["in_specification"])]
    rows = [(form, whole(count), percent(count, total)) for form, count in named]
    rows.append(("total", whole(total), percent(total, total)))
    shares = tuple(count / total if total else 0.0 for _, count in named)
    return Section("Constants by form", ("form", "bytes", "share"), tuple(rows), frozenset({1, 2}), (*shares, 0.0))


def _counts(title: str, what: str, counted: Mapping[str, Mapping[str, int]]) -> Section:
    """Counts by function, side by side, the largest of the first function first."""
    names = list(dict.fromkeys(key for counts in counted.values() for key in counts))
    rows = [(name, *(whole(counts.get(name, 0)) for counts in counted.values())) for name in names]
    rows.append(("total", *(whole(sum(counts.values())) for counts in counted.values())))
    return Section(title, (what, *counted), tuple(rows), frozenset(range(1, len(counted) + 1)))


def _port(name: str, told: Mapping[str, Any]) -> tuple[str, str, str]:
    """A tensor's name, type and sizes; a size that the program leaves open is a question mark."""
    return name, told["dtype"], " x ".join("?" if count < 0 else f"{count}" for count in told["shape"])
