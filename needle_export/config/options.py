"""What a build is asked to do: one frozen value from the command line to the pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needle_export.config import schemes
from needle_export.config.rules import Rule, Rules
from needle_export.errors import UsageError

TARGETS = ("onnx", "tflite", "coreml")
"""Names that ``--target`` takes."""

SCHEMES = {t: tuple(s.name for s in schemes.ALL if s.targets[t].form) for t in TARGETS}
"""Weight schemes that each target can represent."""

WEIGHTS = tuple(s.name for s in schemes.ALL)
"""Names that ``--weights`` takes: how weights lie in the file."""

BUCKETS = (64, 128)
"""Prefill lengths of targets with fixed shapes, unless others are asked for."""

OPSETS = (21, 23, 24)
"""ONNX operator sets that can be emitted, oldest first."""

IR_VERSIONS = {21: 10, 23: 11, 24: 12}
"""The version of the IR that a file of an opset has."""

OWN_OPS_SCHEMES = ("int8", "int4", "int2")
"""ONNX schemes that only ONNX Runtime's own ops can read, which an artifact of an older opset does without."""

SYSTEMS = ("ios17", "ios18", "ios26")
"""Operating systems that ``--os`` takes, oldest first: the least that is to run a Core ML package."""

DEFAULT_SYSTEM = "ios18"
"""The first with states and with several functions a package."""

OLD_SYSTEM_SCHEMES = ("fp32", "fp16", "int8")
"""What a Core ML package can hold before iOS 18, which brought 4-bit blocks and palettes by group."""

COMPUTE_UNITS = ("all", "cpu", "cpu-gpu", "cpu-ne")
"""What ``--compute-units`` takes: where Core ML may run ops. The first is its own choice."""

ROUNDINGS = ("nearest", "search", "calibrated")
"""What ``--rounding`` takes: how matrices of integer blocks find their levels and scales."""

CACHES = {t: tuple(c.name for c in schemes.CACHES if c.targets[t].form) for t in TARGETS}
"""Formats of keys and values that each target can represent."""

CACHE_FORMS = tuple(c.name for c in schemes.CACHES)
"""Names that ``--cache`` takes: how keys and values are kept between steps."""

BLOCK_SCHEMES = {"onnx": OWN_OPS_SCHEMES, "tflite": ("int4",), "coreml": ("int8", "int4")}
"""Schemes whose matrices lie in blocks of integers in a target; those of one scale for a row of TFLite's don't."""

TOLERANCES = ("logits", "state")
"""What ``--tolerances`` can tighten: the largest deviation of a logit, and of a state, of its range."""

MIN_LAYERS = 2
"""The shallowest rung of a ladder."""

MAX_SEED = 2**32 - 1


_ARTIFACTS = {"onnx": "an ONNX artifact", "coreml": "a Core ML package"}


