"""Runs saved Core ML packages without Core ML: op by op in PyTorch, from the file as it lies on the disk.

It tells whether a program is right ("float32") and what becomes of it when every op rounds to the format that
it declares ("declared"). It isn't Core ML: it doesn't know in which order a device sums, in which format its
accumulators are, or which ops it refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from needle_export.targets.coreml.evaluate.package import Package, load_package
from needle_export.targets.coreml.evaluate.spec import FunctionInfo

if TYPE_CHECKING:
    from needle_export.targets.coreml.evaluate.evaluator import Evaluator, NumericFinding

__all__ = ["Evaluator", "FunctionInfo", "NumericFinding", "Package", "load_package"]


def __getattr__(name: str) -> Any:
    # Describing a package needs no torch, which the evaluator loads.
    if name in ("Evaluator", "NumericFinding"):
        from needle_export.targets.coreml.evaluate import evaluator

        return getattr(evaluator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
