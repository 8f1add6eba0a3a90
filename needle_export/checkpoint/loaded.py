"""A checkpoint as a value: what every reader builds and everything else works on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.cq import PackedTensor
from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.store import Entry, TensorStore, as_store

Permutations = tuple[NDArray[np.int64], NDArray[np.int64]]

_PERMUTATION_SEEDS = (11, 13)
_SPLIT_SEED_OFFSET = 977


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from.

    Attributes:
        path_name: the file's name, without its folder.
        sha256: of the whole file, hex.
        format: "safetensors" or "cact".
        file_bytes: size of the file.
        random: the file says that its weights are random, made for tests.
        step: training step, when the file records one.
        run: whatever the file records about the run that wrote it.
    """

    path_name: str
    sha256: str
    format: str
    file_bytes: int
    random: bool
    step: int | None
    run: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's weights, checked against its geometry.

    Attributes:
        geometry: the model in numbers.
        tensors: read-only arrays by name, float16 or float32 (bfloat16 becomes float32, exactly; codebook
            tensors are dequantised to float32). Made on access: keep what you use more than once.
        permutations: the two fixed permutations of the Monarch MLP, int64 [N] each.
        packed: quantised matrices as the file has them; empty for a safetensors file.
        tokenizer: the container's tokenizer dump, or None.
        source: the file.
        adapters: names of the LoRA files merged in, in order.
        parent_layers: depth of the checkpoint before any slicing.
    """

    geometry: Geometry
    tensors: Mapping[str, np.ndarray]
    permutations: Permutations
    packed: Mapping[str, PackedTensor]
    tokenizer: bytes | None
    source: Source
    adapters: tuple[str, ...]
    parent_layers: int

    @property
    def store(self) -> TensorStore:
        """The tensors as a store, which answers for shapes and formats without making arrays."""
        return as_store(self.tensors)

    def entry(self, name: str) -> Entry:
        """Shape, array dtype and stored format of a tensor; KeyError for an unknown name."""
        return self.store.entry(name)


def drop_head(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint without one probe head; unchanged when it has none of that name.

    Local fine-tuning leaves the confidence head untrained, so after a LoRA merge its answers are no
    longer those of the model it was trained with. Whether that matters is the caller's decision.
    """
    head = checkpoint.geometry.head(name)
    if head is None:
        return checkpoint
    prefix = f"{head.key}/"
    geometry = dataclasses.replace(
        checkpoint.geometry, heads=tuple(h for h in checkpoint.geometry.heads if h is not head))
    gone: dict[str, Entry | None] = {key: None for key in checkpoint.tensors if key.startswith(prefix)}
    packed = {key: value for key, value in checkpoint.packed.items() if not key.startswith(prefix)}
    return dataclasses.replace(checkpoint, geometry=geometry, tensors=checkpoint.store.replaced(gone),
                               packed=packed)


def standard_permutations(n: int, split: bool = False) -> Permutations:
    """The Monarch MLP's fixed permutations of N = ``n`` channels, int64 [N] each.

    numpy's legacy generator seeded with 11 and 13. Split models permute each half within itself, the
    second half with seeds 977 higher, so that the first half is a model of its own.
    """

    def one(seed: int) -> NDArray[np.int64]:
        if not split:
            return np.random.RandomState(seed).permutation(n).astype(np.int64)
        half = n // 2
        second = np.random.RandomState(seed + _SPLIT_SEED_OFFSET).permutation(half)
        return np.concatenate([np.random.RandomState(seed).permutation(half), half + second]).astype(np.int64)

    first, second = (one(seed) for seed in _PERMUTATION_SEEDS)
    return first, second
