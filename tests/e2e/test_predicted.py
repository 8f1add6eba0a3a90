"""Predicted sizes are those of what a build makes: to the byte for weights, within 1 % in all where it is published.

Artifacts are lowered and not verified, since their files are the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED, SMALL, Geometry
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.config.options import SCHEMES, TARGETS, BuildOptions
from needle_export.config.rules import Rule
from needle_export.measure.predict import Predicted, predict
from needle_export.measure.predict_work import predict_work
from needle_export.plan import imported
from tests.support.containers import TERNARY, container_bytes
from tests.support.geometries import VARIANTS
from tests.support.lowered import PROMPT, Lowered, lowered

MIX = {"weights": "cq2", "rules": (Rule("vocabulary", "cq4"), Rule("lanes", "cq4"))}
CONTENT = {"weights": "int4", "rules": (Rule("content", "int8"),)}
SCHEMES_OF = [(t, {"weights": weights}) for t in TARGETS for weights in SCHEMES[t] if weights != "codebook"]

#: Of a toy, most of whose files is graph.
TOY = 0.05

PUBLISHED_BUILDS: list[tuple[str, int, dict[str, Any]]] = [
    *[("onnx", 20, {"weights": weights}) for weights in ("fp32", "fp16", "int8", "int4", "int2", "codebook")],
    ("onnx", 20, MIX), ("onnx", 20, CONTENT), ("onnx", 8, {"weights": "int4", "cache": "int8", "context": 4096}),
    ("onnx", 8, {"weights": "fp16", "opset": 21}), ("onnx", 6, {"weights": "fp32", "opset": 23}),
    *[("tflite", 20, {"weights": weights}) for weights in ("fp32", "fp16", "int8", "int4")],
    ("tflite", 20, CONTENT), ("tflite", 8, {"weights": "int4", "heads": ("confidence",), "buckets": (32, 64, 128)}),
    ("tflite", 6, {"weights": "int4", "buckets": (64,), "context": 512}),
    *[("coreml", 20, {"weights": weights}) for weights in ("fp32", "fp16", "int8", "int4", "palette4", "codebook")],
    ("coreml", 20, {**MIX, "buckets": (64,)}), ("coreml", 20, MIX), ("coreml", 20, CONTENT),
    ("coreml", 8, {"weights": "int4", "context": 2048}), ("coreml", 6, {"weights": "int8", "os": "ios17"}),
]


def compared(checkpoint: Path, target: str, asked: dict[str, Any]) -> tuple[Predicted, Lowered]:
    options = BuildOptions(str(checkpoint), Path("out"), target=target, bench=False, **asked)
    read = read_checkpoint(checkpoint)
    read = read if options.layers is None else slice_ladder(read, options.layers)
    told = predict(options, read.geometry, imported(read.packed))
    made = lowered(options)
    assert told.state_bytes == made.state
    return told, made


def check(told: Predicted, made: Lowered, share: float) -> None:
    assert told.by_role == made.by_role
    assert abs(told.total_bytes - made.total) <= share * made.total, (told.total_bytes, made.total)


def sample(folder: Path, geometry: Geometry) -> Path:
    path = folder / "needle3.safetensors"
    write_sample(path, geometry, 0)
    return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("toy"), SMALL)


@pytest.mark.parametrize(("target", "asked"), [
    ("onnx", CONTENT), ("tflite", {"weights": "int8", "buckets": (8,), "heads": ("confidence",)}),
    ("coreml", {"weights": "int4", "buckets": (8,)}),
], ids=str)
def test_of_a_toy(target: str, asked: dict[str, Any], toy: Path) -> None:
    check(*compared(toy, target, {"context": 48, **asked}), TOY)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "asked"), SCHEMES_OF, ids=str)
def test_every_scheme_of_a_toy(target: str, asked: dict[str, Any], toy: Path) -> None:
    check(*compared(toy, target, {"context": 48, **asked}), TOY)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "weights"), [("onnx", "int4"), ("tflite", "int4"), ("coreml", "int4")])
@pytest.mark.parametrize("variant", ["no_taps", "no_engram", "odd_width", "orders", "lanes", "deep", "split"])
def test_weights_of_other_geometries(variant: str, target: str, weights: str, tmp_path: Path) -> None:
    """Their graphs aren't what the facts were measured on, so that only weights are exact."""
    told, made = compared(sample(tmp_path, VARIANTS[variant]), target, {"weights": weights, "context": 48})
    assert told.by_role == made.by_role


