"""Targets by name; a target's runtime is imported when it is used, not before."""

from __future__ import annotations

from importlib import import_module

from needle_export.errors import UsageError
from needle_export.targets.base import Target

_TARGETS = {
    "onnx": ("needle_export.targets.onnx.target", "OnnxTarget"),
    "coreml": ("needle_export.targets.coreml.target", "CoremlTarget"),
    "tflite": ("needle_export.targets.tflite.target", "TfliteTarget"),
}


def find_target(name: str) -> Target:
    """The target of a name.

    Raises:
        UsageError: there is no such target.
    """
    if name not in _TARGETS:
        raise UsageError(f"there is no target {name!r}", fix=f"choose from {', '.join(_TARGETS)}")
    module, attribute = _TARGETS[name]
    target: Target = getattr(import_module(module), attribute)()
    return target
