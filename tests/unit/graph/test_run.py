"""A fused program run token by token is the network's cached step, and rounding it leaves alone what it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.graph.program import CONSTANT, Program
from needle_export.graph.run import Stepper, round_floats
from needle_export.model.state import empty_state
from tests.support.programs import sample_checkpoint, tokens

CONTEXT, COUNT = 40, 36


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(sample_checkpoint(tmp_path_factory.mktemp("run"), SMALL), CONTEXT, NullProgress())


@pytest.fixture(scope="module")
def program(compiler: Compiler) -> Program:
    return compiler.program(1)


@pytest.fixture
def copy(program: Program) -> Iterator[Program]:
    """One whose weights may be exchanged."""
    before = dict(program.weights)
    yield program
    program.weights.clear()
    program.weights.update(before)


def test_a_step_is_the_networks(compiler: Compiler, program: Program) -> None:
    """Logits, states and streams, from the start over the ring's end."""
    state = empty_state(compiler.states)
    stepper = Stepper(program, state)
    ids = tokens(SMALL, COUNT)
    with torch.inference_mode():
        wanted_streams = compiler.net.streams(torch.from_numpy(ids))[1:]
        for at, token in enumerate(ids.tolist()):
            wanted, state = compiler.net.step(torch.tensor([token]), torch.tensor([at]), state, CONTEXT)
            logits, streams = stepper.step(token)
            assert logits.shape == (SMALL.vocab_size,) and stepper.position == at + 1
            assert float((logits - wanted[0]).abs().max()) < 5e-6, at
            assert set(stepper.state) == set(state)
            for name, value in state.items():
                assert float((stepper.state[name] - value).abs().max()) < 5e-6, (at, name)
            # The last block's stream is read by nothing but the mean of its lanes, and may be left out.
            assert set(streams) >= set(range(SMALL.num_layers - 1))
            for block, stream in streams.items():
                want = wanted_streams[block][at : at + 1]
                assert float((stream - want).abs().max() / want.abs().max().clamp(min=1)) < 5e-6, (at, block)


def test_two_runs_are_one(compiler: Compiler, program: Program) -> None:
    """Bit for bit, and the state that a stepper begins with stays as it is."""
    start, ids = empty_state(compiler.states), tokens(SMALL, 20)
    first, second = (Stepper(program, start) for _ in range(2))
    whole = first.feed(ids)
    parts = [second.feed(ids[:7]), second.feed(ids[7:8]), second.feed(ids[8:])]
    assert np.array_equal(whole, np.concatenate(parts)) and whole.shape == (20, SMALL.vocab_size)
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    assert all(torch.equal(start[name], value) for name, value in empty_state(compiler.states).items())
    assert len(set(whole.argmax(-1).tolist())) > 10


def test_rounding_leaves_kept_matrices_and_constants(copy: Program) -> None:
    before = dict(copy.weights)
    kept = {("stack/layers/block/self_attn/out_proj/kernel", 1), ("stack/layers/block/ZCRMSNorm_0/scale", 0)}
    round_floats(copy, kept)
    assert set(copy.weights) == set(before)
    changed, seen = set(), set()
    for name, old in before.items():
        new = copy.weights[name]
        assert (new.name, new.parts, new.folded) == (old.name, old.parts, old.folded)
        sources = {(p.source, p.layer) for p in old.parts}
        constant = all(p.role == CONSTANT for p in old.parts)
        if constant or not old.value.is_floating_point():
            assert new is old
            seen.add("constant" if constant else "integer")
        elif old.value.dim() >= 2 and sources & kept:
            assert new is old and old.value.shape[-1] == SMALL.d_model
            seen.add("kept")
        else:
            assert torch.equal(new.value, old.value.half().float()) and new.value.dtype == torch.float32
            changed |= set() if torch.equal(new.value, old.value) else sources
    assert seen >= {"constant", "kept"}
    # Vectors are never compressed, so that those of a kept tensor are rounded; and what was folded certainly is.
    assert ("stack/layers/block/ZCRMSNorm_0/scale", 0) in changed
    assert not any(source == "embedding/embedding" for source, _ in changed)  # halves already, in this checkpoint


def test_rounding_moves_the_logits_a_little(compiler: Compiler, copy: Program) -> None:
    ids = tokens(SMALL, 12)
    exact = Stepper(copy, empty_state(compiler.states)).feed(ids)
    round_floats(copy, set())
    moved = np.abs(Stepper(copy, empty_state(compiler.states)).feed(ids) - exact).max()
    assert 1e-5 < moved < 1e-2


def test_chunks_are_the_steps(compiler: Compiler, program: Program) -> None:
    """A program of a symbolic length takes a sequence in chunks, over the ring's end, and leaves the same state."""
    whole = compiler.program(None)
    for count in (2, 3, 17, 36):
        ids = tokens(SMALL, count, seed=count)
        chunked = Stepper(whole, empty_state(compiler.states), compiler.max_chunk)
        stepped = Stepper(program, empty_state(compiler.states), 99)  # of one row: a token a call
        deviation = np.abs(chunked.feed(ids) - stepped.feed(ids)).max()
        assert deviation < 5e-6 and chunked.position == stepped.position == count
        for name, value in stepped.state.items():
            # Sums of another order, through all blocks and up to 36 positions: 5e-6 of values up to 5 were seen.
            assert float((chunked.state[name] - value).abs().max()) < 2e-5, (count, name)


def test_no_chunk_is_a_single_token(compiler: Compiler, program: Program) -> None:
    symbolic = replace(program, rows=None)
    for longest in (3, 4, 16):
        stepper = Stepper(symbolic, {}, longest)
        for count in range(2, 60):
            pieces = stepper.pieces(np.arange(count))
            assert np.array_equal(np.concatenate(pieces), np.arange(count))
            assert {len(p) for p in pieces} <= set(range(2, longest + 1))
            assert len(pieces) <= count // longest + 2
    assert [len(p) for p in Stepper(program, {}, 16).pieces(np.arange(3))] == [1, 1, 1]
