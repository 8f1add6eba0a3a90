"""Probe heads in a traced step, and their ends: one op each."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.errors import FusionFailed
from needle_export.graph import reference
from needle_export.graph.passes import head_pipeline, pipeline
from needle_export.graph.promises import check, check_head
from needle_export.graph.spec import check_rewritten
from needle_export.graph.trace import trace, trace_head
from needle_export.model.state import empty_state, state_specs
from needle_export.model.step import Answer, Step, parameter_sources
from tests.support.geometries import ALL_HEADS
from tests.support.programs import needle

GEOMETRY = dataclasses.replace(SMALL, heads=ALL_HEADS)
CONTEXT = 40


def _traced(net, rows, heads):
    step = Step(net, CONTEXT, heads)
    state = empty_state(state_specs(net.geometry, CONTEXT, heads))
    return trace(step, state, parameter_sources(step), rows, 16, True)


def _inputs(net, rows, heads, count):
    generator = torch.Generator().manual_seed(0)
    vocab = net.geometry.vocab_size
    values = [torch.randint(1, vocab, (rows,), generator=generator), torch.tensor([3]), torch.tensor([count])]
    for spec in state_specs(net.geometry, CONTEXT, heads):
        if spec.dtype == "int64":
            values.append(torch.randint(1, vocab, spec.shape, generator=generator))
        elif spec.head:
            # As a sequence leaves it: weights are positive.
            values.append(torch.rand(spec.shape, generator=generator))
        else:
            values.append(torch.randn(spec.shape, generator=generator))
    return values


def _passes(heads):
    return pipeline((SMALL.qkv_conv_taps, 4), SMALL.engram_orders, SMALL.mhc_lanes, True, bool(heads))


def _run(program, passes):
    places, left = [], []
    for one in passes:
        fired = one.run(program)
        places += fired.places
        left += fired.left
    program.graph.lint()
    return places, left


def _end(net, name):
    answer = Answer(net, name)
    states = [s for s in state_specs(net.geometry, CONTEXT, (name,)) if s.head][1:]
    return trace_head(answer, empty_state(tuple(states)), parameter_sources(answer), name)


@pytest.mark.parametrize("heads", [("confidence",), ("router", "confidence", "embedding")], ids=len)
@pytest.mark.parametrize("rows", [1, 8, None])
def test_feeding_a_head_is_one_op(rows, heads):
    net = needle(GEOMETRY)
    program = _traced(net, rows, heads)
    inputs = _inputs(net, rows or 7, heads, min(rows or 7, 5))
    expected = program.run(*inputs)
    places, left = _run(program, _passes(heads))
    counts = Counter(name for name, _ in places)
    check(GEOMETRY, counts, places, left, len(heads))
    check_rewritten(program)
    assert counts["probe_absorb"] == len(heads)
    for name, a, b in zip(program.outputs, expected, program.run(*inputs), strict=True):
        # Pools are sums over positions: their rounding goes with their size.
        assert (a - b).abs().max() < 2e-5 * max(1, a.abs().max() / 4), name
    # The last block's lane mixing is still left out: heads and logits share one mean.
    assert counts["drop_unread_mixing"] == 1
    assert len(program.nodes(torch.ops.needle.lane_write.default)) == GEOMETRY.num_layers - 1


@pytest.mark.parametrize("name", ["confidence", "embedding", "router"])
def test_the_end_of_a_head_is_one_op(name):
    net = needle(GEOMETRY)
    program = _end(net, name)
    generator = torch.Generator().manual_seed(0)
    state = [torch.rand(s.shape, generator=generator) for s in state_specs(GEOMETRY, CONTEXT, (name,)) if s.head][1:]
    (before,) = program.run(*state)
    places, left = _run(program, head_pipeline())
    check_head(Counter(n for n, _ in places), left)
    check_rewritten(program)
    (after,) = program.run(*state)
    assert torch.equal(before, after)
    assert torch.equal(before, net.heads[name].answer(*state))
    (node,) = [n for n in program.graph.nodes if n.op == "call_function"]
    assert node.target is torch.ops.needle.probe_answer.default
    assert program.outputs == (name,)
    assert program.output_shape(name) == {"confidence": (1,), "embedding": (32,), "router": (3,)}[name]
    roles = {p.role for w in program.weights.values() for p in w.parts}
    # An embedding has no bias in the checkpoint, so that its zeros are nobody's.
    assert roles == ({"heads", "constant"} if name == "embedding" else {"heads"})


def test_a_head_that_reads_padding_is_refused(monkeypatch):
    # The same nodes as the reference, with another number: only running it on a chunk with padding tells.
    monkeypatch.setattr(reference, "PROBE_PADDING", 0.0)
    program = _traced(needle(GEOMETRY), 8, ("confidence",))
    monkeypatch.undo()
    places, left = _run(program, _passes(("confidence",)))
    with pytest.raises(FusionFailed, match=r"probe_absorb was promised 1 times and fired 0: .* run on random inputs"):
        check(GEOMETRY, Counter(n for n, _ in places), places, left, 1)


def test_another_end_is_refused(monkeypatch):
    original = reference.rms_norm
    monkeypatch.setattr(reference, "rms_norm", lambda x, scale, eps: original(x, scale, eps) * 2)
    program = _end(needle(GEOMETRY), "router")
    monkeypatch.undo()
    places, left = _run(program, head_pipeline())
    with pytest.raises(FusionFailed, match="probe_answer was promised 1 times and fired 0"):
        check_head(Counter(n for n, _ in places), left)
