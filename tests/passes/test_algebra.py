"""Rewrites that are exact in real arithmetic, and the cases in which they keep their hands off."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.graph.passes import pipeline
from needle_export.graph.passes.base import Fired
from tests.support.programs import needle, step_inputs, traced

CONTEXT = 24


def _run(net, rows=1, fold=True, diagonals=True):
    program = traced(net, CONTEXT, rows)
    fired: dict[str, Fired] = {}
    geometry = net.geometry
    taps, orders, lanes = (geometry.qkv_conv_taps, 4), geometry.engram_orders, geometry.mhc_lanes
    for one in pipeline(taps, orders, lanes, fold, fold_diagonals=diagonals):
        result = one.run(program)
        for name, times in result.counts.items():
            fired[name] = result
            assert times
        for left in result.left:
            fired.setdefault(f"left {left.op}", result)
    return program, fired


def test_a_diagonal_near_zero_is_not_inverted():
    net = needle(SMALL)
    with torch.no_grad():
        net.layers[1].mlp.d1[5] = 0.0
    program, fired = _run(net)
    assert fired["absorb_diagonal"].places == [("absorb_diagonal", 0), ("absorb_diagonal", 2)]
    (left,) = fired["absorb_diagonal"].left
    assert left.layer == 1 and "too small to invert" in left.reason
    inputs = step_inputs(net, CONTEXT, 1)
    expected = traced(net, CONTEXT, 1).run(*inputs)
    assert (program.run(*inputs)[0] - expected[0]).abs().max() < 1e-5


def test_padding_that_is_no_whole_row_stays():
    # 100 columns are no multiple of the factor's 16: the padded product must be kept.
    net = needle(dataclasses.replace(SMALL, d_model=100, engram_heads=3, engram_sub_dim=16))
    program, fired = _run(net)
    assert "trim_kronecker" not in fired
    assert all("not a multiple" in left.reason for left in fired["left trim_kronecker"].left)
    inputs = step_inputs(net, CONTEXT, 1)
    expected = traced(net, CONTEXT, 1).run(*inputs)
    assert (program.run(*inputs)[0] - expected[0]).abs().max() < 1e-5


def test_matrices_stay_the_checkpoints_where_they_may_not_take_factors():
    net = needle(SMALL)
    program, fired = _run(net, fold=False)
    assert "merge_lane_gates" not in fired
    untouched = {n.removeprefix("net.") for n, _ in net.named_parameters()}
    for weight in program.weights.values():
        if weight.value.numel() >= 1 << 13:
            assert not weight.folded, weight.name
            assert all(part in untouched or "+" in weight.name for part in [weight.name.removeprefix("net.")])


@pytest.mark.parametrize("rows", [1, None])
def test_diagonals_stay_where_small_matrices_may_not_take_them(rows):
    net = needle(SMALL)
    program, fired = _run(net, rows, fold=False, diagonals=False)
    assert not {"absorb_diagonal", "fold_diagonal"} & set(fired) and "fold_bias" in fired
    given = {f"net.{name}" for name, _ in net.named_parameters()}
    small = [w for w in program.weights.values() if ".cond_" in w.name and w.value.dim() == 2]
    assert len(small) == 2 * SMALL.num_layers and all(w.name in given and not w.folded for w in small)
    inputs = step_inputs(net, CONTEXT, rows or 5)
    expected = traced(net, CONTEXT, rows).run(*inputs)
    assert (program.run(*inputs)[0] - expected[0]).abs().max() < 1e-5


def test_merged_weights_know_their_parts():
    program, _ = _run(needle(SMALL))
    merged = next(w for w in program.weights.values() if "layers.0" in w.name and "q_proj+" in w.name)
    assert [p.role for p in merged.parts] == ["routing", "routing", "content", "content"]
    assert sum(p.elements for p in merged.parts) == merged.value.numel()
    assert not merged.folded


@pytest.mark.parametrize("rows", [1, None])
def test_the_last_mixing_is_dropped_and_only_it(rows):
    program, fired = _run(needle(SMALL), rows)
    assert fired["drop_unread_mixing"].counts == {"drop_unread_mixing": 1}
    assert len(program.nodes(torch.ops.needle.sinkhorn.default)) == SMALL.num_layers - 1
    assert sorted(program.streams) == list(range(SMALL.num_layers - 1))


def test_equal_constants_are_stored_once():
    program, _ = _run(needle(SMALL))
    permutations = [
        w for w in program.weights.values() if w.value.dtype == torch.int64 and w.value.numel() == 128
    ]
    assert len(permutations) == 2
