"""Devices as tables: all of them in a few figures, or one with every figure's source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle_export.config.device import Device, Runtime
from needle_export.config.figures import Count, Figure, Sourced, System, Version, sourced
from needle_export.config.units import quantity

COLUMNS = ("id", "name", "system", "runtimes", "memory", "bandwidth")

#: Keys whose figures are told in the table of the device itself.
_RUNTIME = "runtime["


def summary(device: Device) -> dict[str, Any]:
    """What the table of all devices says of one, JSON-able; sizes in bytes, bandwidth in bytes a second."""
    first = device.runtimes[0] if device.runtimes else None
    return {
        "id": device.id,
        "name": device.name,
        "kind": device.kind,
        "os": device.os,
        "os_version": device.os_version.value,
        "chip": device.chip.name,
        "runtimes": [{"target": r.target, "name": r.name, "version": r.version.value} for r in device.runtimes],
        "refusal": device.refusal,
        "memory_bytes": device.memory_bytes,
        "bandwidth_bytes_per_s": first and first.rates and quantity(first.rates.bandwidth.value, "bandwidth"),
    }


def as_dict(device: Device) -> dict[str, Any]:
    """A device as its file has it, JSON-able."""
    return device.model_dump(mode="json")


def rows(devices: Sequence[Device]) -> list[tuple[str, ...]]:
    """A row for each device, of :data:`COLUMNS`."""
    return [(d.id, d.name, f"{d.os} {d.os_version.value}", _runtimes(d), d.memory.value, _bandwidth(d))
            for d in devices]


def markdown(devices: Sequence[Device]) -> str:
    """All devices as a Markdown table, ending in a newline."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *((f"`{row[0]}`", *row[1:]) for row in rows(devices))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render_all(devices: Sequence[Device], *, color: bool = False, width: int = 100) -> str:
    """All devices for a terminal, ending in a newline."""
    from needle_export.report.text import Page
    from needle_export.report.view import Section

    page = Page(color=color, width=width)
    page.section(Section("Devices", COLUMNS, tuple(rows(devices)), frozenset({4, 5})))
    page.note("memory is what one app may use, bandwidth what one thread reads at; most of both are guesses, and "
              "needle-export devices ID says which and why")
    return page.text()


def render(device: Device, *, color: bool = False, width: int = 100) -> str:
    """One device with every figure, its kind and its source, for a terminal, ending in a newline."""
    from needle_export.report.text import Page
    from needle_export.report.view import Fact, Section

    page = Page(color=color, width=width)
    page.title(f"{device.name} ({device.id})")
    page.facts([Fact("class", device.kind), Fact("system", f"{device.os} {device.os_version.value}"),
                Fact("chip", device.chip.name), *([Fact("core", device.chip.core)] if device.chip.core else [])])
    if device.refusal:
        page.warning(f"no artifact runs here: {device.refusal}")
    columns = ("figure", "value", "kind", "source")
    found = list(sourced(device))
    own = [(path, figure) for path, figure in found if not path.startswith((_RUNTIME, "without["))]
    page.section(Section("The device", columns, _cells(own, ""), frozenset()))
    for runtime in device.runtimes:
        prefix = f"{_RUNTIME}{runtime.target}]."
        cells = _cells([entry for entry in found if entry[0].startswith(prefix)], prefix)
        page.section(Section(f"{runtime.target}: {_called(runtime)}", columns, cells, frozenset()))
    absent = tuple((w.target, w.why, w.kind, w.source) for w in device.without)
    page.section(Section("Targets without a runtime", ("target", "why", "kind", "source"), absent, frozenset()))
    page.section(Section("Budgets of its own", ("budget",), tuple((b.sentence,) for b in device.budgets), frozenset()))
    return page.text()


def _cells(found: Sequence[tuple[str, Sourced]], prefix: str) -> tuple[tuple[str, ...], ...]:
    return tuple((path.removeprefix(prefix), _value(figure), figure.kind, figure.source) for path, figure in found)


def _value(figure: Sourced) -> str:
    if isinstance(figure, Figure | Version | Count | System):
        return str(figure.value)
    refused = [*getattr(figure, "weights", ()), *getattr(figure, "cache", ())]
    return f"no {', '.join(refused)}: {getattr(figure, 'why', '')}"


def _called(runtime: Runtime) -> str:
    return f"{runtime.name} {runtime.version.value}"


def _runtimes(device: Device) -> str:
    return ", ".join(f"{r.target} {r.version.value}" for r in device.runtimes) or "none"


def _bandwidth(device: Device) -> str:
    first = device.runtimes[0].rates if device.runtimes else None
    return first.bandwidth.value if first else ""
