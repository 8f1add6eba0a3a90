"""A probe head fed in chunks says what it says about the whole sequence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from needle_export.checkpoint.geometry import SMALL
from needle_export.errors import UsageError
from needle_export.model.heads import ProbeHead
from needle_export.model.network import Needle
from needle_export.model.state import empty_state, probe_state, state_specs
from needle_export.model.step import Answer, Step, parameter_sources
from tests.support.geometries import ALL_HEADS
from tests.support.models import tokens_for
from tests.support.programs import needle

GEOMETRY = dataclasses.replace(SMALL, heads=ALL_HEADS)
HEADS = tuple(h.name for h in ALL_HEADS)
CONTEXT = 64
#: The bar to meet; the largest difference seen is 5e-7, of outputs that spread by more than 0.1.
BAR = 1e-6


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with torch.no_grad():
        yield


@functools.cache
def net() -> Needle:
    return needle(GEOMETRY)


def head(name: str) -> ProbeHead:
    found = net().heads[name]
    assert isinstance(found, ProbeHead)
    return found


def start(name: str) -> tuple[Tensor, Tensor, Tensor]:
    state = empty_state(state_specs(GEOMETRY, CONTEXT, (name,)))
    best, total, pool = (state[n] for n in probe_state(name))
    return best, total, pool


def cuts(length: int, seed: int) -> list[int]:
    """Sizes of random chunks, empty ones among them."""
    ends = sorted(np.random.RandomState(seed).randint(0, length + 1, 6))
    return [int(b - a) for a, b in zip([0, *ends], [*ends, length], strict=True)]


def random_cells(length: int, seed: int, spread: float = 1.0) -> Tensor:
    """Hidden states [T, M, C]; scores spread by about ``spread`` times the probes' length."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(length, GEOMETRY.num_layers + 1, GEOMETRY.d_model, generator=generator)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("seed", range(5))
def test_any_chunks_give_what_the_whole_gives(name: str, seed: int) -> None:
    cells = random_cells(40, seed)
    whole = head(name)(cells)
    state, position = start(name), 0
    for count in cuts(40, seed):
        # Padding that would show: huge, and scored above everything real.
        padded = torch.cat([cells[position : position + count], 50 * random_cells(3, seed + 100)])
        state = head(name).absorb(padded.transpose(0, 1), torch.tensor([count]), *state)
        position += count
    assert position == 40
    assert (head(name).answer(*state[1:]) - whole).abs().max() <= BAR


def test_scores_beyond_the_range_of_an_exponential() -> None:
    # Some scores are hundreds above others, in both directions as they come.
    cells = random_cells(40, 0, spread=3e4)
    scores = torch.einsum("tmc,mpc->mpt", cells, head("confidence").probes) / cells.shape[-1] ** 0.5
    assert scores.max() - scores.min() > 300
    for order in (cells, cells.flip(0)):
        state = start("confidence")
        for row in order:
            state = head("confidence").absorb(row[None].transpose(0, 1), torch.tensor([1]), *state)
        assert torch.isfinite(state[1]).all()
        torch.testing.assert_close(head("confidence").answer(*state[1:]), head("confidence")(cells), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_an_empty_chunk_changes_nothing(name: str) -> None:
    first = start(name)
    cells = random_cells(4, 1).transpose(0, 1)
    for before in (first, head(name).absorb(cells, torch.tensor([4]), *first)):
        after = head(name).absorb(50 * cells, torch.tensor([0]), *before)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("chunks", [(1,), (7, 1, 16, 2)], ids=str)
def test_the_cached_step_feeds_every_head(chunks: tuple[int, ...]) -> None:
    tokens = torch.from_numpy(tokens_for(GEOMETRY, 40)[0])
    plain, state = empty_state(state_specs(GEOMETRY, CONTEXT)), empty_state(state_specs(GEOMETRY, CONTEXT, HEADS))
    position, turn = 0, 0
    while position < len(tokens):
        chunk = tokens[position : position + chunks[turn % len(chunks)]]
        at = torch.tensor([position])
        logits, state = net().step(chunk, at, state, CONTEXT, HEADS)
        expected, plain = net().step(chunk, at, plain, CONTEXT)
        # Heads listen only.
        assert torch.equal(logits, expected)
        assert all(torch.equal(state[n], v) for n, v in plain.items())
        position, turn = position + len(chunk), turn + 1
        for name in HEADS if position in (1, 8, 25, 40) else ():
            answer = net().answer(name, state)
            assert (answer - net().head(name, tokens[:position])).abs().max() <= BAR


def test_padding_behind_the_count_is_not_read() -> None:
    tokens = torch.from_numpy(tokens_for(GEOMETRY, 12)[0])
    padded = torch.cat([tokens[:9], torch.zeros(3, dtype=torch.int64)])
    state = empty_state(state_specs(GEOMETRY, CONTEXT, HEADS))
    _, counted = net().step(padded, torch.tensor([0]), state, CONTEXT, HEADS, torch.tensor([9]))
    _, uncounted = net().step(padded, torch.tensor([0]), state, CONTEXT, HEADS)
    for name in HEADS:
        expected = net().head(name, tokens[:9])
        assert (net().answer(name, counted) - expected).abs().max() <= BAR
        assert (net().answer(name, uncounted) - expected).abs().max() > 1e-3


def test_state_is_listed_behind_everything_else() -> None:
    plain, specs = state_specs(GEOMETRY, CONTEXT), state_specs(GEOMETRY, CONTEXT, ("router", "confidence"))
    assert specs[: len(plain)] == plain
    assert not any(s.head for s in plain)
    rows, width = GEOMETRY.num_layers + 1, GEOMETRY.d_model
    assert [(s.name, s.shape, s.head) for s in specs[len(plain) :]] == [
        ("probe_router_max", (rows, 3, 1), "router"),
        ("probe_router_sum", (rows, 3, 1), "router"),
        ("probe_router_pool", (rows, 3, width), "router"),
        ("probe_confidence_max", (rows, 4, 1), "confidence"),
        ("probe_confidence_sum", (rows, 4, 1), "confidence"),
        ("probe_confidence_pool", (rows, 4, width), "confidence"),
    ]
    state = empty_state(specs)
    assert [float(state[s.name].max()) for s in specs[len(plain) :]] == [-1e9, 0, 0] * 2
    assert {s.part for s in specs[len(plain) :]} == {"probes"}


def test_a_missing_head_is_refused() -> None:
    with pytest.raises(UsageError, match="no router head"):
        state_specs(SMALL, CONTEXT, ("router",))
    with pytest.raises(UsageError, match="no router head"):
        needle(SMALL).answer("router", {})


def test_every_parameter_of_a_head_has_a_source() -> None:
    for module in (Step(net(), CONTEXT, HEADS), Answer(net(), "router")):
        found = {p: s for p, s in parameter_sources(module).items() if ".heads." in p}
        assert {s for s, _, _ in found.values()} == {
            f"{name}_head/{leaf}"
            for name in HEADS
            for leaf in ("probes", "gain", "query", "row_bias", "proj/kernel", "proj/bias")
        } - {"embedding_head/proj/bias"}
        assert {role for _, role, _ in found.values()} == {"heads"}
