"""ONNX artifacts with caches of float16 and int8: rounded as the reference rounds, whatever the geometry and opset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.compile import Compiler
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import VerificationFailed
from needle_export.measure import parity
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.weights.caches import quantize_rows
from tests.support.geometries import VARIANTS
from tests.support.programs import compile_onnx, sample_checkpoint, tokens

CONTEXT = 60
KINDS = {"fp16": np.float16, "int8": np.int8}
QUIET = NullProgress()


class Made:
    """An artifact, its reference, and the cases that they are compared by."""

    def __init__(self, folder: Path, geometry: Any, cache: str, opset: int = 24) -> None:
        self.folder = folder / "out"
        self.folder.mkdir()
        self.compiler, compiled = compile_onnx(
            sample_checkpoint(folder, geometry), self.folder, CONTEXT, opset=opset, cache=cache
        )
        self.compiler.use_stored_weights(compiled.weights, None, cache=cache)
        self.cases = self.compiler.reference(0)

    def deviation(self, cases: list[parity.Case] | None = None) -> parity.Measured:
        return parity.compare(OnnxRunner(self.folder), cases or self.cases, None, lambda _: None)

    def tolerance(self) -> parity.Tolerance:
        return parity.tolerance_of("fp32", self.compiler.sensitivity, False, self.compiler.scheme.cache)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"), SMALL, request.param)


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize(("name", "opset"), [("small", 23), ("small", 21), ("no_taps", 24)])
def test_artifact_equals_reference(cache: str, name: str, opset: int, tmp_path: Path) -> None:
    made = Made(tmp_path, VARIANTS[name], cache, opset)
    measured = made.deviation()
    assert parity.judge(measured, made.tolerance()) is None
    # The artifact falls to other levels here and there, which is a small part of what the levels do.
    loss = made.compiler.cache_loss
    assert loss is not None and made.compiler.scheme_loss is None
    assert measured.kl / measured.positions < 0.1 * loss["kl"] and measured.max_abs < 0.5 * loss["max_abs"]


def test_the_default_opset_too_and_the_float_reference_is_told_apart(made: Made) -> None:
    measured = made.deviation()
    assert parity.judge(measured, made.tolerance()) is None and measured.steps == measured.argmax_equal
    rounded, made.compiler.net.stored = made.compiler.net.stored, None
    try:
        plain = [parity.Case(c.tokens, c.prompt, made.compiler.net(torch.from_numpy(c.tokens)[None])[0].numpy(), c.best)
                 for c in made.cases]
    finally:
        made.compiler.net.stored = rounded
    assert made.deviation(plain).kl > 10 * measured.kl


@pytest.mark.parametrize("lengths", [[16, 16, 16, 12], [1] * 60, [2, 1, 3, 1, 16, 1, 1, 15, 7, 13]])
def test_rows_are_read_as_they_are_stored_however_a_prompt_is_cut(lengths: list[int], made: Made) -> None:
    """Rings wrap in here. A new row that was read before it is rounded would move logits by the loss."""
    ids = tokens(SMALL, CONTEXT)
    with torch.inference_mode():
        expected = made.compiler.net(torch.from_numpy(ids).unsqueeze(0))[0].numpy()
    runner, parts, start = OnnxRunner(made.folder), [], 0
    for length in lengths:
        parts.append(runner.feed(ids[start : start + length]))
        start += length
    loss = made.compiler.cache_loss
    assert loss is not None
    got = np.concatenate(parts)
    assert float(parity.kl(expected, got).mean()) < 0.1 * loss["kl"]
    # As stored: the float rows that the reference wrote, rounded, are the artifact's up to a level.
    wanted, have = made.compiler._run(ids)[1], runner.state()
    assert set(have) == set(wanted)
    for name in (n for n in wanted if n.startswith(("k_", "v_"))):
        steps = np.abs(have[name] - wanted[name]) / (np.abs(wanted[name]).max(-1, keepdims=True) / 127)
        assert steps.max() < 1.6 and (steps > 0.01).mean() < 0.05, name


def test_the_contract_says_what_is_bound(made: Made) -> None:
    cache = made.compiler.scheme.cache
    model = onnx.load(made.folder / "decode.onnx", load_external_data=False)
    layout = json.loads({p.key: p.value for p in model.metadata_props}["needle.state"])
    assert [s["name"] for s in layout] == [s.name for s in made.compiler.stored]
    assert [i.name for i in model.graph.input] == ["tokens", "position", *(s["name"] for s in layout)]
    assert [o.name for o in model.graph.output] == ["logits", *(f"{s['name']}_next" for s in layout)]
    kinds = {v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input}
    bound = OnnxRunner(made.folder).caches
    for spec in (s for s in layout if s["cache"]):
        kind = np.float32 if spec["name"].endswith("_scale") else KINDS[cache]
        assert kinds[spec["name"]] == np.dtype(spec["dtype"]) == bound[spec["name"]].dtype == kind
        assert spec["shape"][-1] == 1 if spec["name"].endswith("_scale") else spec["shape"][-1] > 1
    assert sum(s["name"].endswith("_scale") for s in layout) == (2 * SMALL.num_layers if cache == "int8" else 0)
    held = sum(array.nbytes for array in bound.values())
    total, parts = made.compiler.state_bytes()
    assert parts["keys"] + parts["values"] == held < total


def test_numbers_in_the_cache_are_those_of_the_rows(made: Made) -> None:
    """Written in place, one row a step, and a level is its row's own."""
    runner, ids = OnnxRunner(made.folder), tokens(SMALL, 24)
    runner.feed(ids[:20])
    before = {name: array.copy() for name, array in runner.caches.items()}
    runner.feed(ids[20:21])
    for spec in (s for s in runner.layout if s["cache"]):
        changed = np.nonzero((before[spec["name"]] != runner.caches[spec["name"]]).any(axis=(1, 2)))[0]
        assert list(changed) == [20 % spec["rows"]]
    for name, rows in runner.state().items():
        if name.startswith(("k_", "v_")):
            used = len(rows)
            if made.compiler.scheme.cache == "fp16":
                assert np.array_equal(rows.astype(np.float16), runner.caches[name][:used])
                continue
            levels, scales = quantize_rows(torch.from_numpy(rows))
            assert np.array_equal(levels.numpy(), runner.caches[name][:used])
            np.testing.assert_allclose(scales.numpy(), runner.caches[f"{name}_scale"][:used], rtol=3e-7)


