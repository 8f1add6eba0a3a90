"""Packed requests are whole sequences: the same numbers, the same gradients."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
import torch
from torch import Tensor, nn

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.loaded import Checkpoint, standard_permutations
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample
from needle_export.demo.confidence import greedy
from needle_export.demo.geometry import initial
from needle_export.demo.muon import orthogonal
from needle_export.demo.packed import Packing, hidden
from needle_export.demo.prompts import Group
from needle_export.demo.training import exact, model_of, predicted, sliced
from needle_export.model.network import Needle

GEOMETRY = dataclasses.replace(SMALL, num_layers=5, engram_layers=(1, 3), global_layers=(2, 4))


def weights(seed: int = 0) -> dict[str, Tensor]:
    return {n: torch.from_numpy(w.astype("float32")) for n, w in make_sample(GEOMETRY, seed).items()}


def requests(seed: int, head: int = 23, sizes: tuple[int, ...] = (4, 19, 1, 40)) -> Group:
    rng = Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(GEOMETRY.vocab_size) for _ in range(count))

    return Group(tokens(head), tuple((tokens(size + 1), max(1, size // 2)) for size in sizes))


def packing_of(made: Group) -> Packing:
    return Packing(made.head, [tokens[:-1] for tokens, _ in made.branches])


def test_every_row_is_that_of_its_whole_sequence() -> None:
    model, made = model_of(GEOMETRY, weights(), 5), requests(0)
    packing = packing_of(made)
    with torch.no_grad():
        rows = hidden(model, packing)
        for k, (tokens, _) in enumerate(made.branches):
            alone = model.hidden(torch.tensor([*made.head, *tokens[:-1]]))
            own = packing.places[k][packing.real[k]]
            for layer, (a, b) in enumerate(zip(alone, rows, strict=True)):
                torch.testing.assert_close(b[: len(made.head)], a[: len(made.head)], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(b[own], a[len(made.head) :], rtol=1e-4, atol=1e-4, msg=f"block {layer}")


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_rung_is_what_a_slice_of_the_checkpoint_is(depth: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("rung") / "whole.safetensors"
    write_checkpoint(path, GEOMETRY, make_sample(GEOMETRY, 0), dtype="float32")
    rung: Checkpoint = slice_ladder(read_checkpoint(path), depth)
    want = Needle(rung.geometry, rung.tensors, standard_permutations(GEOMETRY.hada_n))
    geometry, _ = sliced(GEOMETRY, weights(), depth)
    assert geometry == rung.geometry
    tokens = torch.arange(30)
    assert torch.equal(model_of(GEOMETRY, weights(), depth).hidden(tokens)[-1], want.hidden(tokens)[-1])


def test_gradients_are_those_of_whole_sequences() -> None:
    made = requests(1)
    packed = {n: w.requires_grad_() for n, w in weights().items()}
    logits, targets, owner = predicted(model_of(GEOMETRY, packed, 3), made)
    assert owner.tolist() == sorted(owner.tolist())
    nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    whole = {n: w.requires_grad_() for n, w in weights().items()}
    for tokens, prompt in made.branches:
        model = model_of(GEOMETRY, whole, 3)
        ids = torch.tensor([*made.head, *tokens])
        rows = model.logits(model.hidden(ids[:-1])[-1])[len(made.head) + prompt - 1 :]
        nn.functional.cross_entropy(rows, ids[len(made.head) + prompt :], reduction="sum").backward()
    reached = 0
    for name, weight in whole.items():
        if weight.grad is None:
            assert packed[name].grad is None or not packed[name].grad.any(), name
            continue
        reached += 1
        scale = float(weight.grad.abs().max())
        torch.testing.assert_close(packed[name].grad, weight.grad, rtol=1e-3, atol=2e-4 * max(scale, 1e-3), msg=name)
    _, used = sliced(GEOMETRY, weights(), 3)
    assert reached == sum(not name.startswith("confidence_head") for name in used) > 30


def test_exact_is_what_greedy_decoding_gives() -> None:
    model, made = model_of(GEOMETRY, weights(), 5), requests(2)
    answers = greedy(model, made, end=0)
    right = Group(made.head, tuple(((*tokens[:prompt], *answer[:9]), prompt)
                                   for (tokens, prompt), answer in zip(made.branches, answers, strict=True)))
    assert exact(model, right).tolist() == [True] * 4
    spoilt = list(right.branches)
    tokens, prompt = spoilt[2]
    spoilt[2] = ((*tokens[:-1], (tokens[-1] + 1) % GEOMETRY.vocab_size), prompt)
    assert exact(model, Group(made.head, tuple(spoilt))).tolist() == [True, True, False, True]
    ids = [*made.head, *made.branches[1][0][: made.branches[1][1]]]
    for token in answers[1][:5]:
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)


def test_initial_values_are_neutral_where_the_family_begins_so() -> None:
    begun = initial(GEOMETRY, 0)
    assert set(begun) == set(initial(GEOMETRY, 1))
    assert not torch.equal(begun["embedding/embedding"], initial(GEOMETRY, 1)["embedding/embedding"])
    assert abs(float(begun["embedding/embedding"].std()) - 0.02) < 1e-3
    factor = begun["stack/layers/block/hadamard_mlp/w1b"][0]
    torch.testing.assert_close(factor @ factor.T, torch.eye(len(factor)))


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (6, 6)])
def test_muon_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    made = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(made)
    assert made.shape == shape
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.6
