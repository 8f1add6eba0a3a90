"""What must answer at once imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "onnx", "onnx_ir", "onnxruntime", "numpy", "rich", "huggingface_hub", "safetensors"}


@pytest.mark.parametrize("module", [
    "needle_export.cli", "needle_export.config.options", "needle_export.config.progress",
    "needle_export.report.schema", "needle_export.report.view", "needle_export.report.markdown",
    "needle_export.report.render", "needle_export.measure.ledger", "needle_export.bundle.publish"])
def test_these_modules_are_light(module: str) -> None:
    code = f"import {module}, sys; print(*({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "\n"
