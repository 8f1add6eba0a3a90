"""The demo model that ships: small enough, made from these templates, as good as its card says."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from needle_export import demo
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.text import load_tokenizer
from needle_export.config.progress import NullProgress
from needle_export.demo.geometry import DEMO
from needle_export.demo.make import demo_tools, heldout_requests, measure
from needle_export.demo.queries import Example

SEED = 7


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def heldout() -> list[Example]:
    lines = demo.files().heldout.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [Example(e["query"], tuple(e["answers"])) for e in found]


def test_it_is_small_and_of_the_format() -> None:
    files = demo.files()
    assert files.checkpoint.stat().st_size <= 6_000_000
    read = read_checkpoint(files.checkpoint)
    assert read.geometry == DEMO
    assert DEMO.vocab_size <= 1024 and (DEMO.num_layers, DEMO.d_model) == (6, 256)
    assert (DEMO.num_heads, DEMO.num_kv_heads, DEMO.qk_head_dim, DEMO.v_head_dim) == (4, 2, 48, 64)
    head = read.tensors["confidence_head/proj/kernel"]
    assert head.dtype == "float16" and abs(head).max() > 0.1


def test_the_heldout_requests_are_those_that_the_templates_make() -> None:
    assert heldout() == heldout_requests(SEED, len(heldout()))
    assert len(heldout()) == 1000


@pytest.mark.usefixtures("two_threads")
def test_it_answers_as_its_card_says() -> None:
    pieces = load_tokenizer(demo.files().tokenizer)
    accuracy, kinds = measure(demo.files().checkpoint, heldout(), demo_tools(), pieces, NullProgress(), (3, 6))
    assert accuracy[6] >= 0.9
    card = demo.files().card.read_text(encoding="utf-8")
    for depth, share in accuracy.items():
        line = next(line for line in card.splitlines() if line.startswith(f"| {depth} |"))
        # Another CPU may round one of a thousand answers the other way.
        assert abs(float(line.split("|")[2].strip().removesuffix(" %")) - 100 * share) <= 0.31
    assert sum(count for _, count in kinds.values()) == 1000
    assert all(right / count > 0.75 for right, count in kinds.values())
