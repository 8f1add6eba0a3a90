"""Contracts of Core ML packages for small geometries, without building any."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from needle_export.checkpoint.geometry import SMALL, Geometry
from needle_export.graph.reference import hash_seeds
from needle_export.model.state import StateSpec, state_specs
from needle_export.targets.coreml.contract import contract_json, facts
from tests.support.geometries import VARIANTS

#: Geometry, context and prefill lengths: full caches beside rings, rings alone, no rings, no n-grams, three orders.
CASES: dict[str, tuple[Geometry, int, tuple[int, ...]]] = {
    "small": (SMALL, 70, (8, 16)),
    "rings only": (dataclasses.replace(SMALL, global_layers=()), 70, (4, 8, 16)),
    "no rings": (VARIANTS["no_window"], 41, (4, 8)),
    "short context": (SMALL, 15, (8,)),
    "no n-grams": (VARIANTS["no_engram"], 40, (8,)),
    "three orders": (VARIANTS["orders"], 50, (8,)),
    "keys in rows of their own": (VARIANTS["lanes"], 50, (5, 8)),
    "such keys, no rings": (dataclasses.replace(VARIANTS["lanes"], sliding_window=0, global_layers=()), 50, (5, 8)),
    "decode only": (SMALL, 40, ()),
}


def ngram_facts(geometry: Geometry) -> dict[str, Any]:
    """Seeds, orders and slots as a package states them; empty without an n-gram memory."""
    if not geometry.engram_layers:
        return {}
    orders = list(geometry.engram_orders)
    seeds = hash_seeds(orders, geometry.engram_heads, geometry.engram_seed_heads)
    return {"seeds": seeds, "orders": orders, "slots": geometry.engram_slots}


def contract_of(case: str, system: str, half: bool = True) -> tuple[dict[str, Any], tuple[StateSpec, ...]]:
    """What a package of a case says to its host, and the states of its step."""
    geometry, context, buckets = CASES[case]
    states = state_specs(geometry, context)
    known = facts(states, geometry.head_vocab, context, buckets, ngram_facts(geometry), system, half)
    return json.loads(contract_json(known, {"needle.tool": "test"})), states
