"""What a build is asked to do: one frozen value from the command line to the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needle_export.errors import UsageError

TARGETS = ("onnx",)
"""Names that ``--target`` takes."""

WEIGHTS = ("fp32", "fp16")
"""Names that ``--weights`` takes: how weights lie in the file."""

OPSETS = (21, 23, 24)
"""ONNX operator sets that can be emitted, oldest first."""

MIN_LAYERS = 2
"""The shallowest rung of a ladder."""

MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class BuildOptions:
    """One build.

    Attributes:
        checkpoint: a path or ``hf:<owner>/<repo>[/<file>]``.
        out: the folder to publish into.
        target: one of ``TARGETS``.
        layers: depth of the rung to build; None keeps the checkpoint's.
        lora: an adapter file to merge first, or None.
        context: tokens that the caches hold.
        weights: one of ``WEIGHTS``.
        opset: one of ``OPSETS``.
        keep_confidence: keep the confidence head after a LoRA merge. It is dropped by default because
            local fine-tuning doesn't train it.
        seed: of the prompts that the verification draws.
        threads: for the latency measurement; results don't depend on it.
        bench: whether to measure latency.

    Raises:
        UsageError: naming the option that can't be right.
    """

    checkpoint: str
    out: Path
    target: str = "onnx"
    layers: int | None = None
    lora: str | None = None
    context: int = 1024
    weights: str = "fp32"
    opset: int = 24
    keep_confidence: bool = False
    seed: int = 0
    threads: int = 1
    bench: bool = True

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise UsageError("the checkpoint's name is empty", where="CHECKPOINT", fix="give a file")
        _one_of("--target", self.target, TARGETS)
        _one_of("--weights", self.weights, WEIGHTS)
        _one_of("--opset", self.opset, OPSETS)
        if self.layers is not None:
            _at_least("--layers", self.layers, MIN_LAYERS)
        _at_least("--context", self.context, 1)
        _at_least("--threads", self.threads, 1)
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"{self.seed} isn't between 0 and {MAX_SEED}", where="--seed")
        if self.keep_confidence and self.lora is None:
            raise UsageError("there is no adapter to merge, so the confidence head stays anyway",
                             where="--keep-confidence", fix="leave it out, or give --lora")

    def recipe(self) -> dict[str, Any]:
        """The choices that decide the artifact's bytes and its verification, JSON-able, for the report.

        Input files are left out: the report names them with their hashes.
        """
        return {"target": self.target, "layers": self.layers, "context": self.context,
                "weights": self.weights, "opset": self.opset, "keep_confidence": self.keep_confidence,
                "seed": self.seed}


def _one_of(option: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UsageError(f"there is no {value!r}", where=option,
                         fix=f"choose from {', '.join(str(k) for k in known)}")


def _at_least(option: str, value: int, low: int) -> None:
    if value < low:
        raise UsageError(f"{value} is below {low}", where=option)
