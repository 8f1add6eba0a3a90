"""What a target owes the pipeline, and what it is handed.

A target lowers fused programs into a folder and runs what lies in a folder. It never sees a checkpoint,
a recipe or a report. Adding one means adding a package here that implements :class:`Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from needle_export.config.rules import Rules
from needle_export.errors import Unsupported
from needle_export.measure.work import Phase, Work
from needle_export.targets.kernels import Kernel
from needle_export.targets.matrices import ReadMatrix

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
        kept_float: why it is still a float where the scheme asks for less, or empty.
        as_read: of halves, whether they are rounded from what an op reads, a norm's scale with what was folded into it.
    """

    name: str
    bytes: int
    dtype: str
    shares: tuple[WeightShare, ...]
    kept_float: str = ""
    as_read: bool = False


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
    """How a target is to lower: weight scheme, opset, and what the artifact says about itself.

    Attributes:
        weights: which scheme every weight has.
        context: positions that caches hold.
        opset: of ONNX; other targets have none.
        max_chunk: the longest chunk of a prefill of variable length.
        metadata: rides in the artifact.
        buckets: lengths of prefills of fixed length, ascending.
        heads: probe heads that the artifact is to have.
        system: the least operating system that is to run it, of Core ML.
    """

    weights: Rules
    context: int
    opset: int | None
    max_chunk: int
    metadata: Mapping[str, str]
    buckets: tuple[int, ...] = ()
    heads: tuple[str, ...] = ()
    system: str | None = None


class Programs(Protocol):
    """What a target lowers: fused programs of one model, made when they are asked for."""

    def program(self, rows: int | None, fold_diagonals: bool = True) -> Any:
        """The step at T rows, or at a symbolic T (None).

        Args:
            fold_diagonals: whether the small matrices of the MLP may take constant factors.
        """

    def head_program(self, name: str) -> Any:
        """What a probe head makes of its state."""


@dataclass(frozen=True)
class LeftOut:
    """Ops of one kind that a delegate leaves to the runtime; ``splits`` of them cut the graph in two."""

    op: str
    count: int
    splits: int


@dataclass(frozen=True)
class SignatureFacts:
    """One entry of an artifact as its runtime sees it: ops, and how its delegate cuts them."""

    ops: int
    delegate: str
    partitions: int
    delegated: int
    left: tuple[LeftOut, ...]


@dataclass(frozen=True)
class LintFinding:
    """Something that public sources say a delegate won't take; nothing was run to find out."""

    rule: str
    op: str
    count: int
    why: str
    source: str


@dataclass
class Facts:
    """What reading a finished artifact tells."""

    signatures: dict[str, SignatureFacts] = field(default_factory=dict)
    lint: list[LintFinding] = field(default_factory=list)


@dataclass(frozen=True)
class OtherRuntime:
    """Another runtime that an artifact may be run in.

    Attributes:
        name, version: of the runtime; no version where it isn't known.
        open: opens the artifact there, or None where it can't be tried.
        reason: why it can't, if so.
        native: it is the one that the format is for, of a target that is verified by an evaluator. It computes in half
            precision and is judged by that, and ``verify`` tries it too.
    """

    name: str
    version: str
    open: Callable[[], Any] | None
    reason: str = ""
    native: bool = False


def need(extra: str, *modules: str) -> None:
    """Make sure that packages are there, without importing them.

    Args:
        extra: of ours that brings them.
        modules: by the names that they are imported under.

    Raises:
        Unsupported: one isn't installed.
    """
    for module in modules:
        if find_spec(module) is None:
            fix = f"install it with: pip install 'needle-export[{extra}]'"
            raise Unsupported(f"{module.replace('_', '-')} is not installed", fix=fix)


class RuntimeRefused(Exception):
    """A runtime can't open or run an artifact; the text is one line that says why."""


