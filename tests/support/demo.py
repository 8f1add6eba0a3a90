"""The small trained model that comes along, for tests of answers; this is the one place that knows where it lies."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest


def demo_files() -> dict[str, Path]:
    """Checkpoint, tokenizer, tools and held-out queries by the stems of their names; skips the test without them."""
    folder = None
    if find_spec("needle_export.demo") is not None:
        folder = Path(str(import_module("needle_export.demo").__file__)).parent / "model"
    names = ("needle-demo.safetensors", "tokenizer.model", "tools.json", "heldout.jsonl")
    if folder is None or not all((folder / name).is_file() for name in names):
        pytest.skip("the trained model isn't part of this checkout")
    return {Path(name).stem: folder / name for name in names}
