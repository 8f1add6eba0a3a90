"""Where bytes go: by role of the weight, by rung of the ladder, by shape of the heads. Exact, in integers.

Everything here follows from a geometry or from a list of stored sizes; no weight is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.layout import ROLES, parameter_count, role_of, tensor_shapes
from needle_export.errors import UsageError

OVERHEAD_ROLE = "constant"
"""Stored numbers that are no weight of the model (masks, tables, shapes): they count as overhead."""

FULL_BITS = 16.0
"""The width checkpoints are published in."""

MAX_BITS = 64.0

Part = tuple[int, Sequence[tuple[str, int]]]
"""A stored tensor: its bytes, and how many elements of it serve which role."""


class Share(Protocol):
    """Elements of a stored tensor that come from one checkpoint tensor; see ``targets.base.WeightShare``."""

    @property
    def source(self) -> str:
        """The checkpoint tensor."""

    @property
    def role(self) -> str:
        """What it is for."""

    @property
    def layer(self) -> int:
        """The block as built, from 0; -1 outside the stack."""

    @property
    def elements(self) -> int:
        """How many."""


@dataclass(frozen=True)
class Rung:
    """A depth of the ladder: trained parameters, and bytes at the width asked for."""

    depth: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class HeadShape:
    """What a model would weigh with other head widths.

    Attributes:
        qk: width of a query and key head, elements.
        v: width of a value head, elements.
        parameters: of the whole model.
        bytes: of the whole model, at the width asked for.
        delta_bytes: against the model's own head widths.
        routing_bytes: q and k: where to look.
        content_bytes: v, gate and out: what may be written.
        kv_cache_bytes: keys and values of all layers at the context asked for.
        current: whether these are the model's own widths.
    """

    qk: int
    v: int
    parameters: int
    bytes: int
    delta_bytes: int
    routing_bytes: int
    content_bytes: int
    kv_cache_bytes: int
    current: bool


def elements_by_role(geometry: Geometry) -> dict[str, int]:
    """Trained parameters by role, in the order of ``ROLES``; roles the model lacks are there with 0."""
    out = dict.fromkeys(ROLES, 0)
    for name, shape in tensor_shapes(geometry).items():
        out[role_of(name)] += math.prod(shape)
    return out


def byte_ledger(geometry: Geometry, bits: float = FULL_BITS) -> dict[str, int]:
    """Bytes by role when every weight takes ``bits`` bits; the sum is the model's size, rounded up once.

    Raises:
        UsageError: when the width isn't above 0 and at most 64.
    """
    elements = elements_by_role(geometry)
    total = model_bytes(sum(elements.values()), bits)
    return dict(zip(elements, apportion(total, list(elements.values())), strict=True))


def rung_sizes(geometry: Geometry, bits: float = FULL_BITS) -> list[Rung]:
    """Every depth of the ladder, shallowest first; a rung loses the engram sites of dropped blocks.

    Raises:
        UsageError: when the width isn't above 0 and at most 64.
    """
    # The ladder's slicing needs numpy, which nothing else here does.
    from needle_export.checkpoint.ladder import ladder_geometry

    out = []
    for depth in range(min(2, geometry.num_layers), geometry.num_layers + 1):
        rung = geometry if depth == geometry.num_layers else ladder_geometry(geometry, depth)
        count = parameter_count(rung)
        out.append(Rung(depth, count, model_bytes(count, bits)))
    return out


def head_shapes_table(geometry: Geometry, shapes: Iterable[tuple[int, int]], bits: float = FULL_BITS, *,
                      context: int = 1024, cache_bits: int = 16) -> list[HeadShape]:
    """What head widths (qk, v) would cost, in the order given, each next to the model's own.

    Args:
        geometry: the model.
        shapes: pairs of widths in elements.
        bits: of a weight.
        context: tokens the cache holds.
        cache_bits: of an element of the cache.

    Raises:
        UsageError: for a width that no such model can have.
    """
    own = model_bytes(parameter_count(geometry), bits)
    rows = []
    for qk, v in shapes:
        if qk < 2 or qk % 2 or v < 1:
            raise UsageError(f"{qk}/{v} can't be: q and k need an even width of at least 2, v one of at "
                             "least 1", where="--head")
        other = dataclasses.replace(geometry, qk_head_dim=qk, v_head_dim=v)
        ledger, count = byte_ledger(other, bits), parameter_count(other)
        size = model_bytes(count, bits)
        rows.append(HeadShape(
            qk=qk, v=v, parameters=count, bytes=size, delta_bytes=size - own,
            routing_bytes=ledger["routing"], content_bytes=ledger["content"],
            kv_cache_bytes=kv_cache_bytes(other, context, cache_bits),
            current=(qk, v) == (geometry.qk_head_dim, geometry.v_head_dim)))
    return rows


def kv_cache_bytes(geometry: Geometry, context: int, bits: int = 16) -> int:
    """Keys and values of all layers: local layers keep their window, global ones the whole context.

    Raises:
        UsageError: when the context isn't at least one token.
    """
    if context < 1:
        raise UsageError(f"{context} is below 1", where="--context")
    g = geometry
    window = min(g.sliding_window or context, context)
    rows = sum(context if layer in g.global_layers else window for layer in range(g.num_layers))
    return -(-rows * g.num_kv_heads * (g.qk_head_dim + g.v_head_dim) * bits // 8)


def model_bytes(parameters: int, bits: float) -> int:
    """Bytes of that many weights, rounded up.

    Raises:
        UsageError: when the width isn't above 0 and at most 64.
    """
    if not 0 < bits <= MAX_BITS:  # also false for NaN
        raise UsageError(f"{bits:g} bits a weight can't be", where="--bits",
                         fix=f"choose a width above 0 and up to {MAX_BITS:g}")
    return math.ceil(parameters * Fraction(bits) / 8)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Splits ``total`` in proportion to ``weights`` by largest remainder, so that the parts sum to it.

    Ties go to the earlier part. Without any weight, nothing can be split: ``total`` must then be 0.

    Raises:
        ValueError: for a negative number, or a total with no weight to carry it.
    """
    whole = sum(weights)
    if total < 0 or any(weight < 0 for weight in weights) or (total and not whole):
        raise ValueError(f"{total} can't be split in proportion to {list(weights)}")
    if not whole:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    remainders = [total * weight % whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda index: (-remainders[index], index))
    for index in by_remainder[:total - sum(parts)]:
        parts[index] += 1
    return parts


