"""The loops on docs/tflite.md are run as they stand there."""

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
from needle_export.report.schema import load_report
from needle_export.targets.tflite import contract
from needle_export.targets.tflite.legacy import FOLDER, VARIABLE, VERSION
from needle_export.targets.tflite.session import TAIL_SHARE

pytest.importorskip("ai_edge_litert")
pytest.importorskip("litert_converter")

PAGE = Path(__file__).parents[2] / "docs" / "tflite.md"
TEXT = PAGE.read_text(encoding="utf-8")
CONTEXT = 60


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tflite_loop")
    write_sample(folder / "s.safetensors", SMALL, 0)
    out = folder / "dist"
    options = BuildOptions(
        str(folder / "s.safetensors"), out, target="tflite", context=CONTEXT, buckets=(8, 16), bench=False
    )
    pipeline.build(options, NullProgress())
    return out


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace


def test_both_loops_give_the_same_logits(dist: Path, page: dict[str, Any]) -> None:
    tokens = np.random.default_rng(5).integers(1, SMALL.head_vocab, CONTEXT)
    plain, loop = page["Needle"](dist), page["open_loop"](dist)
    # Full and padded buckets, tails by single tokens, until the rings have wrapped.
    pieces = (21, 1, 1, 3, 16, *[1] * 18)
    assert sum(pieces) == CONTEXT and SMALL.sliding_window < CONTEXT - 18
    for _ in range(2):
        start = 0
        for count in pieces:
            piece = tokens[start : start + count]
            np.testing.assert_array_equal(plain.feed(piece), loop.feed(piece))
            start += count
        with pytest.raises(AssertionError, match="context is full"):
            plain.feed([1])
        plain.reset()
        loop.reset()


def test_generate(dist: Path, page: dict[str, Any]) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    answers = [page["generate"](page[name](dist), prompt, 6) for name in ("Needle", "open_loop")]
    logits = page["open_loop"](dist).feed(np.array([*prompt, *answers[0][:-1]]))
    assert answers[0] == answers[1] == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_plain_contract_is_the_one_in_the_file(dist: Path, page: dict[str, Any]) -> None:
    found = page["contract_of"](dist / contract.FILE_NAME)
    assert found["buckets"] == [8, 16] and found["context"] == CONTEXT
    section = TEXT.split("\n## The contract in the file\n")[1].split("\n## ")[0]
    said = set(re.findall(r"`([a-z_.0-9]+)`", section))
    assert {*found, *found["state"][0]} <= said
    (artifact,) = load_report(dist).artifacts
    assert [file.name for file in artifact.files] == ["model.tflite"]


def test_names_and_numbers_of_the_page() -> None:
    assert f"len(tokens) * {TAIL_SHARE} <= bucket" in TEXT
    assert f"`{VARIABLE}`" in TEXT and f"`{FOLDER}`" in TEXT
    assert f"tflite-runtime {VERSION}" in TEXT
