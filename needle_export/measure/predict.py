"""How large an artifact will be, before anything is built: weights by shape and scheme, the rest by facts from builds.

What files hold besides weights (graphs, host code, constants, padding) grows with blocks, engram sites and prefill
lengths. ``overheads.json`` has what each of these takes in each kind of graph; ``python -m tests.benchmarks.overheads``
measures it. Sizes are within 1 % of a build's at the published geometry (``tests/e2e/test_predicted.py``); of toys,
whose files are graph for the most part, within 5 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.layout import ROLES
from needle_export.config.options import SYSTEMS, BuildOptions, usual_buckets
from needle_export.measure.inventory import Imported, Stores, Tensor, inventory, no_codes

#: What builds told of everything but weights.
FACTS = Path(__file__).with_name("overheads.json")

_CODES = ("cq4", "cq2", "codebook")

#: Bytes of a cache's element, and of the scale beside a row of one head.
_CACHE = {"fp32": (4, 0), "fp16": (2, 0), "int8": (1, 4)}


@dataclass(frozen=True)
class Predicted:
    """What a build is going to make.

    Attributes:
        total_bytes: of all files.
        by_role: of weights.
        overhead_bytes: of all else.
        state_bytes: of a session at the context, by part.
        buckets: lengths of prefill functions; empty where a prefill has any length.
        weights: every weight with its bytes.
    """

    total_bytes: int
    by_role: dict[str, int]
    overhead_bytes: int
    state_bytes: dict[str, int]
    buckets: tuple[int, ...]
    weights: tuple[tuple[Tensor, int], ...]


def predict(options: BuildOptions, geometry: Geometry, imported: Imported = no_codes) -> Predicted:
    """Sizes of what a build makes.

    Args:
        geometry: of the rung.
        imported: the codes that the checkpoint holds.
    """
    buckets = buckets_of(options, geometry)
    stores = stores_of(options, geometry, imported)
    found = inventory(geometry, stores, options.heads)
    by_role = dict.fromkeys(ROLES, 0)
    for tensor, size in found:
        by_role[tensor.role] += size
    stored = sum(by_role.values())
    rest = _overhead(options, geometry, buckets, found)
    # Below iOS 18 every function is a package with weights of its own.
    rest += 0 if stores.stateful else stored * len(buckets)
    return Predicted(
        stored + rest, {role: size for role, size in by_role.items() if size}, rest,
        state_bytes(options, geometry), buckets, tuple(found),
    )


def stores_of(options: BuildOptions, geometry: Geometry, imported: Imported = no_codes) -> Stores:
    """How the target of a build stores weights of a model."""
    reach = (geometry.engram_conv_taps - 1) * geometry.engram_dilation + 1
    prefill = options.target == "onnx" or bool(buckets_of(options, geometry))
    return Stores(options.target, options.schemes, reach, prefill, imported, options.os != SYSTEMS[0])


def buckets_of(options: BuildOptions, geometry: Geometry) -> tuple[int, ...]:
    """Prefill lengths of a target with fixed shapes: those asked for, or the usual ones that fit."""
    if options.target == "onnx":
        return ()
    if options.buckets is not None:
        return options.buckets
    return usual_buckets(longest_chunk(options, geometry))


def longest_chunk(options: BuildOptions, geometry: Geometry) -> int:
    """Tokens that a prefill may take at most: as many as the shortest cache has rows."""
    return _window(geometry, options.context) or options.context


def _window(geometry: Geometry, context: int) -> int:
    """Rows of the rings, or 0 where no cache is one."""
    local = geometry.num_layers > len(geometry.global_layers)
    return geometry.sliding_window if local and 0 < geometry.sliding_window < context else 0


def state_bytes(options: BuildOptions, geometry: Geometry) -> dict[str, int]:
    """What a session keeps between steps, by part, as a report has it."""
    g, context = geometry, options.context
    element, scale = _CACHE[options.cache_form]
    window = _window(g, context) or context
    rows = sum(context if layer in g.global_layers else window for layer in range(g.num_layers)) * g.num_kv_heads
    parts = {"keys": rows * (g.qk_head_dim * element + scale), "values": rows * (g.v_head_dim * element + scale)}
    if g.qkv_conv_taps > 1:
        parts["taps"] = 4 * g.num_layers * (g.qkv_conv_taps - 1) * g.conv_channels
    if g.engram_layers:
        if g.engram_dilation > 1:
            parts["tokens"] = 8 * (g.engram_dilation - 1)
        parts["engram"] = 4 * (g.engram_conv_taps - 1) * g.engram_dilation * len(g.engram_layers) * g.d_model
    for name in options.heads:
        head = g.head(name)
        if head is not None:
            probes = (g.num_layers + 1) * head.probes
            parts["probes"] = parts.get("probes", 0) + 4 * probes * (2 + g.d_model)
    return parts


@cache
def facts() -> dict[str, Any]:
    """What builds told."""
    told: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
    return told


def _overhead(
    options: BuildOptions, g: Geometry, buckets: tuple[int, ...], found: list[tuple[Tensor, int]]
) -> int:
    told = facts()[options.target]
    shares = kinds_of(options, found)
    total = sum(share * _grown(told["kinds"][kind], g, len(buckets)) for kind, share in shares.items())
    for name, times in _changes(options):
        total += times * _grown(told["changes"][name], g, len(buckets))
    return max(0, round(total))


def _grown(parts: Mapping[str, float], g: Geometry, buckets: int) -> float:
    """A kind of graph's bytes at a size; widths count from the measured one on."""
    wider = g.d_model - facts()["widths"][1]
    fixed: float = parts["fixed"] + wider * parts.get("fixed_width", 0) + buckets * parts.get("prefill", 0)
    layer: float = parts["layer"] + wider * parts.get("layer_width", 0) + buckets * parts.get("prefill_layer", 0)
    return fixed + g.num_layers * layer + len(g.engram_layers) * parts.get("site", 0)


def kinds_of(options: BuildOptions, found: Sequence[tuple[Tensor, int]]) -> dict[str, float]:
    """Which kinds of graph an artifact is, by share of its products."""
    rules, counts = options.schemes, dict[str, int]()
    for tensor, _ in found:
        if tensor.kind in ("table", "matrix"):
            kind = kind_of(options.target, rules.scheme(tensor.source, tensor.role))
            counts[kind] = counts.get(kind, 0) + 1
    whole = sum(counts.values())
    return {kind: count / whole for kind, count in counts.items()}


def kind_of(target: str, scheme: str) -> str:
    """The kind of graph that a scheme makes; graphs of one kind are the same but for numbers."""
    if target == "tflite" or scheme in ("fp32", "fp16"):
        return scheme
    return "codes" if scheme in _CODES else "integers"


def _changes(options: BuildOptions) -> list[tuple[str, int]]:
    """What else the graph depends on, and how often."""
    if options.target == "onnx":
        opset = [] if options.opset == 24 else [(f"opset {options.opset}", 1)]
        return opset + ([] if options.cache_form == "fp32" else [(f"cache {options.cache_form}", 1)])
    if options.target == "tflite":
        return [("head", len(options.heads))] if options.heads else []
    return [("ios17", 1)] if options.os == SYSTEMS[0] else []