class Target(Protocol):
    """One format with its runtime."""

    name: str
    #: How far verification proves an artifact here.
    status: Literal["verified-on-runtime", "verified-by-evaluator", "converted-only"]
    #: The runtime that it is verified in.
    runtime: str
    #: Whether a prefill has a fixed length, so that there is one for each of several.
    fixed_shapes: bool

    def folds_into_matrices(self, weights: Rules) -> bool:
        """Whether matrices may take constant factors under these schemes without losing their promise."""

    def activations(self, weights: Rules) -> Any:
        """How the runtime rounds the inputs of integer matrices under these schemes, or None."""

    def blocks(self, scheme: str, rows: int, columns: int) -> Any:
        """The form (``weights.forms.Form``) of a matrix [rows, columns] that lies in blocks of integers, or None."""

    def chunk_multiple(self, states: tuple[Any, ...], system: str | None) -> int:
        """What the length of a prefill must be a multiple of.

        Args:
            system: the least operating system that is to run the artifact, of Core ML.
        """

    def half(self, weights: Rules) -> bool:
        """Whether everything that isn't compressed is stored in half precision, small vectors included."""

    def compile(
        self,
        programs: Programs,
        states: tuple[Any, ...],
        head_vocab: int,
        folder: Path,
        options: LoweringOptions,
    ) -> Compiled:
        """Write an artifact.

        Args:
            programs: of the model.
            states: the step's state tensors, as ``model.state`` lists them.
            head_vocab: width V of the logits.
            folder: to write into; it exists and is empty.
        """

    def open(self, folder: Path, *, threads: int = 1, inner: bool = False) -> Runner:
        """Open an artifact.

        Raises:
            BadInput: the folder doesn't hold one that this target can run.
        """

    def examine(self, folder: Path) -> Facts:
        """What the finished files tell about themselves."""

    def other_runtimes(self, folder: Path) -> list[OtherRuntime]:
        """Further runtimes that users of this format may have."""

    def decoder(self) -> Path:
        """A Python file that needs nothing of this package and lies beside every artifact as ``decoder.py``.

        Its ``open_decoder(folder, manifest, threads)`` opens the artifact in its runtime; what comes back has
        ``context``, ``reset()`` and ``feed(tokens)``, which gives logits [T, V] for tokens [T].
        """


@runtime_checkable
class ReadsWeights(Protocol):
    """A target that can read matrices back from what it wrote; of others the report says that none were compared."""

    def read_matrices(self, folder: Path) -> Iterator[ReadMatrix]:
        """Every matrix of a finished artifact that can be compared, or that a number format below float32 is for.

        It tells what the files hold and how their graphs use it, and trusts nothing that the target itself knew when it
        wrote them. What a matrix is called in the files is the only thing taken from there.

        Raises:
            BadInput: the files are damaged.
        """


@runtime_checkable
class RoundsResults(Protocol):
    """A target whose artifacts can be run with every op rounded to the type that it declares."""

    def rounded(self, folder: Path) -> Any:
        """A runner as :meth:`Target.open` gives it, with ``findings``: overflows and NaN by op."""


@runtime_checkable
class TellsWork(Protocol):
    """A target whose finished artifacts tell what a call has to do, so that its time can be estimated."""

    def work(self, folder: Path, position: int, prompts: tuple[int, ...] = ()) -> Work:
        """Read the work off the artifact's own graphs.

        Args:
            position: tokens before the decode step.
            prompts: lengths of prompts to tell the work of, in tokens.

        Raises:
            BadInput: the files are damaged.
            Unsupported: an op's work isn't known.
        """


@runtime_checkable
class TimesKernels(Protocol):
    """A target whose runtime can be timed on small graphs, so that this machine's rates are known."""

    def kernel(self, kernel: Kernel, folder: Path) -> tuple[Callable[[], object], Phase]:
        """A small graph, opened with one thread: what runs it once, and the work that it does.

        Args:
            folder: to write files into, which must stay while it runs.
        """


@runtime_checkable
class LoadsApart(Protocol):
    """A target whose load memory can be measured: runtime and artifact apart, and decode apart from the rest."""

    def load_runtime(self) -> None:
        """Import the runtime and all else that opening needs, and open nothing.

        Raises:
            Unsupported: it isn't installed.
        """

    def open_decode(self, folder: Path, *, threads: int = 1) -> Runner:
        """A runner as :meth:`Target.open` gives it, with no more loaded than decoding needs; ``feed`` steps.

        Where a runtime prepares a file as a whole, that is all of it.
        """


@runtime_checkable
class RunsNatively(Protocol):
    """A target that is verified by an evaluator, and whose own runtime some machines have."""

    def missing(self) -> str:
        """Why that runtime can't be used on this machine, in one clause, or empty."""

    def open_native(self, folder: Path, *, compute_units: str) -> Any:
        """A runner in that runtime, with ``told``, what a report should say about its run, and ``close``.

        Raises:
            RuntimeRefused: the runtime doesn't load the artifact; a call may raise it too.
        """

    def machine(self, compute_units: str) -> str:
        """What a time that was measured there was measured on, in words."""
