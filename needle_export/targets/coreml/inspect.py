"""What ``needle-export inspect`` tells of a Core ML package, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from needle_export.targets.coreml.evaluate.package import load_package


def describe_package(path: Path | str) -> dict[str, Any]:
    """What a package holds, ready for JSON; no weight is read for it, and nobody need be able to run it.

    Raises:
        BadInput: a part of the package is missing, damaged or cut short.
        Unsupported: it isn't an ML program, or is written with what :class:`SpecReader` doesn't know.
    """
    return load_package(path, evaluable=False).describe()
