"""What a device is, as data: its runtimes with their limits and rates, its memory, its budgets.

docs/devices.md explains the files in ``devices/``; every number in them says where it comes from.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from needle_export.config.budget import Budget
from needle_export.config.figures import (
    Bandwidth,
    Bytes,
    Compute,
    Count,
    Figure,
    Frequency,
    Sourced,
    System,
    Time,
    Version,
)
from needle_export.config.options import CACHE_FORMS, WEIGHTS, BuildOptions
from needle_export.config.rates import Rates
from needle_export.config.refusals import fitting_opset, refusals
from needle_export.config.shipped import find, shipped_names
from needle_export.config.strict import Strict, read_toml
from needle_export.config.units import quantity

Target = Literal["onnx", "tflite", "coreml"]

Text = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=1000, strip_whitespace=True)]

#: Limits by the one target whose runtimes have them.
_LIMITS = {"opset": "onnx", "ir": "onnx", "ops": "tflite", "system": "coreml"}


class ByType(Strict):
    """Bandwidth by the type of the weights."""

    fp32: Bandwidth | None = None
    fp16: Bandwidth | None = None
    int8: Bandwidth | None = None
    int4: Bandwidth | None = None

    def rates(self) -> dict[str, float]:
        """The same in SI units, without what isn't known."""
        return {name: quantity(figure.value, "bandwidth") for name, figure in self if figure is not None}


class RatesTable(Strict):
    """How fast a runtime is on the device, with one thread; what an estimate of latency is made from.

    Attributes:
        bandwidth: that weights and caches stream from memory at.
        fp32: multiply-adds of float32.
        fp16: of float16; absent where the runtime computes in none.
        int8: of integers; absent where the runtime multiplies none.
        op: what an op costs however little it computes.
        call: what a call of the runtime costs whatever is in it.
        int4: of 4-bit integers; absent where they go as fast as those of 8.
        cache: what the processor's last cache keeps from call to call; without it everything comes from memory. This
            and what follows are what ``needle-export calibrate`` measures beyond the rest.
        streams: bandwidth from memory by the type of the weights.
        cached: the same from the cache.
        values: what ops hand values on at.
        cold: as ``op``, where the cache has kept nothing.
        own: of its own data that an op has the cache hold.
    """

    bandwidth: Bandwidth
    fp32: Compute
    fp16: Compute | None = None
    int8: Compute | None = None
    op: Time
    call: Time
    int4: Compute | None = None
    cache: Bytes | None = None
    streams: ByType | None = None
    cached: ByType | None = None
    values: Bandwidth | None = None
    cold: Time | None = None
    own: Bytes | None = None

    def rates(self) -> Rates:
        """The same in SI units."""
        named = {"fp32": self.fp32, "fp16": self.fp16, "int8": self.int8, "int4": self.int4}

        def known(figure: Figure | None, kind: str) -> float:
            return 0.0 if figure is None else quantity(figure.value, kind)

        return Rates(
            bandwidth=quantity(self.bandwidth.value, "bandwidth"),
            throughput={name: quantity(f.value, "compute") for name, f in named.items() if f is not None},
            op=quantity(self.op.value, "time"),
            call=quantity(self.call.value, "time"),
            cold=known(self.cold, "time"),
            own=known(self.own, "bytes"),
            streams={} if self.streams is None else self.streams.rates(),
            cache=known(self.cache, "bytes"),
            cached={} if self.cached is None else self.cached.rates(),
            values=known(self.values, "bandwidth") or None,
        )


class Refused(Sourced):
    """What a runtime of this version can't hold on this device, beyond what its versions say.

    Attributes:
        weights: schemes.
        cache: formats of caches.
        why: it can't, as the end of a sentence.
    """

    weights: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()
    why: Text

    @pydantic.model_validator(mode="after")
    def _known(self) -> Refused:
        for names, known, what in ((self.weights, WEIGHTS, "scheme"), (self.cache, CACHE_FORMS, "format of caches")):
            for name in names:
                if name not in known:
                    near = difflib.get_close_matches(name, known, 1, 0.5)
                    said = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
                    raise ValueError(f"there is no {what} {name!r}; {said}")
        if not self.weights and not self.cache:
            raise ValueError("name the weights or the caches that are refused")
        return self


