"""What a target owes the pipeline, and what it is handed.

A target lowers fused programs into a folder and runs what lies in a folder. It never sees a checkpoint,
a recipe or a report. Adding one means adding a package here that implements :class:`Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class WeightShare:
    """Elements of a stored weight that come from one checkpoint tensor (``role`` "constant": from none)."""

    source: str
    role: str
    layer: int
    elements: int


@dataclass(frozen=True)
class StoredWeight:
    """A weight in the artifact's files.

    Attributes:
        name: as it is called there.
        bytes: it takes.
        dtype: it is stored in.
        shares: what it is made of.
        kept_float: why it is still float32 where the scheme asks for less, or empty.
    """

    name: str
    bytes: int
    dtype: str
    shares: tuple[WeightShare, ...]
    kept_float: str = ""


@dataclass
class Compiled:
    """What a target wrote into a folder.

    ``files`` are names in the folder, ``nodes`` counts by phase and operator, ``notes`` is what a reader
    of the report must know, ``io`` the contract of inputs, outputs and state.
    """

    files: list[str]
    weights: list[StoredWeight]
    nodes: dict[str, dict[str, int]]
    notes: list[str] = field(default_factory=list)
    io: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """A decoding session of an artifact in its runtime, one sequence at a time."""

    context: int
    #: The longest chunk one call takes.
    max_chunk: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]; a single one goes through decode, more through prefill. Logits [T, V]."""

    def state(self) -> dict[str, NDArray[Any]]:
        """State by name, caches cut to the rows in use, in the layout of the reference model."""

    def streams(self) -> dict[int, Floats]:
        """The stream after each block [T, n, C] of the last call, for a runner opened with ``inner``."""


@dataclass(frozen=True)
class LoweringOptions:
    """How a target is to lower: weight scheme, opset, and what the artifact says about itself."""

    weights: str
    context: int
    opset: int
    max_chunk: int
    metadata: Mapping[str, str]


class Target(Protocol):
    """One format with its runtime."""

    name: str

    def refuses(self, options: LoweringOptions) -> str | None:
        """Why these options can't be met here, or None."""

    def folds_into_matrices(self, weights: str) -> bool:
        """Whether matrices may take constant factors under a scheme without losing its promise."""

    def compile(
        self,
        program: Callable[[int | None], Any],
        states: tuple[Any, ...],
        head_vocab: int,
        folder: Path,
        options: LoweringOptions,
    ) -> Compiled:
        """Write an artifact.

        Args:
            program: the fused program at T rows, or at a symbolic T (None).
            states: the step's state tensors, as ``model.state`` lists them.
            head_vocab: width V of the logits.
            folder: to write into; it exists and is empty.
        """

    def open(self, folder: Path, *, threads: int = 1, inner: bool = False) -> Runner:
        """Open an artifact.

        Raises:
            BadInput: the folder doesn't hold one that this target can run.
        """
