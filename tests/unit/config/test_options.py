"""Build options refuse what can't be carried out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needle_export.config.options import BuildOptions
from needle_export.errors import UsageError

OUT = Path("dist")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"checkpoint": ""}, "CHECKPOINT: the checkpoint's name is empty"),
    ({"target": "onxx"}, "--target: there is no 'onxx'; choose from onnx"),
    ({"weights": "int3"}, "--weights: there is no 'int3'; choose from fp32, fp16"),
    ({"opset": 22}, "--opset: there is no 22; choose from 21, 23, 24"),
    ({"layers": 1}, "--layers: 1 is below 2"),
    ({"context": 0}, "--context: 0 is below 1"),
    ({"threads": 0}, "--threads: 0 is below 1"),
    ({"seed": -1}, "--seed: -1 isn't between"),
    ({"seed": 2**32}, "--seed: 4294967296 isn't between"),
    ({"keep_confidence": True}, "--keep-confidence: there is no adapter"),
])
def test_impossible_choices_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        BuildOptions(**{"checkpoint": "x", "out": OUT, **change})
    assert str(caught.value).startswith(sentence)


def test_possible_choices_are_taken() -> None:
    BuildOptions("x", OUT, layers=2, lora="l", keep_confidence=True, context=1, seed=2**32 - 1, opset=21)


def test_the_recipe_is_what_decides_the_bytes() -> None:
    recipe = BuildOptions("x", OUT, threads=2, bench=False).recipe()
    assert recipe == BuildOptions("y", Path("other"), threads=1).recipe()
    assert recipe == json.loads(json.dumps(recipe))
    for change in ({"layers": 3}, {"context": 7}, {"weights": "fp16"}, {"opset": 21}, {"seed": 1}):
        assert BuildOptions("x", OUT, **change).recipe() != recipe
