"""What a host computes for a Core ML package, against the reference and against what each query may see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from needle_export.graph.reference import ngram_rows
from needle_export.targets.coreml.contract import MASKED, input_ports, output_ports, stateful
from needle_export.targets.coreml.host import TAIL_SHARE, Host
from tests.support.coreml_contracts import CASES, contract_of

SYSTEMS = ("ios17", "ios18")

#: A row that no position has reached, and one that holds padding.
NOTHING, PADDING = -1, -2


def chunks(host: Host, seed: int) -> Any:
    """Tokens and bucket of each call, until the context is full: every bucket once, then prompts of random lengths."""
    rng = np.random.default_rng(seed)
    lengths = [*sorted(host.buckets, reverse=True), 1]
    while host.position < host.context:
        length = lengths.pop(0) if lengths else int(rng.integers(1, 30))
        prompt = rng.integers(0, 256, min(host.context - host.position, length))
        for count, bucket in host.plan(len(prompt)):
            chunk, prompt = prompt[:count], prompt[count:]
            yield chunk, bucket
            host.advance(chunk)
        assert not len(prompt)


def hosts(case: str, system: str, half: bool = True) -> tuple[Host, Any]:
    contract, states = contract_of(case, system, half)
    return Host(contract), states


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("case", CASES)
def test_inputs_are_those_of_the_function(case: str, system: str, half: bool) -> None:
    """Names, shapes and types, in every call of a whole context."""
    host, states = hosts(case, system, half)
    tables = len(host.contract["ngrams"].get("seeds", ()))
    buckets = set()
    for chunk, bucket in chunks(host, 0):
        ports = input_ports(states, bucket, tables, half, stateful(system))
        given = host.inputs(chunk, bucket)
        assert {n: (v.shape, str(v.dtype)) for n, v in given.items()} == {p.name: (p.shape, p.dtype) for p in ports}
        assert list(given["tokens"][: len(chunk)]) == list(chunk) and not given["tokens"][len(chunk) :].any()
        assert given["position"] == host.position
        buckets.add(bucket)
    assert buckets == {1, *host.buckets}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("case", ["small", "three orders"])
def test_ngrams_are_the_references(case: str, system: str) -> None:
    host, _ = hosts(case, system)
    facts = host.contract["ngrams"]
    seeds, history = torch.tensor(facts["seeds"]), torch.zeros(max(facts["orders"]) - 1, dtype=torch.int64)
    seen = set()
    for chunk, bucket in chunks(host, 1):
        given = host.inputs(chunk, bucket)
        position = torch.tensor([host.position])
        rows, valid, history = ngram_rows(
            torch.from_numpy(chunk), history, position, seeds, facts["orders"], facts["slots"]
        )
        assert (given["ngram_rows"][: len(chunk)] == rows.numpy()).all()
        assert (given["ngram_valid"][: len(chunk)] == valid.numpy()).all()
        seen.update(rows.flatten().tolist())
    assert len(seen) > 50


def test_ngrams_of_large_ids_wrap_as_the_references() -> None:
    """Ids near the end of int32: products go beyond 2^32 in every step."""
    host, _ = hosts("three orders", "ios18")
    facts = host.contract["ngrams"]
    tokens = np.array([2**31 - 1, 0, 2**31 - 2, 1, 2**30, 2**31 - 1], np.int64)
    rows, valid, _ = ngram_rows(
        torch.from_numpy(tokens),
        torch.zeros(len(host.history), dtype=torch.int64),
        torch.tensor([0]),
        torch.tensor(facts["seeds"]),
        facts["orders"],
        facts["slots"],
    )
    found = host.ngrams(tokens)
    assert (found[0] == rows.numpy()).all() and (found[1] == valid.numpy()).all()


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_have_the_rows_of_the_mask(case: str, system: str) -> None:
    """Also where the context is odd and a row of keys holds two positions."""
    host, states = hosts(case, system)
    masked = {p.name: p.shape[1] for p in input_ports(states, 1, 0, True, host.stateful) if p.name.endswith("mask")}
    for s in host.contract["state"]:
        if s["kind"] in ("keys", "values"):
            rows = masked["ring_mask" if s["ring"] else "mask"] - (not host.stateful)
            assert s["shape"][1] * s["side"] == rows >= s["rows"], s["name"]


class Rows:
    """Which position each row of a cache holds.

    Args:
        size: rows of the cache.
        ring: whether they wrap.
        states: the package writes them, one block of rows a call; otherwise the host does, row by row.
    """

    def __init__(self, size: int, ring: bool, states: bool) -> None:
        self.held = np.full(size, NOTHING)
        self.ring, self.states = ring, states

    def call(self, slot: int, position: int, count: int, bucket: int) -> Any:
        """Positions of the keys that a call's attention reads, in the mask's order; new rows are written."""
        new = np.where(np.arange(bucket) < count, position + np.arange(bucket), PADDING)
        if self.states and (bucket == 1 or not self.ring):
            assert slot + bucket <= len(self.held)
            self.held[slot : slot + bucket] = new
            return self.held
        keys = np.concatenate([self.held, new])
        assert not self.states or slot + bucket <= len(self.held)
        self.held[(slot + np.arange(count)) % len(self.held)] = new[:count]
        return keys


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("case", CASES)
def test_masks_show_each_query_what_it_may_see(case: str, system: str, seed: int) -> None:
    """Every real query sees each position up to its own once, a ring's only the last W, and nothing else."""
    host, _ = hosts(case, system)
    full = Rows(host.rows, False, host.stateful)
    ring = Rows(host.ring, True, host.stateful)
    masks = {"mask": full, "ring_mask": ring}
    for chunk, bucket in chunks(host, seed):
        given, count, at = host.inputs(chunk, bucket), len(chunk), host.position
        slots = given["slots"].tolist() if host.stateful else [at, at]
        assert not host.stateful or slots == [at, at % host.ring if host.ring else 0]
        for (name, cache), slot in zip(masks.items(), slots, strict=True):
            if not len(cache.held):
                assert name not in given
                continue
            keys = cache.call(slot, at, count, bucket)
            mask = given[name]
            assert mask.shape == (bucket, len(keys))
            assert set(np.unique(mask).tolist()) <= {0.0, MASKED}
            for query in range(count):
                oldest = max(0, at + query - host.ring + 1) if cache.ring else 0
                seen = sorted(keys[mask[query] == 0].tolist())
                assert seen == list(range(oldest, at + query + 1)), (name, at, query)
            assert (mask[count:] == 0).any(1).all(), "a query of padding must see something, or it isn't finite"
    assert host.position == host.context


