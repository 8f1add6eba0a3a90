"""Every fused op is found wherever it stands, and nowhere else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.errors import FusionFailed
from needle_export.graph import reference
from needle_export.graph.passes import pipeline
from needle_export.graph.passes.fuse import fuse
from needle_export.graph.patterns import patterns
from needle_export.graph.promises import check, promises
from needle_export.model import block
from tests.support.geometries import VARIANTS
from tests.support.programs import needle, step_inputs, traced

CONTEXT = 40


def _patterns(geometry):
    engram = bool(geometry.engram_layers)
    taps = (geometry.qkv_conv_taps, *((geometry.engram_conv_taps,) if engram else ()))
    return taps, geometry.engram_orders if engram else (), geometry.mhc_lanes


def _fuse_all(net, program):
    places, left = [], []
    for pattern in patterns(*_patterns(net.geometry)):
        fired = fuse(program, pattern)
        places += fired.places
        left += fired.left
    return places, left


@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("name", ["small", "no_taps", "no_engram", "orders", "odd_width", "lanes", "split"])
def test_every_promise_is_kept(name, rows):
    net = needle(VARIANTS[name])
    program = traced(net, CONTEXT, rows)
    inputs = step_inputs(net, CONTEXT, rows or 7)
    before = program.run(*inputs)
    places, _ = _fuse_all(net, program)
    # Fusing changes no bit: an op's kernel is the very function that stood there.
    after = program.run(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    counts = Counter(op for op, _ in places)
    for op, promise in promises(net.geometry).items():
        if hasattr(torch.ops.needle, op):
            assert counts[op] == promise.total(net.geometry.num_layers), op


@pytest.mark.parametrize("rows", [1, None])
def test_all_passes_keep_the_result(rows):
    net = needle(VARIANTS["deep"])
    program = traced(net, CONTEXT, rows)
    inputs = step_inputs(net, CONTEXT, rows or 7)
    expected = program.run(*inputs)
    places, left = [], []
    for one in pipeline(*_patterns(net.geometry), fold_lane_gates=True):
        fired = one.run(program)
        program.graph.lint()
        places += fired.places
        left += fired.left
        worst = max((a - b).abs().max().item() for a, b in zip(expected, program.run(*inputs), strict=True))
        assert worst < 2e-5, one.name
    check(net.geometry, Counter(n for n, _ in places), places, left)
    once = Counter(n for n, _ in places)
    assert once["absorb_diagonal"] == once["trim_kronecker"] / 2 == once["merge_lane_gates"] == 7
    assert once["drop_unread_mixing"] == 1


def _broken(net, layer, monkeypatch, name, replacement):
    """Let one block use another function where the others use the reference."""
    original = getattr(reference, name)
    forward = net.layers[layer].forward

    def switched(*args, **kwargs):
        monkeypatch.setattr(block.ref, name, replacement)
        try:
            return forward(*args, **kwargs)
        finally:
            monkeypatch.setattr(block.ref, name, original)

    monkeypatch.setattr(net.layers[layer], "forward", switched)


def _failure(net, rows=1):
    program = traced(net, CONTEXT, rows)
    places, left = [], []
    for one in pipeline(*_patterns(net.geometry), fold_lane_gates=True):
        fired = one.run(program)
        places += fired.places
        left += fired.left
    with pytest.raises(FusionFailed) as failure:
        check(net.geometry, Counter(n for n, _ in places), places, left)
    return str(failure.value)


def test_a_shorter_sinkhorn_is_refused_by_layer(monkeypatch):
    net = needle(SMALL)
    original = reference.sinkhorn
    _broken(net, 1, monkeypatch, "sinkhorn", lambda logits, iterations: original(logits, iterations - 1))
    message = _failure(net)
    assert "sinkhorn was promised 3 times and fired 2: in block 1" in message


def test_an_integer_that_differs_is_caught_by_the_proof(monkeypatch):
    net = needle(SMALL)

    def interleaved(x, cos, sin):
        # The same nodes as the reference, cut one element further: only running it tells.
        half = x.shape[-1] // 2
        x1, x2 = x[..., : half - 1 + 1], x[..., half:]
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)

    def shifted(x, cos, sin):
        half = x.shape[-1] // 2
        x1, x2 = x[..., :half], x[..., half - 1 : -1]
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)

    _broken(net, 2, monkeypatch, "rotary", shifted)
    message = _failure(net)
    assert "rotary was promised 6 times and fired 4: in block 2" in message
    assert "run on random inputs" in message
    # The same cut written differently is the same op.
    net = needle(SMALL)
    _broken(net, 2, monkeypatch, "rotary", interleaved)
    program = traced(net, CONTEXT, 1)
    places, _ = _fuse_all(net, program)
    assert Counter(op for op, _ in places)["rotary"] == 6


def test_an_attribute_is_read_off_where_it_stands(monkeypatch):
    net = needle(SMALL)
    original = reference.rms_norm
    _broken(net, 1, monkeypatch, "rms_norm", lambda x, scale, eps: original(x, scale, 3e-5))
    program = traced(net, CONTEXT, 1)
    _fuse_all(net, program)
    found = Counter(n.args[2] for n in program.nodes(torch.ops.needle.rms_norm.default))
    assert set(found) == {1e-6, 3e-5}
    assert found[3e-5] == 6 + 2
