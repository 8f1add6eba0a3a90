"""What a decode step carries, and how many bytes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needle_export.checkpoint.geometry import ENGRAM_CONV_TAPS, Geometry
from needle_export.errors import UsageError
from needle_export.graph.reference import PROBE_START

_BYTES = {"float32": 4, "int64": 8, "float16": 2, "int8": 1}

#: What a cache's elements are, by its form.
_ELEMENTS = {"fp32": "float32", "fp16": "float16", "int8": "int8"}


@dataclass(frozen=True)
class StateSpec:
    """One state tensor of a cached step.

    Attributes:
        name: stable name, ``k_00`` to ``engram_history``.
        part: what it counts towards in the report (``keys``, ``values``, ``taps``, ``tokens``, ``engram``, ``probes``).
        shape: full size; caches have rows first ([S, G, D]).
        dtype: ``float32`` or ``int64``; of a cache as an artifact keeps it, also ``float16`` or ``int8``.
        cache: whether rows are written in place by position (rows a host may bind partially).
        ring: whether the cache wraps (``position mod S``).
        layer: the layer it belongs to, or -1.
        head: the probe head that it belongs to, or empty; a step returns such a state whole.
        initial: its value before the first token.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    cache: bool = False
    ring: bool = False
    layer: int = -1
    head: str = ""
    initial: float = 0.0

    @property
    def bytes(self) -> int:
        """Size at the full context in bytes."""
        size = _BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


def cache_rows(geometry: Geometry, layer: int, context: int) -> tuple[int, bool]:
    """Rows of a layer's cache at a context, and whether it is a ring.

    A local layer keeps ``sliding_window`` rows; where the context is no longer than that, nothing ever
    wraps.
    """
    window = geometry.sliding_window
    if not window or layer in geometry.global_layers or context <= window:
        return context, False
    return window, True


def probe_state(head: str) -> tuple[str, str, str]:
    """Names of a probe head's state: largest scores [M, P, 1], sums of weights [M, P, 1], weighted sums [M, P, C]."""
    return f"probe_{head}_max", f"probe_{head}_sum", f"probe_{head}_pool"


def state_specs(geometry: Geometry, context: int, heads: tuple[str, ...] = ()) -> tuple[StateSpec, ...]:
    """Every state tensor at a context, in the order in which a step takes and returns them.

    Args:
        heads: probe heads that the step feeds, each with a state of its own behind everything else.

    Raises:
        UsageError: a context below 2 or above the model's ``max_seq_len``, or a head that the model hasn't.
    """
    if not 2 <= context <= geometry.max_seq_len:
        raise UsageError(
            f"a context of {context} positions is outside 2..{geometry.max_seq_len}",
            where="--context",
            fix="choose a length that the model was trained for",
        )
    specs: list[StateSpec] = []
    for layer in range(geometry.num_layers):
        rows, ring = cache_rows(geometry, layer, context)
        for part, letter, width in (
            ("keys", "k", geometry.qk_head_dim),
            ("values", "v", geometry.v_head_dim),
        ):
            shape = (rows, geometry.num_kv_heads, width)
            specs.append(StateSpec(f"{letter}_{layer:02d}", part, shape, cache=True, ring=ring, layer=layer))
    if geometry.qkv_conv_taps > 1:
        for layer in range(geometry.num_layers):
            shape2 = (geometry.qkv_conv_taps - 1, geometry.conv_channels)
            specs.append(StateSpec(f"taps_{layer:02d}", "taps", shape2, layer=layer))
    if geometry.engram_layers:
        sites = len(geometry.engram_layers)
        reach = max(geometry.engram_orders)
        if reach > 1:
            specs.append(StateSpec("token_history", "tokens", (reach - 1,), dtype="int64"))
        rows = (ENGRAM_CONV_TAPS - 1) * reach
        specs.append(StateSpec("engram_history", "engram", (rows, sites * geometry.d_model)))
    known = {h.name: h for h in geometry.heads}
    for head in heads:
        if head not in known:
            raise no_such_head(head, known)
        probes = (geometry.num_layers + 1, known[head].probes)
        for name, width, initial in zip(
            probe_state(head), (1, 1, geometry.d_model), (PROBE_START, 0.0, 0.0), strict=True
        ):
            specs.append(StateSpec(name, "probes", (*probes, width), head=head, initial=initial))
    return tuple(specs)


def stored_states(specs: tuple[StateSpec, ...], form: str) -> tuple[StateSpec, ...]:
    """The states as an artifact with caches of a form keeps them.

    A cache of int8 [S, G, D] has a second one behind it, called ``_scale`` after it: float32 [S, G, 1].

    Args:
        form: of keys and values: ``fp32``, ``fp16`` or ``int8``.
    """
    kept: list[StateSpec] = []
    for spec in specs:
        if not spec.cache:
            kept.append(spec)
            continue
        kept.append(replace(spec, dtype=_ELEMENTS[form]))
        if form == "int8":
            kept.append(replace(spec, name=f"{spec.name}_scale", shape=(*spec.shape[:-1], 1)))
    return tuple(kept)


def no_such_head(name: str, known: Iterable[str]) -> UsageError:
    """The error of asking for a probe head that a checkpoint hasn't."""
    return UsageError(f"this checkpoint has no {name} head", fix=f"it has: {', '.join(known) or 'none'}")


def empty_state(specs: tuple[StateSpec, ...]) -> dict[str, Tensor]:
    """State tensors before the first token, by name."""
    return {s.name: torch.full(s.shape, s.initial, dtype=getattr(torch, s.dtype)) for s in specs}


def state_bytes(specs: tuple[StateSpec, ...]) -> dict[str, int]:
    """Bytes of state by part, with their ``total``."""
    parts: dict[str, int] = {}
    for spec in specs:
        parts[spec.part] = parts.get(spec.part, 0) + spec.bytes
    return {**parts, "total": sum(parts.values())}
