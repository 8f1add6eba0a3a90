"""Rungs: every depth from 2 to L of a checkpoint is a model that was trained.

Kept blocks are a prefix of one selection order, so rungs nest. The order is both ends, then again and
again the middle of the widest gap, the first on ties; a rung that was cut out carries its parent's order.
Definition: the public cactus-needle package, ``needle.model.architecture``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from needle_export.checkpoint.cq import PackedTensor
from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.layout import is_probe_rows, layer_axis
from needle_export.checkpoint.loaded import Checkpoint
from needle_export.checkpoint.store import Array, Entry, TensorStore
from needle_export.errors import UsageError


def ladder_order(geometry: Geometry) -> tuple[int, ...]:
    """Blocks in the order in which growing rungs take them in, a permutation of 0 to L - 1."""
    return geometry.ladder_order or bisection_order(geometry.num_layers)


def bisection_order(num_layers: int) -> tuple[int, ...]:
    """Both ends, then the middle (rounded down) of the widest gap, the first one on ties."""
    order = [0] if num_layers == 1 else [0, num_layers - 1]
    while len(order) < num_layers:
        kept = sorted(order)
        gap, left = max(((right - left, left) for left, right in itertools.pairwise(kept)),
                        key=lambda item: (item[0], -item[1]))
        order.append(left + gap // 2)
    return tuple(order)


def ladder_layers(geometry: Geometry, depth: int) -> tuple[int, ...]:
    """The blocks a rung of ``depth`` keeps, ascending.

    Raises:
        UsageError: when the depth isn't between 2 and L.
    """
    if not 2 <= depth <= geometry.num_layers:
        raise UsageError(f"depth {depth} isn't between 2 and {geometry.num_layers}", where="layers",
                         fix="choose a rung of this checkpoint's ladder")
    return tuple(sorted(ladder_order(geometry)[:depth]))


def ladder_geometry(geometry: Geometry, depth: int) -> Geometry:
    """The geometry of a rung: engram sites and global layers follow their blocks or vanish with them.

    Raises:
        UsageError: when the depth isn't between 2 and L.
    """
    place = {layer: index for index, layer in enumerate(ladder_layers(geometry, depth))}

    def moved(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(place[layer] for layer in layers if layer in place)

    return dataclasses.replace(geometry, num_layers=depth, ladder_order=moved(ladder_order(geometry)),
                               global_layers=moved(geometry.global_layers),
                               engram_layers=moved(geometry.engram_layers))


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a rung keeps of a checkpoint's tensors.

    Attributes:
        layers: the kept blocks, ascending.
        rows: of tensors with a row for the embedding and every block.
        sites: the engram sites that are left, by their former numbers.
    """

    layers: np.ndarray
    rows: np.ndarray
    sites: tuple[int, ...]

    def renamed(self, name: str) -> str | None:
        """The tensor's name in the rung, None when its engram site is gone."""
        top, _, rest = name.partition("/")
        if not top.startswith("engrams_"):
            return name
        site = int(top.removeprefix("engrams_"))
        return f"engrams_{self.sites.index(site)}/{rest}" if site in self.sites else None

    def along(self, name: str) -> tuple[int, np.ndarray] | None:
        """The axis of a tensor that is cut and what is kept along it; None where it stays whole."""
        axis = layer_axis(name)
        return None if axis is None else (axis, self.rows if is_probe_rows(name) else self.layers)


def cut_of(geometry: Geometry, depth: int) -> Cut:
    """How a rung of ``depth`` is cut out.

    Raises:
        UsageError: when the depth isn't between 2 and L.
    """
    kept = ladder_layers(geometry, depth)
    sites = tuple(site for site, layer in enumerate(geometry.engram_layers) if layer in kept)
    return Cut(np.array(kept, np.intp), np.array([0, *(layer + 1 for layer in kept)], np.intp), sites)


def slice_ladder(checkpoint: Checkpoint, depth: int) -> Checkpoint:
    """The rung of ``depth`` as a checkpoint of its own; the full depth returns the checkpoint unchanged.

    Probe heads keep the embedding's row and those of kept blocks. Quantised matrices are renumbered, not
    requantised.

    Raises:
        UsageError: when the depth isn't between 2 and L.
    """
    if depth == checkpoint.geometry.num_layers:
        return checkpoint
    geometry, cut = ladder_geometry(checkpoint.geometry, depth), cut_of(checkpoint.geometry, depth)
    entries = {}
    for name in checkpoint.tensors:
        target = cut.renamed(name)
        if target is not None:
            entries[target] = _cut(checkpoint, name, cut.along(name))
    all_rows = checkpoint.geometry.num_layers + 1
    packed = {part.name: part for name, tensor in checkpoint.packed.items()
              for part in _cut_packed(name, tensor, cut, all_rows)}
    return dataclasses.replace(checkpoint, geometry=geometry, tensors=TensorStore(entries), packed=packed)


def _cut(checkpoint: Checkpoint, name: str, part: tuple[int, np.ndarray] | None) -> Entry:
    entry = checkpoint.entry(name)
    if part is None:
        return dataclasses.replace(entry, make=lambda: checkpoint.tensors[name].view())
    axis, kept = part

    def make() -> Array:
        return np.take(checkpoint.tensors[name], kept, axis=axis)

    shape = (*entry.shape[:axis], len(kept), *entry.shape[axis + 1:])
    return dataclasses.replace(entry, shape=shape, make=make)


def _cut_packed(name: str, tensor: PackedTensor, cut: Cut, all_rows: int) -> list[PackedTensor]:
    base, mark, layer = name.partition("#")
    if mark:
        place = np.flatnonzero(cut.layers == int(layer))
        return [tensor.renamed(f"{base}#{place[0]}")] if len(place) else []
    if is_probe_rows(name):
        # The matrix is [L + 1, k] rows flattened: a kept row is k neighbours.
        every = np.arange(tensor.shape[0]).reshape(all_rows, -1)
        return [tensor.take(every[cut.rows].reshape(-1))]
    target = cut.renamed(name)
    return [] if target is None else [tensor.renamed(target)]
