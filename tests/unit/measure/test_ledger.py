"""Ledgers: exact sums, and the published model's known numbers."""

from __future__ import annotations

import math
import random

import pytest

from needle_export.checkpoint.dimensions import PUBLISHED, SMALL, Geometry
from needle_export.checkpoint.ladder import ladder_geometry
from needle_export.checkpoint.layout import ROLES, parameter_count
from needle_export.errors import UsageError
from needle_export.measure.ledger import (
    apportion,
    byte_ledger,
    bytes_by_tensor,
    elements_by_role,
    head_shapes_table,
    kv_cache_bytes,
    ledger_from_parts,
    model_bytes,
    rung_sizes,
)
from needle_export.targets.base import WeightShare
from tests.support.geometries import VARIANTS

PUBLISHED_PARAMETERS = 121_019_861


def test_the_published_ledger_is_that_of_the_file() -> None:
    ledger = byte_ledger(PUBLISHED)
    # Counted by hand from the widths: 12 query and 2 key heads of 48, 2 value and 12 gate heads of 64.
    assert ledger["vocabulary"] == 2 * 8192 * 768
    assert ledger["memory"] == 2 * 5 * (6 * 18432 * 128 + 2 * 768 * 768 + 4 * 768)
    assert ledger["routing"] == 2 * 20 * (768 * 14 * 48 + 3 * 14 * 48)
    assert ledger["content"] == 2 * 20 * (768 * 2 * 64 + 2 * 768 * 12 * 64 + 3 * 2 * 64 + 1)
    assert ledger["norms"] == 2 * (20 * (3 * 768 + 2 * 48) + 768)
    assert list(ledger) == list(ROLES)
    assert sum(ledger.values()) == 2 * PUBLISHED_PARAMETERS


@pytest.mark.parametrize("geometry", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("bits", [0.5, 2, 2.14, 3, 4, 4.15, 16, 32])
def test_a_ledger_sums_to_the_model_at_any_width(geometry: Geometry, bits: float) -> None:
    assert sum(elements_by_role(geometry).values()) == parameter_count(geometry)
    ledger = byte_ledger(geometry, bits)
    assert sum(ledger.values()) == model_bytes(parameter_count(geometry), bits)
    for role, elements in elements_by_role(geometry).items():
        assert abs(ledger[role] - elements * bits / 8) < 1


def test_model_bytes_are_exact_and_rounded_up() -> None:
    assert model_bytes(PUBLISHED_PARAMETERS, 16) == 242_039_722
    assert model_bytes(1, 4) == 1
    assert model_bytes(3, 4) == 2
    assert model_bytes(10**18 + 1, 8) == 10**18 + 1  # beyond a float's whole numbers


@pytest.mark.parametrize("bits", [0, -4, 65, math.nan, math.inf])
def test_impossible_widths_are_refused(bits: float) -> None:
    with pytest.raises(UsageError, match=r"--bits: .* bits a weight can't be"):
        byte_ledger(SMALL, bits)


def test_rungs_are_those_of_the_ladder() -> None:
    rungs = rung_sizes(PUBLISHED, 4)
    assert [rung.depth for rung in rungs] == list(range(2, 21))
    assert rungs[-1].parameters == PUBLISHED_PARAMETERS
    assert [rung.parameters for rung in rungs] == sorted(rung.parameters for rung in rungs)
    for rung in rungs[:-1]:
        assert rung.parameters == parameter_count(ladder_geometry(PUBLISHED, rung.depth))
        assert rung.bytes == math.ceil(rung.parameters / 2)
    # Both ends, so the site of the last block, come first: 19 is in the rung of 2, 3 and 7 are not.
    site = 6 * 18432 * 128 + 2 * 768 * 768 + 4 * 768
    assert rungs[-1].parameters - rungs[-2].parameters < site
    assert rungs[0].parameters > site


def test_rungs_of_shallow_models() -> None:
    assert [rung.depth for rung in rung_sizes(SMALL.with_layers(2))] == [2]
    assert [rung.depth for rung in rung_sizes(SMALL.with_layers(1))] == [1]


def test_head_shapes_tell_what_the_authors_measured() -> None:
    wide, own, narrow = head_shapes_table(PUBLISHED, [(64, 64), (48, 64), (48, 54)], 16, context=1024)
    assert own.current
    assert not wide.current
    assert own.delta_bytes == 0
    assert own.parameters == PUBLISHED_PARAMETERS
    # Sixteen more channels for each of 14 query and key heads: kernel, taps, and the two norms.
    assert wide.parameters - own.parameters == 20 * (14 * 16 * (768 + 3) + 2 * 16)
    assert wide.delta_bytes == wide.bytes - own.bytes == 2 * (wide.parameters - own.parameters)
    assert wide.content_bytes == own.content_bytes
    assert narrow.routing_bytes == own.routing_bytes
    assert narrow.content_bytes < own.content_bytes
    assert own.kv_cache_bytes == 20 * 1024 * 2 * (48 + 64) * 2
    assert wide.kv_cache_bytes == 20 * 1024 * 2 * (64 + 64) * 2


@pytest.mark.parametrize("shape", [(47, 64), (0, 64), (-2, 64), (48, 0)])
def test_impossible_head_widths_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"{shape[0]}/{shape[1]} can't be"):
        head_shapes_table(SMALL, [shape])


