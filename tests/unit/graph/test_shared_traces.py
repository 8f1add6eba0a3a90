"""Exports that tests share: the graph is the same, the weights are each test's own, and patches stay apart."""

from __future__ import annotations

import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.graph import reference
from needle_export.graph.program import Program
from tests.support.programs import needle, step_inputs, traced
from tests.support.traces import Shared, shared

GEOMETRY, CONTEXT = SMALL.with_layers(2), 12


def ops(program: Program) -> list[tuple[str, str, str]]:
    return [(node.op, node.name, str(node.args)) for node in program.graph.nodes]


def traces(share: Shared, seed: int = 0, rows: int | None = None, layers: int = 2) -> tuple[Program, int]:
    """A trace, and how many exports it took."""
    before = share.made
    program = traced(needle(SMALL.with_layers(layers), seed), CONTEXT, rows)
    return program, share.made - before


def test_what_is_shared_computes_what_a_trace_of_its_own_computes() -> None:
    with shared() as share:
        _, first = traces(share, seed=0)
        lent, second = traces(share, seed=1)
    with shared() as share:
        own, third = traces(share, seed=1)
    assert (first, second, third) == (1, 0, 1)
    assert ops(lent) == ops(own) and lent.streams.keys() == own.streams.keys()
    assert all(torch.equal(weight.value, own.weights[name].value) for name, weight in lent.weights.items())
    for rows in (2, 9):
        inputs = step_inputs(needle(GEOMETRY, 1), CONTEXT, rows)
        assert all(map(torch.equal, lent.run(*inputs), own.run(*inputs)))


def test_a_program_that_is_changed_is_not_the_next_ones() -> None:
    with shared() as share:
        spoiled, _ = traces(share, rows=1)
        before = ops(spoiled)
        (output,) = [node for node in spoiled.graph.nodes if node.op == "output"]
        output.args = ((output.args[0][0],),)
        spoiled.streams = {}
        assert spoiled.sweep() > 0
        lent, made = traces(share, rows=1)
    assert made == 0 and ops(lent) == before


def test_another_length_depth_or_code_is_another_export(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared() as share:
        assert [traces(share, rows=1)[1], traces(share, rows=2)[1], traces(share, rows=1, layers=3)[1]] == [1, 1, 1]
        right = reference.sinkhorn
        with monkeypatch.context() as patch:
            patch.setattr(reference, "sinkhorn", lambda logits, iterations: right(logits, iterations - 1))
            wrong, made = traces(share, rows=1)
        plain, again = traces(share, rows=1)
    assert (made, again) == (1, 0) and len(ops(wrong)) < len(ops(plain))
