"""Build options refuse what can't be carried out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needle_export.config.options import OPSETS, SCHEMES, TARGETS, WEIGHTS, BuildOptions
from needle_export.config.rules import Rule
from needle_export.errors import UsageError

OUT = Path("dist")
TFLITE = {"target": "tflite"}


@pytest.mark.parametrize(("change", "sentence"), [
    ({"checkpoint": ""}, "CHECKPOINT: the checkpoint's name is empty"),
    ({"target": "onxx"}, "--target: there is no 'onxx'; choose from onnx"),
    ({"target": "core-ml"}, "--target: there is no 'core-ml'; choose from onnx, tflite, coreml"),
    ({"os": "ios18"}, "--os: the onnx target isn't made for an operating system"),
    ({"os": "ios16", "target": "coreml"}, "--os: there is no 'ios16'; choose from ios17, ios18, ios26"),
    ({"os": "ios17", "target": "coreml", "weights": "int4"}, "--weights: int4 needs iOS 18; choose from fp32, fp16"),
    ({"opset": 24, "target": "coreml"}, "--opset: the coreml target has no opset; leave it out"),
    ({"heads": ("confidence",), "target": "coreml"}, "--heads: probe heads aren't part of a Core ML package"),
    ({"weights": "int3"}, "--weights: there is no 'int3'; choose from fp32, fp16, int8"),
    ({"weights": "palette4"}, "--weights: the onnx target has no palette4: no kernel reads a table of levels; choose"
     " from fp32, fp16, int8, int4, int2, cq4, cq2, codebook, or another --target"),
    ({"weights": "int8", "opset": 21}, "--opset: int8 needs ONNX Runtime's own ops; leave it out, or choose --weights"
     " fp32 or fp16; opset 24 has them"),
    ({"opset": 22}, "--opset: there is no 22; choose from 21, 23, 24"),
    ({"opset": 24, **TFLITE}, "--opset: the tflite target has no opset; leave it out"),
    ({"buckets": (8,)}, "--buckets: prefill is of variable length in ONNX; leave it out"),
    ({"heads": ("confidence",)}, "--heads: probe heads aren't part of an ONNX artifact"),
    ({"buckets": (8, 1), **TFLITE}, "--buckets: 1 is below 2"),
    ({"buckets": (64, 49), "context": 48, **TFLITE}, "--buckets: 64 tokens don't fit in the context of 48"),
    ({"layers": 1}, "--layers: 1 is below 2"),
    ({"context": 0}, "--context: 0 is below 1"),
    ({"threads": 0}, "--threads: 0 is below 1"),
    ({"seed": -1}, "--seed: -1 isn't between"),
    ({"seed": 2**32}, "--seed: 4294967296 isn't between"),
    ({"keep_confidence": True}, "--keep-confidence: there is no adapter"),
    ({"rounding": "best"}, "--rounding: there is no 'best'; choose from nearest, search, calibrated"),
    ({"rounding": "calibrated", "weights": "int4"}, "--rounding: there are no prompts to calibrate with; give"
     " --calibrate FILE"),
    ({"rounding": "search", "calibrate": "p", "weights": "int4"}, "--calibrate: search rounding looks at no prompts"),
    ({"rounding": "nearest", "calibrate": "p", "weights": "int4"}, "--calibrate: nearest rounding looks at no prompts"),
    ({"rounding": "search"}, "--rounding: fp32 has no blocks of integers to round in onnx; leave it out, or choose"),
    ({"rounding": "search", "weights": "int8", "target": "tflite"},
     "--rounding: int8 has no blocks of integers to round in tflite; leave it out, or choose one of int4"),
    ({"calibrate": "p", "weights": "codebook"}, "--rounding: codebook has no blocks of integers to round"),
])
def test_impossible_choices_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        BuildOptions(**{"checkpoint": "x", "out": OUT, **change})
    assert str(caught.value).startswith(sentence)


def test_possible_choices_are_taken() -> None:
    BuildOptions("x", OUT, layers=2, lora="l", keep_confidence=True, context=1, seed=2**32 - 1, opset=21)
    BuildOptions("x", OUT, "tflite", context=64, weights="int8", buckets=(2, 64), heads=("confidence",))


def test_prompts_mean_calibrated_rounding_and_nothing_means_nearest() -> None:
    assert BuildOptions("x", OUT).rounding == "nearest"
    assert BuildOptions("x", OUT, weights="int4", calibrate="p").rounding == "calibrated"
    mixed = BuildOptions("x", OUT, rules=(Rule("content", "int8"),), rounding="search")
    assert mixed.rounding == "search" and mixed.recipe()["rounding"] == "search"


def test_the_newest_opset_is_meant_where_none_is_given() -> None:
    newest = BuildOptions("x", OUT, opset=OPSETS[-1])
    assert BuildOptions("x", OUT) == newest and newest.recipe()["opset"] == 24
    assert BuildOptions("x", OUT, "tflite").opset is None


def test_buckets_are_sorted_and_each_is_there_once() -> None:
    assert BuildOptions("x", OUT, "tflite", buckets=(64, 8, 64)).buckets == (8, 64)
    assert BuildOptions("x", OUT, "tflite").buckets is None
    assert BuildOptions("x", OUT, "tflite", buckets=()).buckets == ()


def test_every_target_has_schemes_that_weights_names() -> None:
    assert set(SCHEMES) == set(TARGETS) and {s for known in SCHEMES.values() for s in known} == set(WEIGHTS)
    for target, schemes in SCHEMES.items():
        for scheme in schemes:
            assert BuildOptions("x", OUT, target, weights=scheme).weights == scheme


def test_a_core_ml_host_without_states_keeps_what_the_package_computes_in() -> None:
    old: dict[str, Any] = {"target": "coreml", "os": "ios17"}
    assert BuildOptions("x", OUT, **old).cache == BuildOptions("x", OUT, **old, cache="fp32").cache == "fp32"
    assert BuildOptions("x", OUT, **old, weights="fp16").cache == "fp16"
    with pytest.raises(UsageError, match="ios17 package of fp32 computes in float32"):
        BuildOptions("x", OUT, **old, cache="fp16")
    with pytest.raises(UsageError, match="states are half precision"):
        BuildOptions("x", OUT, **old, weights="fp16", cache="fp32")
    with pytest.raises(UsageError, match="no 'int4'"):
        BuildOptions("x", OUT, cache="int4")


def test_the_recipe_is_what_decides_the_bytes() -> None:
    recipe = BuildOptions("x", OUT, threads=2, bench=False).recipe()
    assert recipe == BuildOptions("y", Path("other"), threads=1).recipe()
    assert recipe == json.loads(json.dumps(recipe))
    changes = ({"layers": 3}, {"context": 7}, {"weights": "fp16"}, {"opset": 21}, {"seed": 1}, {"cache": "int8"})
    for change in (TFLITE, *changes):
        assert BuildOptions("x", OUT, **change).recipe() != recipe
    recipe = BuildOptions("x", OUT, **TFLITE).recipe()
    assert recipe == json.loads(json.dumps(recipe))
    for change in ({"buckets": (8,)}, {"buckets": (8, 16)}, {"heads": ("confidence",)}, {"weights": "int8"}):
        changed = BuildOptions("x", OUT, **TFLITE, **change).recipe()
        assert changed != recipe and changed == json.loads(json.dumps(changed))


@pytest.mark.parametrize(("tolerances", "said"), [
    ((("logit", 1e-5),), "there is no 'logit'"),
    ((("logits", 0.0),), "0 is no bound for logits"),
    ((("logits", float("inf")),), "inf is no bound for logits"),
    ((("logits", 1e-5), ("logits", 1e-6)), "a bound is there twice"),
])
def test_bounds_that_cannot_be(tolerances: tuple[tuple[str, float], ...], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        BuildOptions("x", OUT, tolerances=tolerances)
    assert caught.value.where == "--tolerances"


def test_bounds_are_in_the_report_in_one_order() -> None:
    made = BuildOptions("x", OUT, tolerances=(("state", 1e-5), ("logits", 1e-6)))
    assert made.recipe()["tolerances"] == {"logits": 1e-6, "state": 1e-5}
    assert made == BuildOptions("x", OUT, tolerances=(("logits", 1e-6), ("state", 1e-5)))