def test_local_layers_keep_their_window_only() -> None:
    row = 2 * (48 + 64) * 2
    assert kv_cache_bytes(PUBLISHED, 4096) == (16 * 1024 + 4 * 4096) * row
    assert kv_cache_bytes(PUBLISHED, 100) == 20 * 100 * row
    assert kv_cache_bytes(VARIANTS["no_window"], 4096) == 3 * 4096 * row
    assert kv_cache_bytes(PUBLISHED, 1, bits=3) == math.ceil(20 * 2 * 112 * 3 / 8)
    with pytest.raises(UsageError, match="--context"):
        kv_cache_bytes(PUBLISHED, 0)


def test_apportioning_sums_exactly_and_is_fair() -> None:
    rng = random.Random(0)
    for _ in range(300):
        weights = [rng.choice([0, rng.randrange(1, 10**9)]) for _ in range(rng.randrange(1, 9))]
        total = rng.randrange(0, 10**12) if any(weights) else 0
        parts = apportion(total, weights)
        assert sum(parts) == total
        for part, weight in zip(parts, weights, strict=True):
            assert sum(weights) == 0 or abs(part * sum(weights) - total * weight) < sum(weights)


def test_apportioning_by_largest_remainder() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(10, [5, 3, 1]) == [6, 3, 1]
    assert apportion(7, [0, 1, 0]) == [0, 7, 0]
    assert apportion(0, []) == []
    for total, weights in ((1, []), (1, [0, 0]), (-1, [1]), (1, [2, -1])):
        with pytest.raises(ValueError, match="can't be split"):
            apportion(total, weights)


def test_stored_parts_sum_to_the_files() -> None:
    parts = [(100, [("routing", 10), ("content", 20)]), (7, [("content", 1)]), (50, [("constant", 5)]),
             (9, [("constant", 1), ("norms", 2)])]
    by_role, overhead = ledger_from_parts(parts, 200)
    assert by_role == {"routing": 33, "content": 74, "norms": 6}
    assert list(by_role) == ["routing", "content", "norms"]
    assert overhead == 87  # 50 + 3 of constants, 34 of the file that is no weight at all
    assert sum(by_role.values()) + overhead == 200
    assert ledger_from_parts([], 5) == ({}, 5)


def test_stored_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="no role 'biases'"):
        ledger_from_parts([(1, [("biases", 1)])], 1)
    with pytest.raises(ValueError, match="more than the files' 9"):
        ledger_from_parts([(10, [("norms", 1)])], 9)


def test_bytes_by_tensor_make_the_roles_exactly() -> None:
    stored = [
        (10, [WeightShare("stack/q", "routing", 0, 2), WeightShare("stack/v", "content", 0, 1)]),
        (7, [WeightShare("stack/q", "routing", 1, 1), WeightShare("stack/v", "content", 1, 1)]),
        (4, [WeightShare("embedding", "vocabulary", -1, 8)]),
        (3, [WeightShare("embedding", "vocabulary", -1, 2)]),  # its scales
        (5, [WeightShare("mask", "constant", -1, 5)]),
    ]
    found = bytes_by_tensor(stored, 3)
    assert found == [
        ("stack/q", "routing", 11, [7, 4, 0]), ("embedding", "vocabulary", 7, []), ("stack/v", "content", 6, [3, 3, 0])]
    by_role, overhead = ledger_from_parts([(b, [(s.role, s.elements) for s in shares]) for b, shares in stored], 40)
    assert by_role == {role: size for _, role, size, _ in found}
    assert overhead == 40 - 24