class Runtime(Strict):
    """A runtime that artifacts of one target run in on the device.

    Attributes:
        target: whose artifacts.
        name: of the runtime, as an app's developer knows it.
        version: that the system ships, or that apps typically bring along.
        opset: ONNX: the newest opset that this version runs of those emitted here.
        ir: ONNX: the newest version of the IR that it reads.
        ops: TFLite: the newest release of TensorFlow whose versions of ops it knows.
        system: Core ML: the newest of the systems that ``--os`` names whose packages run.
        refuses: what it can't hold beyond that.
        rates: for an estimate of latency; without them there is none.
    """

    target: Target
    name: Text
    version: Version
    opset: Count | None = None
    ir: Count | None = None
    ops: Version | None = None
    system: System | None = None
    refuses: tuple[Refused, ...] = ()
    rates: RatesTable | None = None

    @pydantic.model_validator(mode="after")
    def _limits(self) -> Runtime:
        for limit, target in _LIMITS.items():
            present = getattr(self, limit) is not None
            if present and target != self.target:
                raise ValueError(f"{limit} is a limit of {target}, not of {self.target}")
            if not present and target == self.target:
                raise ValueError(f"a runtime of {target} needs its limit {limit}")
        return self


class Without(Sourced):
    """Why the device has no runtime for a target."""

    target: Target
    why: Text


class Chip(Strict):
    """What the guesses of rates are derived from.

    Attributes:
        name: of the chip.
        core: the kind of core that a single thread runs on.
        clock: of that core, at most.
        peak: bandwidth of the memory, at most, for all that is on the chip together.
        ram: of the device.
        storage: for models, where that is scarce.
    """

    name: Text
    core: Text | None = None
    clock: Frequency | None = None
    peak: Bandwidth | None = None
    ram: Bytes | None = None
    storage: Bytes | None = None


class Device(Strict):
    """One device with one version of its system.

    Attributes:
        id: the name that ``--device`` takes.
        name: for people.
        kind: its class: ``iphone``, ``android-go`` and so on.
        os: the system's name.
        os_version: of the system, the oldest that the file speaks for.
        chip: what computes.
        memory: that one app may use.
        runtime: those that artifacts can run in, the one that suits the device best first.
        without: targets without one, and why.
        refusal: why there is none at all, as the end of a sentence; empty where there is one.
        budget: what a build for the device is held to unless told otherwise.
    """

    id: Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=60)]
    name: Text
    kind: Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z]+(-[a-z]+)*$", max_length=40)]
    os: Text
    os_version: Version
    chip: Chip
    memory: Bytes
    runtime: tuple[Runtime, ...] = ()
    without: tuple[Without, ...] = ()
    refusal: Annotated[str, pydantic.StringConstraints(max_length=1000, strip_whitespace=True)] = ""
    budget: tuple[Budget, ...] = ()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Device:
        told = [*(r.target for r in self.runtime), *(w.target for w in self.without)]
        twice = next((t for t in told if told.count(t) > 1), None)
        if twice:
            raise ValueError(f"{twice} is there twice among runtime and without")
        if self.runtime and self.refusal:
            raise ValueError("a device with a runtime has no refusal")
        if not self.runtime and not self.refusal:
            raise ValueError("a device without a runtime says why in refusal")
        if next((b for b in self.budget if b.device not in (None, self.id)), None):
            raise ValueError("a budget in a device file is about another device")
        return self

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """Those that artifacts can run in."""
        return self.runtime

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """What a build for the device is held to unless told otherwise."""
        return self.budget

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets that run on it, the one that suits it best first."""
        return tuple(r.target for r in self.runtime)

    @property
    def memory_bytes(self) -> int:
        """Memory that one app may use."""
        return round(quantity(self.memory.value, "bytes"))

    def runtime_of(self, target: str) -> Runtime | None:
        """The runtime for a target's artifacts."""
        return next((r for r in self.runtime if r.target == target), None)

    def rates(self, target: str) -> Rates | None:
        """How fast a target's runtime is; None where there is no runtime, or nothing is known of its speed."""
        runtime = self.runtime_of(target)
        return None if runtime is None or runtime.rates is None else runtime.rates.rates()

    def defaults(self, target: str) -> dict[str, Any]:
        """Options of ``build`` that the device's own limits decide where nobody else does."""
        runtime = self.runtime_of(target)
        if runtime is None:
            return {}
        if runtime.system is not None:
            return {"os": runtime.system.value}
        opset = fitting_opset(runtime) if target == "onnx" else None
        return {} if opset is None else {"opset": opset}

    def refuses(self, options: BuildOptions, *, resident: int | None = None) -> tuple[str, ...]:
        """What the device can't do with such an artifact: a sentence each, with what would be; empty if it can.

        Args:
            options: of the build.
            resident: bytes that a session must have in memory at once, as far as they are known before a build.
        """
        return refusals(self, options, resident)


def device_names() -> tuple[str, ...]:
    """Ids of the devices that come along, sorted."""
    return shipped_names("devices")


def load_device(name_or_path: str | Path) -> Device:
    """A device that comes along, by its id, or a team's own, by the path of its file.

    Raises:
        UsageError: there is no such id; names the nearest.
        BadInput: the file isn't right, naming the key.
    """
    return read_toml(Device, find("devices", name_or_path, "device"))