@dataclass(frozen=True)
class BuildOptions:
    """One build.

    Attributes:
        checkpoint: a path, ``demo`` or ``hf:<owner>/<repo>[/<file>]``.
        out: the folder to publish into.
        target: one of ``TARGETS``.
        layers: depth of the rung to build; None keeps the checkpoint's.
        lora: an adapter file to merge first, or None.
        tokenizer: the file to put beside the artifact; None takes the one that comes with the checkpoint, if any.
        context: tokens that the caches hold.
        weights: one of ``WEIGHTS``.
        cache: one of ``CACHE_FORMS``; None takes the target's own, the first that it has.
        rules: schemes for some of the weights, in order; the last that matches wins.
        rounding: one of ``ROUNDINGS``; None takes ``calibrated`` where there are prompts, else ``nearest``.
        calibrate: a file of prompts to calibrate with, or None.
        os: one of ``SYSTEMS``, of the Core ML target only; None takes ``DEFAULT_SYSTEM``.
        opset: one of ``OPSETS``, of the ONNX target only; None takes the newest.
        buckets: prefill lengths of a target with fixed shapes, ascending; None takes the usual ones that fit.
        heads: probe heads that the artifact is to have, by name.
        keep_confidence: keep the confidence head after a LoRA merge. It is dropped by default because
            local fine-tuning doesn't train it.
        seed: of the prompts that the verification draws.
        tolerances: bounds of the verification, (one of ``TOLERANCES``, value), tighter than a scheme's own.
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
    tokenizer: str | None = None
    context: int = 1024
    weights: str = "fp32"
    rules: tuple[Rule, ...] = ()
    rounding: str | None = None
    calibrate: str | None = None
    cache: str | None = None
    opset: int | None = None
    os: str | None = None
    buckets: tuple[int, ...] | None = None
    heads: tuple[str, ...] = ()
    keep_confidence: bool = False
    seed: int = 0
    tolerances: tuple[tuple[str, float], ...] = ()
    threads: int = 1
    bench: bool = True

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise UsageError("the checkpoint's name is empty", where="CHECKPOINT", fix="give a file")
        _one_of("--target", self.target, TARGETS)
        self._check_scheme("--weights", self.weights)
        for rule in self.rules:
            self._check_scheme("--rule", rule.scheme)
        self._check_rounding()
        self._check_target_options()
        self._check_cache()
        if self.layers is not None:
            _at_least("--layers", self.layers, MIN_LAYERS)
        _at_least("--context", self.context, 1)
        _at_least("--threads", self.threads, 1)
        self._check_tolerances()
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"{self.seed} isn't between 0 and {MAX_SEED}", where="--seed")
        if self.keep_confidence and self.lora is None:
            raise UsageError("there is no adapter to merge, so the confidence head stays anyway",
                             where="--keep-confidence", fix="leave it out, or give --lora")

    @property
    def schemes(self) -> Rules:
        """What is stored as what."""
        return Rules(self.weights, self.rules)

    @property
    def cache_form(self) -> str:
        """How keys and values are kept."""
        assert self.cache is not None  # since __post_init__
        return self.cache

    def _check_tolerances(self) -> None:
        for name, value in self.tolerances:
            _one_of("--tolerances", name, TOLERANCES)
            if not 0 < value < math.inf:  # also false for NaN
                raise UsageError(f"{value:g} is no bound for {name}", where="--tolerances", fix="give a number above 0")
        if len(dict(self.tolerances)) < len(self.tolerances):
            raise UsageError("a bound is there twice", where="--tolerances", fix="give each name once")
        object.__setattr__(self, "tolerances", tuple(sorted(self.tolerances)))

    def _check_cache(self) -> None:
        # Before states the host keeps what the package computes in.
        floats = self.target == "coreml" and self.os == SYSTEMS[0] and self.weights == "fp32"
        known = ("fp32",) if floats else CACHES[self.target]
        object.__setattr__(self, "cache", known[0] if self.cache is None else self.cache)
        _one_of("--cache", self.cache, CACHE_FORMS)
        if self.cache in known:
            return
        if floats:
            raise UsageError("an ios17 package of fp32 computes in float32, and its host keeps that", where="--cache",
                             fix="leave it out, or choose --weights fp16 or a newer --os")
        held = next(c for c in schemes.CACHES if c.name == self.cache).targets[self.target]
        raise UsageError(f"the {self.target} target has no caches of {self.cache}: {held.why_not}", where="--cache",
                         fix=f"choose from {', '.join(CACHES[self.target])}, or another --target")

    def _check_scheme(self, option: str, name: str) -> None:
        _one_of(option, name, WEIGHTS)
        if name not in SCHEMES[self.target]:
            held = next(s for s in schemes.ALL if s.name == name).targets[self.target]
            raise UsageError(f"the {self.target} target has no {name}: {held.why_not}", where=option,
                             fix=f"choose from {', '.join(SCHEMES[self.target])}, or another --target")

    def _check_rounding(self) -> None:
        if self.rounding is None:
            object.__setattr__(self, "rounding", "nearest" if self.calibrate is None else "calibrated")
        _one_of("--rounding", self.rounding, ROUNDINGS)
        if self.calibrate is None and self.rounding == "calibrated":
            raise UsageError("there are no prompts to calibrate with", where="--rounding", fix="give --calibrate FILE")
        if self.calibrate is not None and self.rounding != "calibrated":
            raise UsageError(f"{self.rounding} rounding looks at no prompts", where="--calibrate",
                             fix="leave it out, or leave --rounding out")
        held = BLOCK_SCHEMES[self.target]
        if self.rounding != "nearest" and not set(self.schemes.schemes) & set(held):
            raise UsageError(f"{self.schemes} has no blocks of integers to round in {self.target}", where="--rounding",
                             fix=f"leave it out, or choose one of {', '.join(held)}")

    def _check_target_options(self) -> None:
        if self.target != "coreml" and self.os is not None:
            raise UsageError(f"the {self.target} target isn't made for an operating system", where="--os",
                             fix="leave it out, or choose --target coreml")
        if self.target != "tflite" and self.heads:
            raise UsageError(f"probe heads aren't part of {_ARTIFACTS[self.target]}", where="--heads",
                             fix="leave it out, or choose --target tflite")
        if self.target == "onnx":
            if self.buckets is not None:
                raise UsageError("prefill is of variable length in ONNX", where="--buckets", fix="leave it out")
            object.__setattr__(self, "opset", OPSETS[-1] if self.opset is None else self.opset)
            _one_of("--opset", self.opset, OPSETS)
            own = next((s for s in self.schemes.schemes if s in OWN_OPS_SCHEMES), None)
            if own is not None and self.opset != OPSETS[-1]:
                raise UsageError(f"{own} needs ONNX Runtime's own ops", where="--opset",
                                 fix=f"leave it out, or choose --weights fp32 or fp16; opset {OPSETS[-1]} has them")
            return
        if self.opset is not None:
            raise UsageError(f"the {self.target} target has no opset", where="--opset", fix="leave it out")
        if self.target == "coreml":
            object.__setattr__(self, "os", DEFAULT_SYSTEM if self.os is None else self.os)
            _one_of("--os", self.os, SYSTEMS)
            new = next((s for s in self.schemes.schemes if s not in OLD_SYSTEM_SCHEMES), None)
            if self.os == SYSTEMS[0] and new is not None:
                raise UsageError(f"{new} needs iOS 18", where="--weights" if new == self.weights else "--rule",
                                 fix=f"choose from {', '.join(OLD_SYSTEM_SCHEMES)}, or a newer --os")
        for bucket in self.buckets or ():
            _at_least("--buckets", bucket, 2)
            if bucket > self.context:
                raise UsageError(f"{bucket} tokens don't fit in the context of {self.context}", where="--buckets")
        if self.buckets is not None:
            object.__setattr__(self, "buckets", tuple(sorted(set(self.buckets))))

    def recipe(self) -> dict[str, Any]:
        """The choices that decide the artifact's bytes and its verification, JSON-able, for the report.

        Input files are left out: the report names them with their hashes.
        """
        return {"target": self.target, "layers": self.layers, "context": self.context,
                "weights": self.weights, "rules": [[r.pattern, r.scheme] for r in self.rules],
                "rounding": self.rounding, "cache": self.cache, "opset": self.opset, "os": self.os,
                "buckets": self.buckets and list(self.buckets),
                "heads": list(self.heads), "keep_confidence": self.keep_confidence, "seed": self.seed,
                "tolerances": dict(self.tolerances)}


def usual_buckets(limit: int) -> tuple[int, ...]:
    """Prefill lengths where none are asked for: the usual ones that fit into ``limit``, or the longest that does."""
    return tuple(b for b in BUCKETS if b <= limit) or ((limit,) if limit > 1 else ())


def _one_of(option: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise UsageError(f"there is no {value!r}", where=option,
                         fix=f"choose from {', '.join(str(k) for k in known)}")


def _at_least(option: str, value: int, low: int) -> None:
    if value < low:
        raise UsageError(f"{value} is below {low}", where=option)