def test_a_build_tells_the_loss_of_its_caches_and_verify_repeats_it(tmp_path: Path) -> None:
    path, out = tmp_path / "s.safetensors", tmp_path / "dist"
    write_sample(path, SMALL, 0)
    options: dict[str, Any] = {"context": CONTEXT, "bench": False}
    report = pipeline.build(BuildOptions(str(path), out, weights="int8", cache="int8", **options), QUIET)
    (artifact,) = report.artifacts
    table = artifact.parity
    assert report.options["cache"] == table["scheme"]["cache"] == "int8"
    assert 0 < table["cache_loss"]["kl"] < table["scheme_loss"]["kl"] and table["sensitivity"]["logits"] > 0
    assert "inputs of products" in table["tolerance"]["reason"] and "rows of caches" in table["tolerance"]["reason"]
    floats = pipeline.build(BuildOptions(str(path), tmp_path / "floats", weights="int8", **options), QUIET)
    alone = floats.artifacts[0]
    assert floats.options["cache"] == "fp32" and alone.parity["cache_loss"] is None
    # The weights' loss is the same number, whatever the caches are.
    assert alone.parity["scheme_loss"] == table["scheme_loss"]
    small, large = artifact.state_bytes.by_part, alone.state_bytes.by_part
    assert small["keys"] * 4 * SMALL.qk_head_dim == large["keys"] * (SMALL.qk_head_dim + 4)
    assert {p for p in small if small[p] != large[p]} == {"keys", "values"}
    assert pipeline.verify(out, checkpoint=None, progress=QUIET) == report
    assert pipeline.verify(out, checkpoint=str(path), progress=QUIET) == report


def test_verification_fails_where_the_artifact_rounds_otherwise(tmp_path: Path, monkeypatch: Any) -> None:
    """Steps of max / 16 instead of max / 127 are seen."""
    path = tmp_path / "s.safetensors"
    write_sample(path, SMALL, 0)
    from needle_export.targets.onnx.builder import Builder

    usual = Builder.constant

    def coarse(self: Builder, array: Any, dtype: Any = None) -> Any:
        return usual(self, 16.0 if isinstance(array, float) and array == 127.0 else array, dtype)

    monkeypatch.setattr(Builder, "constant", coarse)
    with pytest.raises(VerificationFailed, match="differ"):
        pipeline.build(BuildOptions(str(path), tmp_path / "dist", context=CONTEXT, cache="int8", bench=False), QUIET)
    assert not (tmp_path / "dist").exists()


def test_a_compiler_without_rounded_caches_stays_as_it_was(tmp_path: Path) -> None:
    compiler = Compiler(sample_checkpoint(tmp_path, SMALL), CONTEXT, QUIET)
    compiler.use_caches("fp32")
    assert compiler.stored == compiler.states and compiler.net.stored is None
