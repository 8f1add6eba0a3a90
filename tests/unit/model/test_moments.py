"""What the inputs of products look like, and better numbers for matrices from it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import SMALL
from needle_export.model.dynamic import matrices_of
from needle_export.model.improve import METHODS, improve
from needle_export.model.moments import Moments, gather
from needle_export.model.network import Needle
from needle_export.model.step import Step, parameter_sources
from needle_export.weights.calibrated import calibrated
from needle_export.weights.forms import Form
from needle_export.weights.search import searched
from tests.support.programs import needle, tokens

INT4 = Form("int", 4, 8)
HELD = ("kernel", "embedding", "phi_pre", "phi_post", "phi_res")
SEQUENCES = [torch.from_numpy(tokens(SMALL, 20, seed=i)) for i in range(2)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_inputs_of_a_product_add_up() -> None:
    weight, table, stack = normal(6, 4), normal(9, 6), normal(3, 6, 4)
    others = normal(6, 4, seed=9)
    x, y = normal(5, 6, seed=1), normal(2, 7, 6, seed=2)
    moments = Moments([weight, table, stack])
    plain = torch.matmul(x, weight)
    with moments:
        assert torch.equal(torch.matmul(x, weight), plain)
        torch.matmul(y, weight)
        torch.matmul(x, others)
        torch.matmul(others.t(), x.t())
        nn.functional.linear(x, table[:5])
        nn.functional.embedding(torch.tensor([3]), table)
        torch.matmul(normal(3, 5, 6, seed=3), stack)
    torch.matmul(x, weight)  # outside, it isn't watched
    (of_weight,), (of_table,), of_stack = (moments.of(p) for p in (weight, table, stack))  # type: ignore[misc]  # all found
    both = torch.cat([x, y.reshape(-1, 6)])
    assert torch.allclose(of_weight.matrix, both.T @ both, atol=1e-5) and of_weight.count == 19
    assert torch.allclose(of_table.matrix, x.T @ x, atol=1e-5)
    assert moments.rows(table) == 5 and moments.rows(weight) == 4
    for moment, inputs in zip(of_stack, normal(3, 5, 6, seed=3), strict=True):
        assert torch.allclose(moment.matrix, inputs.T @ inputs, atol=1e-5) and moment.count == 5
    assert moments.of(others) is None and moments.rows(others) == 0


def test_products_of_the_same_inputs_share_them() -> None:
    q, k, out = normal(6, 4), normal(6, 3, seed=1), normal(6, 6, seed=2)
    moments, total = Moments([q, k, out]), torch.zeros(6, 6)
    with moments:
        for seed in (3, 4):
            x = normal(5, 6, seed=seed)
            torch.matmul(x, q)
            torch.matmul(x, k)
            torch.matmul(x + 1, out)
            total += x.T @ x
    first, second, third = (moments.of(p) for p in (q, k, out))
    assert first is not None and second is not None and third is not None
    assert first[0] is second[0] and first[0] is not third[0] and first[0].count == 10
    assert torch.allclose(first[0].matrix, total, atol=1e-5)


def parts(net: Needle) -> tuple[dict[str, Tensor], dict[str, tuple[str, str, int]]]:
    step = Step(net, 32)
    return dict(step.named_parameters()), parameter_sources(step)


def forms(net: Needle, form: Form = INT4) -> dict[tuple[str, int], Form]:
    return {(s, n): form for s, _, n in parts(net)[1].values() if s.endswith(HELD) and "head" not in s}


def test_every_product_with_a_matrix_is_seen() -> None:
    net = needle(SMALL)
    named, sources = parts(net)
    moments = gather(net, named.values(), SEQUENCES)
    held = {path for path, s in sources.items() if (s[0], s[2]) in forms(net)}
    seen = {path for path in held if moments.of(named[path]) is not None}
    # Engram tables are looked up in, and nothing else.
    assert held - seen == {"net.engram.tables"} and len(held) == 8 * SMALL.num_layers + 4
    for path in seen:
        found = moments.of(named[path])
        assert found is not None
        for moment, matrix in zip(found, matrices_of(sources[path][0], named[path]), strict=True):
            assert moment.count == 40 and moment.matrix.shape == (matrix.shape[1],) * 2
    layer = "net.layers.1.attention."
    assert len({id(moments.of(named[layer + p])) for p in ("q_proj", "k_proj", "v_proj", "gate_proj")}) == 1
    assert moments.rows(named["net.embedding"]) == SMALL.vocab_size


def improved(net: Needle, method: Any, form: Form = INT4, sequences: list[Tensor] = SEQUENCES) -> Needle:
    other = copy.deepcopy(net)
    named, sources = parts(other)
    moments = gather(other, named.values(), sequences)
    with torch.inference_mode():
        improve(named.items(), sources, forms(net, form), method, moments)
    return other


@pytest.mark.parametrize("form", [INT4, Form("int", 2, 8), Form("palette", 4, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_rounding_changes_nothing_that_was_improved(method: Any, form: Form) -> None:
    net = needle(SMALL)
    (before, sources), (after, _) = parts(net), parts(improved(net, method, form))
    wanted = forms(net)
    for path, value in after.items():
        changed = not torch.equal(value, before[path])
        assert changed == (path in sources and (sources[path][0], sources[path][2]) in wanted), path
        for matrix in matrices_of(sources[path][0], value) if changed else ():
            assert torch.equal(form.rounded(matrix), matrix), path


def test_each_matrix_is_rounded_by_its_own_inputs() -> None:
    net = needle(SMALL)
    before, sources = parts(net)
    after = parts(improved(net, "calibrated"))[0]
    moments = gather(net, before.values(), SEQUENCES)
    for path in ("net.layers.1.attention.k_proj", "net.layers.2.lanes.phi_res", "net.engram.key_proj"):
        (found,) = moments.of(before[path]) or ()
        ((was,), (now,)) = (matrices_of(sources[path][0], v[path]) for v in (before, after))
        assert torch.equal(now, calibrated(was.contiguous(), found.matrix, found.count, 4, 8)), path
    # The embedding is looked up in too, where an error costs the same in every direction.
    (head,) = moments.of(before["net.embedding"]) or ()
    both_ends = head.matrix + torch.eye(SMALL.d_model) * head.matrix.diagonal().mean()
    assert torch.equal(after["net.embedding"], calibrated(before["net.embedding"], both_ends, head.count, 4, 8))
    # A table's errors are weighed by what both projections make of them.
    tables, width = before["net.engram.tables"], SMALL.engram_sub_dim
    for index in range(SMALL.engram_tables):
        rows, at = (slice(index * size, (index + 1) * size) for size in (SMALL.engram_slots, width))
        both = torch.cat([before[f"net.engram.{p}_proj"][0, at] for p in ("key", "value")], dim=1)
        assert torch.equal(after["net.engram.tables"][rows], calibrated(tables[rows], both @ both.T, None, 4, 8))


def test_rows_without_logits_have_no_inputs_to_go_by() -> None:
    net = needle(dataclasses.replace(SMALL, out_vocab=200))
    was, now = parts(net)[0]["net.embedding"], parts(improved(net, "calibrated"))[0]["net.embedding"]
    assert torch.equal(now[200:], searched(was[200:], 4, 8)) and not torch.equal(now[:200], searched(was[:200], 4, 8))


def test_calibrating_needs_inputs() -> None:
    named, sources = parts(needle(SMALL))
    with pytest.raises(ValueError, match="needs the moments"):
        improve(named.items(), sources, {}, "calibrated")


@torch.inference_mode()
def test_logits_are_nearer_the_better_the_method() -> None:
    net = needle(SMALL)
    fresh, seen = (
        torch.from_numpy(np.stack([tokens(SMALL, 20, seed=i) for i in seeds]))
        for seeds in (range(10, 16), range(20, 60))
    )
    wanted = net(fresh)
    off = [float((improved(net, m, sequences=list(seen))(fresh) - wanted).square().mean()) for m in METHODS]
    assert off[0] > off[1] > off[2]