@pytest.mark.parametrize("case", CASES)
def test_plans_cover_all_tokens_and_fit(case: str) -> None:
    """From every position and for every length that the context has room for."""
    host, _ = hosts(case, "ios18")
    for position in range(host.context):
        for length in range(1, host.context - position + 1):
            host.position = position
            steps = host.plan(length)
            assert sum(count for count, _ in steps) == length
            at = position
            for index, (count, bucket) in enumerate(steps):
                assert 1 <= count <= bucket and bucket in {1, *host.buckets}
                assert count == bucket or index == len(steps) - 1, "padding in the middle of a prompt"
                if bucket > 1:
                    assert at % host.align == 0 and bucket % host.align == 0
                    assert not host.rows or at + bucket <= host.rows
                    assert not host.ring or at % host.ring + bucket <= host.ring
                    assert count > 1 and count * TAIL_SHARE > bucket
                at += count


def test_a_long_prompt_goes_through_the_largest_bucket() -> None:
    host, _ = hosts("small", "ios18")
    assert host.plan(40) == [(16, 16), (16, 16), (8, 8)]
    assert host.plan(19) == [(16, 16), (3, 8)]
    assert host.plan(17) == [(16, 16), (1, 1)]
    host.advance([1])
    assert host.plan(9) == [(1, 1), (8, 8)], "a chunk begins where a row of keys begins"
    host.advance(range(9))
    assert host.plan(16) == [*[(1, 1)] * 6, (10, 16)], "no bucket fits before the ring's end"


def test_without_states_any_position_takes_any_bucket() -> None:
    host, _ = hosts("small", "ios17")
    for position in range(host.context):
        host.position = position
        assert host.plan(16) == [(16, 16)]


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_caches_that_the_host_keeps(case: str, half: bool) -> None:
    """New rows carry their positions: each lies where the reference has it, and padding nowhere."""
    host, states = hosts(case, "ios17", half)
    assert all(not held.any() and held.dtype == host.real for held in host.caches.values())
    for chunk, bucket in chunks(host, 2):
        at, outputs = host.position, {}
        for port in output_ports(states, host.vocab, bucket, half, False):
            value = np.full(port.shape, at + 0.5, port.dtype)
            if port.name.endswith("_rows"):
                numbers = np.where(np.arange(bucket) < len(chunk), at + np.arange(bucket) + 1, -7)
                value = np.broadcast_to(numbers[None, :, None], port.shape).astype(port.dtype)
            outputs[port.name] = value
        host.keep(outputs, len(chunk))
        last = at + len(chunk)
        for s in host.contract["state"]:
            held = host.caches.get(s["port"])
            if s["kind"] in ("keys", "values"):
                assert held is not None and held.shape == tuple(s["shape"])
                rows = np.arange(s["rows"])
                newest = last - 1 - (last - 1 - rows) % s["rows"]
                assert (held == np.where(newest >= 0, newest + 1, 0)[None, :, None]).all(), s["name"]
            elif s["port"]:
                assert held is not None and (held == at + 0.5).all()
    host.reset()
    assert host.position == 0 and not host.history.any()
    assert all(not held.any() for held in host.caches.values())


def test_a_reset_begins_a_sequence_anew() -> None:
    host, _ = hosts("three orders", "ios18")
    first = host.inputs([5, 6, 7], 8)
    host.advance([5, 6, 7])
    assert host.position == 3 and host.history.tolist() == [5, 6, 7]
    assert any((first[n] != v).any() for n, v in host.inputs([5, 6, 7], 8).items())
    host.reset()
    again = host.inputs([5, 6, 7], 8)
    assert all((first[n] == v).all() for n, v in again.items())
