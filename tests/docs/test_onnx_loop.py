"""The loop on docs/onnx.md is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.targets.onnx.session import OnnxRunner

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
CONTEXT = 96


@pytest.fixture(scope="module", params=["fp32", "int8"])
def dist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx_loop")
    write_sample(folder / "s.safetensors", SMALL, 0)
    out = folder / "dist"
    options = BuildOptions(str(folder / "s.safetensors"), out, context=CONTEXT, cache=request.param, bench=False)
    pipeline.build(options, NullProgress())
    return out


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace


def test_loop_gives_the_runners_logits(dist: Path, page: dict[str, Any]) -> None:
    tokens = np.random.default_rng(5).integers(1, SMALL.head_vocab, CONTEXT)
    model, runner = page["Needle"](dist), OnnxRunner(dist)
    assert model.max_chunk < 40, "the prompt should take several chunks and wrap the rings"
    for start, end in ((0, 41), (41, 42), (42, 43), (43, 60), *((i, i + 1) for i in range(60, CONTEXT))):
        np.testing.assert_array_equal(model.feed(tokens[start:end]), runner.feed(tokens[start:end]))
    with pytest.raises(AssertionError, match="context is full"):
        model.feed([1])


def test_generate(dist: Path, page: dict[str, Any]) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    answer = page["generate"](page["Needle"](dist), prompt, 6)
    runner = OnnxRunner(dist)
    logits = runner.feed(np.array([*prompt, *answer[:-1]]))
    assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_separate_cache_buffers_and_the_whole_cache_give_the_same(dist: Path, page: dict[str, Any]) -> None:
    """What the page says about binding: a prefix or all rows, one buffer or two."""
    tokens = np.random.default_rng(6).integers(1, SMALL.head_vocab, 50)
    model = page["Needle"](dist)
    plain = page["Needle"](dist)
    for index in range(0, 50, 10):
        chunk = tokens[index : index + 10]
        feeds = {"tokens": chunk, "position": np.array([plain.position])}
        feeds |= {name: buffers[0] for name, buffers in plain.state.items()}
        names = [o.name for o in plain.prefill.get_outputs()]
        results = dict(zip(names, plain.prefill.run(names, feeds), strict=True))
        plain.state = {name: [results[f"{name}_next"]] for name in plain.state}
        plain.position += len(chunk)
        np.testing.assert_allclose(results["logits"], model.feed(chunk), atol=1e-5)


def test_tables_name_every_input_and_metadata_key(dist: Path, page: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    session = page["Needle"](dist).decode
    for name in (i.name for i in session.get_inputs()):
        assert f"`{re.sub(r'_[0-9]{2}(?=_scale$|$)', '_00', name)}`" in text, name
    for key in session.get_modelmeta().custom_metadata_map:
        assert f"`{key}`" in text, key