@pytest.mark.parametrize("target", ["onnx", "coreml"])
def test_codes_of_several_widths(target: str, tmp_path: Path) -> None:
    """Three bits take four in ONNX, and three levels take two; widths that differ aren't one product."""
    widths = {"q_proj": TERNARY, "k_proj": 3, "v_proj": 1, "gate_proj": 2, "key_proj": 2, "value_proj": 3}
    path = tmp_path / "mixed.cact"
    path.write_bytes(container_bytes(SMALL, make_sample(SMALL, 1), group=8, bits=lambda slot: widths.get(
        slot.tensor.rpartition("/")[0].rpartition("/")[2], 4)))
    told, made = compared(path, target, {"weights": "codebook", "context": 48})
    assert told.by_role == made.by_role


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    return {"floats": sample(folder, PUBLISHED), "codes": container(folder)}


def container(folder: Path) -> Path:
    """A 4-bit container of the published geometry."""
    path = folder / "needle3.cact"
    path.write_bytes(container_bytes(PUBLISHED, make_sample(PUBLISHED, 0)))
    return path


@pytest.mark.slow
@pytest.mark.published
@pytest.mark.parametrize(("target", "layers", "asked"), PUBLISHED_BUILDS, ids=str)
def test_within_one_percent(target: str, layers: int, asked: dict[str, Any], published: dict[str, Path]) -> None:
    kind = "codes" if asked["weights"] == "codebook" else "floats"
    told, made = compared(published[kind], target, {"layers": layers, **asked})
    assert abs(told.total_bytes - made.total) <= 0.01 * made.total, (told.total_bytes, made.total)
    # Of 20 random gates two may be the same number, which lies in the file once.
    assert all(abs(told.by_role.get(role, 0) - size) <= 16 for role, size in made.by_role.items())


#: Kinds of weights that no scheme makes integers of.
FLOATS = ("factor", "taps", "heads", "scale", "diagonal", "gate", "bias", "vector")

#: Of a 4-bit build's files, and the targets whose builds are held to it.
MOST, HELD = 0.01, ("onnx", "tflite")


def floats(told: Predicted) -> int:
    return sum(size for tensor, size in told.weights if tensor.kind in FLOATS)


@pytest.mark.parametrize("target", HELD)
def test_what_stays_float_is_little_of_a_4_bit_build(target: str) -> None:
    told = predict(BuildOptions("needle3.safetensors", Path("out"), target=target, weights="int4"), PUBLISHED)
    assert 0 < floats(told) < MOST * told.total_bytes


@pytest.mark.slow
@pytest.mark.published
@pytest.mark.parametrize("target", HELD)
def test_so_it_is_in_the_build(target: str, published: dict[str, Path]) -> None:
    told, made = compared(published["floats"], target, {"weights": "int4"})
    assert 0 < made.kept < MOST * made.total
    # Numbers that no tensor of the checkpoint holds, as frequencies, are kept and not predicted.
    assert floats(told) <= made.kept <= floats(told) + 8192


def close(told: int, made: int, share: float) -> bool:
    return abs(told - made) <= share * made


@pytest.mark.parametrize(("target", "asked"), [
    ("onnx", {"weights": "int4"}), ("tflite", {"weights": "int4", "buckets": (64,)}),
    ("coreml", {"weights": "fp16", "buckets": (64,)}),
], ids=str)
def test_work_is_what_the_finished_artifact_tells(target: str, asked: dict[str, Any], tmp_path: Path) -> None:
    """Of the published widths with small tables: what a step and a prompt read, multiply and call."""
    geometry = dataclasses.replace(PUBLISHED, num_layers=3, engram_layers=(1,), global_layers=(2,), vocab_size=512,
                                   engram_slots=512)
    options = BuildOptions(str(sample(tmp_path, geometry)), Path("out"), target=target, **asked)
    made = lowered(options).work
    told = predict_work(options, geometry, predict(options, geometry), made.position, (PROMPT,))
    pairs = [(told.decode, made.decode), (told.prompts[0].calls[0], made.prompts[0].calls[0])]
    for ours, theirs in pairs:
        assert (ours.tokens, ours.rows) == (theirs.tokens, theirs.rows)
        assert close(ours.weight_bytes, theirs.weight_bytes, 0.05)
        assert close(ours.macs, theirs.macs, 0.05)
        assert close(ours.count, theirs.count, 0.05)
        assert close(ours.state_bytes, theirs.state_bytes, 0.05)
