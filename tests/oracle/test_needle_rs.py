"""needle-rs, an independent implementation in Rust, as a second oracle.

It reads containers and computes in float32 on the codebook weights, the rotation moved to the
activations. Its prompt is the package's ``render_example`` behind BOS.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import needle_rs
import numpy as np
import pytest
import torch
from needle.model.export import write_export
from needle.model.finetune import render_example
from needle.model.tokenizer import BOS_ID, CHAT_MARKERS, EOS_ID, IM_END_ID, PAD_ID, UNK_ID, SANTokenizer

from needle_export.checkpoint.checkpoint import Checkpoint, read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.sample import make_sample
from needle_export.checkpoint.tokenizer import parse_tokenizer
from needle_export.model.network import Needle
from needle_export.model.state import empty_state, state_specs
from tests.support import models, oracle
from tests.support.tokenizers import WORDS, tools_json, train_tokenizer

#: Deep enough for rungs, two engram sites, two groups of codebook rows, a window shorter than any prompt.
GEOMETRY = models.changed(
    SMALL, vocab_size=768, d_model=160, num_layers=6, engram_layers=(1, 4), global_layers=(2, 5), max_seq_len=1024)
PROMPTS = 50
#: Rounding differs by a few 1e-6; where the two best logits are this far apart, it can't change which is best.
GAP = 1e-4


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request, as the command of an assistant puts it."""

    query: str
    tools: str
    system: str | None = None

    def ids(self, tokenizer: SANTokenizer, completion: str = "") -> list[int]:
        text, _ = render_example({"query": self.query, "tools": self.tools, "system": self.system})
        return [BOS_ID, *tokenizer.encode(text + completion)]


@dataclasses.dataclass(frozen=True)
class Both:
    """One container, opened by both."""

    path: Path
    tokenizer: SANTokenizer
    checkpoint: Checkpoint
    net: Needle
    engine: needle_rs.V3Engine


def prompts_for(count: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [Prompt(" ".join(rng.choices(WORDS, k=rng.randint(2, 14))), tools_json(rng)) for _ in range(count)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("needle_rs")
    tokenizer, path = train_tokenizer(folder), folder / "needle3.cact"
    tensors = make_sample(GEOMETRY, 0)
    write_export(oracle.to_tree(tensors), oracle.oracle_config(GEOMETRY), path, tokenizer=tokenizer,
                 kv_window=GEOMETRY.kv_window)
    checkpoint = read_checkpoint(path)
    net = Needle(checkpoint.geometry, checkpoint.tensors, checkpoint.permutations)
    with torch.no_grad(), models.one_thread():
        yield Both(path, tokenizer, checkpoint, net, needle_rs.V3Engine.load(str(path)))


def their_next(engine: needle_rs.V3Engine, prompt: Prompt, length: int) -> int:
    """The token that needle-rs puts after a prompt of ``length`` ids."""
    found = engine.generate(prompt.query, prompt.tools, max_new_tokens=1, temperature=0.0, system=prompt.system)
    if not found["token_ids"]:
        # It keeps the tokens that end an answer to itself, and says that there was one.
        return {"Eos": EOS_ID, "ImEnd": IM_END_ID}[found["stop_reason"]]
    assert found["stop_reason"] == "MaxTokens" and found["positions"] == length + 1
    return int(found["token_ids"][0])


def cached(net: Needle, ids: list[int]) -> torch.Tensor:
    """Logits [V] after the last id, by prefill in chunks of the window and single steps."""
    context = 512
    state, position = empty_state(state_specs(net.geometry, context)), 0
    logits = torch.empty(0)
    whole = len(ids) // 16
    for size in (*itertools.repeat(16, whole), *itertools.repeat(1, len(ids) - 16 * whole)):
        chunk = torch.tensor(ids[position:position + size])
        logits, state = net.step(chunk, torch.tensor([position]), state, context)
        position += size
    assert position == len(ids)
    return logits[-1]


def clear_winner(logits: torch.Tensor) -> int:
    best = logits.topk(2)
    assert best.values[0] - best.values[1] > GAP
    return int(best.indices[0])


def test_the_next_token_after_fifty_prompts(both: Both) -> None:
    prompts = prompts_for(PROMPTS, seed=1)
    assert len(set(prompts)) == PROMPTS
    theirs, ours, stepped = [], [], []
    for prompt in prompts:
        ids = prompt.ids(both.tokenizer)
        assert len(ids) > 2 * GEOMETRY.sliding_window
        theirs.append(their_next(both.engine, prompt, len(ids)))
        ours.append(clear_winner(both.net(torch.tensor([ids]))[0, -1]))
        stepped.append(clear_winner(cached(both.net, ids)))
    assert ours == theirs
    assert stepped == theirs
    assert len(set(theirs)) >= 15


def test_with_a_system_prompt(both: Both) -> None:
    for prompt in prompts_for(5, seed=2):
        told = dataclasses.replace(prompt, system="answer in one word")
        ids = told.ids(both.tokenizer)
        assert len(ids) > len(prompt.ids(both.tokenizer))
        assert clear_winner(both.net(torch.tensor([ids]))[0, -1]) == their_next(both.engine, told, len(ids))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_rungs(depth: int, both: Both) -> None:
    rung = slice_ladder(both.checkpoint, depth)
    net = Needle(rung.geometry, rung.tensors, rung.permutations)
    engine = needle_rs.V3Engine.load_with_depth(str(both.path), depth)
    assert engine.num_layers == depth
    theirs, ours, whole = [], [], []
    for prompt in prompts_for(12, seed=5):
        ids = prompt.ids(both.tokenizer)
        theirs.append(their_next(engine, prompt, len(ids)))
        ours.append(clear_winner(net(torch.tensor([ids]))[0, -1]))
        whole.append(int(both.net(torch.tensor([ids]))[0, -1].argmax()))
    assert ours == theirs != whole
    assert len(set(theirs)) >= 5


def test_confidence(both: Both) -> None:
    assert both.engine.has_confidence()
    found = []
    for prompt in prompts_for(12, seed=4):
        completion = "<tool_call>[]</tool_call>"
        theirs = both.engine.confidence_for(prompt.query, prompt.tools, completion)
        logit = both.net.head("confidence", torch.tensor(prompt.ids(both.tokenizer, completion)))
        assert abs(theirs - 1 / (1 + math.exp(-float(logit)))) <= 1e-5
        found.append(theirs)
    assert np.ptp(found) > 0.01


def test_the_tokenizer_in_the_container(both: Both) -> None:
    assert both.checkpoint.tokenizer is not None
    table, sp = parse_tokenizer(both.checkpoint.tokenizer), both.tokenizer.sp
    assert list(table.pieces) == [sp.IdToPiece(index) for index in range(sp.GetPieceSize())]
    assert (table.pad_id, table.eos_id, table.bos_id, table.unk_id) == (PAD_ID, EOS_ID, BOS_ID, UNK_ID)
    assert [table.pieces.index(marker) for marker in CHAT_MARKERS] == list(range(4, 4 + len(CHAT_MARKERS)))
