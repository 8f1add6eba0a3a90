"""How often each rewrite must fire on a model, and what it means when one doesn't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from needle_export.checkpoint.geometry import Geometry, role_of
from needle_export.errors import FusionFailed
from needle_export.graph.passes.base import Left


@dataclass(frozen=True)
class Promise:
    """Expected firings of one rewrite: so many in every layer, and so many more outside or in some.

    Attributes:
        uneven: how many in each layer, where they differ; then ``per_layer`` is the least.
    """

    per_layer: int
    extra: int
    uneven: tuple[int, ...] = ()

    def total(self, layers: int) -> int:
        """Expected firings in a model of this depth."""
        return (sum(self.uneven) if self.uneven else self.per_layer * layers) + self.extra

    def of(self, layer: int) -> int:
        """Expected firings in a layer."""
        return self.uneven[layer] if self.uneven else self.per_layer


#: Matrices that read the same input: of a block, and of the engram.
_ATTENTION = tuple(f"stack/layers/block/self_attn/{name}_proj/kernel" for name in ("q", "k", "v", "gate"))
_ENGRAM = ("engrams/key_proj/kernel", "engrams/value_proj/kernel")


def promises(
    geometry: Geometry, heads: int = 0, scheme_of: Callable[[str, str, int], str] = lambda source, role, layer: ""
) -> dict[str, Promise]:
    """What the passes owe a step of this geometry that feeds so many probe heads.

    Args:
        scheme_of: a tensor's number format by name, role and layer: only those of one format are merged.
    """
    sites = len(geometry.engram_layers)

    def merged(names: Iterable[str], layer: int) -> int:
        formats = Counter(scheme_of(n, role_of(n.replace("engrams/", "engrams_0/")), layer) for n in names)
        return sum(count > 1 for count in formats.values())

    attention = tuple(merged(_ATTENTION, layer) for layer in range(geometry.num_layers))
    uneven = attention if len(set(attention)) > 1 else ()
    taps = int(geometry.qkv_conv_taps > 1)
    owed = {
        "cached_attention": Promise(1, 0),
        # Stream, block input, query, key, attention output, MLP input; the final norm; input and key at a site.
        "rms_norm": Promise(6, 1 + 2 * sites),
        "rotary": Promise(2, 0),
        "sinkhorn": Promise(1, 0),
        "causal_taps": Promise(taps, min(sites, 1)),
        "kronecker": Promise(3, 0),
        "scaled_linear": Promise(3, 0),
        "lane_read": Promise(1, 0),
        "lane_write": Promise(1, 0),
        "ngram_rows": Promise(0, min(sites, 1)),
        "row_dot": Promise(0, sites),
        "merge_projections": Promise(min(attention), min(sites, 1) * merged(_ENGRAM, -1), uneven),
        "join_heads": Promise(1, 0),
        "cancel_residual": Promise(1, 0),
        "fold_gates": Promise(1, 0),
        "probe_absorb": Promise(0, heads),
    }
    return {name: p for name, p in owed.items() if p.total(geometry.num_layers)}


def check(
    geometry: Geometry,
    counts: Mapping[str, int],
    places: Iterable[tuple[str, int]],
    left: Iterable[Left],
    heads: int = 0,
    scheme_of: Callable[[str, str, int], str] = lambda source, role, layer: "",
) -> None:
    """Compare what fired with what is owed.

    Args:
        counts: firings by rewrite.
        places: (rewrite, layer) of every firing.
        left: places looked at and refused, most promising first.
        heads: how many probe heads the step feeds.
        scheme_of: a tensor's number format by name, role and layer.

    Raises:
        FusionFailed: naming the rewrite, the first layer that lacks it and the reason.
    """
    _hold(promises(geometry, heads, scheme_of), geometry.num_layers, counts, list(places), list(left))


def check_head(counts: Mapping[str, int], left: Iterable[Left]) -> None:
    """As :func:`check`, of a program that answers from a probe head's pools: it is one op, whatever the geometry."""
    _hold({"probe_answer": Promise(0, 1)}, 0, counts, [], list(left))


def _hold(
    owed: Mapping[str, Promise],
    layers: int,
    counts: Mapping[str, int],
    where: list[tuple[str, int]],
    refusals: list[Left],
) -> None:
    for name, promise in owed.items():
        expected, fired = promise.total(layers), counts.get(name, 0)
        if fired >= expected:
            continue
        layer = first_missing(name, promise, layers, where)
        at = -1 if layer is None else layer
        reason = next((x.reason for x in refusals if x.op == name and x.layer == at), "no place looks like it")
        spot = f"block {layer}" if layer is not None else "the model"
        raise FusionFailed(
            f"{name} was promised {expected} times and fired {fired}: in {spot}, {reason}",
            where=name,
            fix="nothing was published; report the checkpoint's geometry with this message",
        )


def first_missing(name: str, promise: Promise, layers: int, places: Iterable[tuple[str, int]]) -> int | None:
    """The first layer in which a rewrite fired less often than in every layer it should, or None."""
    found = [layer for op, layer in places if op == name]
    return next((i for i in range(layers) if found.count(i) < promise.of(i)), None)