def ledger_from_parts(parts: Iterable[Part], total_bytes: int) -> tuple[dict[str, int], int]:
    """The ledger of stored files: what each role takes, and what is left over.

    Args:
        parts: every stored tensor as (bytes, [(role, elements)]); a tensor that was fused from weights of
            several roles names them all. The role ``constant`` counts as overhead.
        total_bytes: of the files together.

    Returns:
        (bytes by role, overhead bytes), which sum to ``total_bytes`` exactly. Only roles that occur are
        named, in the order of ``ROLES``.

    Raises:
        ValueError: for an unknown role, or when the parts take more than the files have.
    """
    found: dict[str, int] = {}
    for size, shares in parts:
        split = apportion(size, [elements for _, elements in shares])
        for (role, _), part in zip(shares, split, strict=True):
            if role != OVERHEAD_ROLE and role not in ROLES:
                raise ValueError(f"there is no role {role!r}")
            found[role] = found.get(role, 0) + part
    found.pop(OVERHEAD_ROLE, None)
    by_role = {role: found[role] for role in ROLES if role in found}
    weights = sum(by_role.values())
    if weights > total_bytes:
        raise ValueError(f"the weights take {weights} bytes, more than the files' {total_bytes}")
    return by_role, total_bytes - weights


def bytes_by_tensor(weights: Iterable[tuple[int, Sequence[Share]]], layers: int,
                    ) -> list[tuple[str, str, int, list[int]]]:
    """The same stored weights by checkpoint tensor; sums by role are those of :func:`ledger_from_parts`, exactly.

    Args:
        weights: every stored tensor as (bytes, shares); constants are left out.
        layers: blocks of the model as built.

    Returns:
        (tensor, role, bytes, bytes of each block), the largest first; no blocks for tensors outside the stack.
    """
    found: dict[tuple[str, str], int] = {}
    inside: dict[tuple[str, str], list[int]] = {}
    for size, shares in weights:
        for share, part in zip(shares, apportion(size, [s.elements for s in shares]), strict=True):
            if share.role == OVERHEAD_ROLE:
                continue
            key = share.source, share.role
            found[key] = found.get(key, 0) + part
            if share.layer >= 0:
                inside.setdefault(key, [0] * layers)[share.layer] += part
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [(name, role, size, inside.get((name, role), [])) for (name, role), size in ordered]
