"""This machine's device file: its rates in the runtimes of targets, measured now, so that estimates are possible."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from needle_export.checkpoint.files import atomic_write
from needle_export.config.device import Device
from needle_export.config.options import IR_VERSIONS, OPSETS
from needle_export.config.progress import Progress
from needle_export.config.rates import HOST, Rates
from needle_export.config.refusals import TFLITE_BLOCKS_NEED
from needle_export.config.strict import validate
from needle_export.errors import Unsupported, UsageError
from needle_export.measure import rates as measured
from needle_export.measure.latency import host
from needle_export.targets import find_target
from needle_export.targets.base import TimesKernels

#: Of each target: its runtime's distribution and name, the limits that a device file must have, and why they hold.
_RUNTIMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "onnx": ("onnxruntime", "ONNX Runtime", {"opset": OPSETS[-1], "ir": IR_VERSIONS[OPSETS[-1]]}),
    "tflite": ("ai-edge-litert", "LiteRT", {"ops": TFLITE_BLOCKS_NEED}),
}
_LIMIT = "the newest that builds of this tool ask for, and those run in this runtime here when they are verified"


def calibrate(targets: Sequence[str], out: Path, progress: Progress, *, repeats: int) -> Device:
    """Measure the rates of targets' runtimes on this machine and write its device file.

    Args:
        targets: whose runtimes.
        out: the file; its folder is made.
        repeats: processes for each target; the median time of every graph counts.

    Raises:
        UsageError: a target can't be timed so, or the file can't be written.
        Unsupported: a runtime isn't installed, or the machine is too busy to be measured.
        BadInput: a process that measures failed.
    """
    for name in targets:
        if name not in _RUNTIMES or not isinstance(find_target(name), TimesKernels):
            raise UsageError(f"the rates of {name} can't be measured here", where="--target",
                             fix=f"choose from {', '.join(_RUNTIMES)}")
    cache, found = measured.last_cache(), {}
    size = measured.USUAL_CACHE if cache is None else cache
    for name in targets:
        runs = measured.measure(name, size, repeats=repeats, progress=progress)
        with progress.stage(f"solve for the rates of {name}"):
            found[name] = measured.solve(measured.merged(runs), size)
    raw = describe(found, f"needle-export calibrate --target {','.join(targets)} on {host()}")
    device = validate(Device, raw, str(out))
    write(raw, out)
    return device


def describe(found: Mapping[str, Rates], source: str) -> dict[str, Any]:
    """A device file's content for rates by target."""

    def figure(value: Any, kind: str = "measured", why: str = source) -> dict[str, Any]:
        return {"value": value, "kind": kind, "source": why}

    runtimes = []
    for target, rates in found.items():
        distribution, name, limits = _RUNTIMES[target]
        runtimes.append({
            "target": target,
            "name": name,
            "version": figure(_version(version(distribution)), why=f"the version of {distribution} that is installed"),
            **{key: figure(limit, "guess", _LIMIT) for key, limit in limits.items()},
            "rates": _rates(rates, figure),
        })  # fmt: skip
    return {
        "id": HOST,
        "name": "This machine",
        "kind": HOST,
        "os": platform.system(),
        "os_version": figure(_version(platform.release()), why="platform.release()"),
        "chip": {"name": host()},
        "memory": figure(f"{_memory()} B", why="os.sysconf: all of the machine's"),
        "runtime": runtimes,
    }


def _rates(rates: Rates, figure: Any) -> dict[str, Any]:
    def by_type(values: Mapping[str, float]) -> dict[str, Any]:
        return {name: figure(f"{value / 1e9:.2f} GB/s") for name, value in values.items()}

    return {
        "bandwidth": figure(f"{rates.bandwidth / 1e9:.2f} GB/s"),
        **{name: figure(f"{value / 1e9:.1f} GMAC/s") for name, value in rates.throughput.items()},
        "op": figure(f"{rates.op * 1e6:.4f} us"),
        "call": figure(f"{rates.call * 1e6:.2f} us"),
        "cache": figure(f"{rates.cache / (1 << 20):.1f} MiB"),
        "values": figure(f"{rates.values / 1e9:.2f} GB/s") if rates.values else None,
        "cold": figure(f"{rates.cold * 1e6:.4f} us"),
        "own": figure(f"{rates.own:.0f} B"),
        "streams": by_type(rates.streams),
        "cached": by_type(rates.cached),
    }


def _version(text: str) -> str:
    """The numbers that a version begins with: ``6.1.0`` of ``6.1.0-13-amd64``."""
    found = re.match(r"\d{1,5}(\.\d{1,5}){0,3}", text)
    return found[0] if found else "0"


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        raise Unsupported("this system doesn't tell how much memory it has") from None


def write(raw: Mapping[str, Any], out: Path) -> None:
    """Write a device file, whole or not at all.

    Raises:
        UsageError: the place can't be written.
    """
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Written by needle-export calibrate. One thread, nothing else running, or nearly."))
    document.update(_told(raw))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder can't be made ({error.strerror})", where=str(out.parent)) from None
    with atomic_write(out) as handle:
        handle.write(tomlkit.dumps(document).encode())


def _told(value: Any) -> Any:
    """Without what isn't known."""
    if isinstance(value, Mapping):
        return {key: _told(item) for key, item in value.items() if item is not None}
    return [_told(item) for item in value] if isinstance(value, list) else value
