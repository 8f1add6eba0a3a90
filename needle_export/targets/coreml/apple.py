"""A Core ML package in Core ML itself, through coremltools, where macOS is present.

Nobody has run this on an Apple device yet: tests run it against a stand-in for coremltools' model class. What is known
of Core ML's behaviour, and what isn't, is in docs/ios.md; where it isn't, the code here asks Core ML and says so.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.base import Floats, RuntimeRefused
from needle_export.targets.coreml import contract
from needle_export.targets.coreml.host import Host
from needle_export.targets.coreml.sequence import Sequence
from needle_export.targets.coreml.session import read_contract
from needle_export.targets.ports import DECODE, entry_name
from needle_export.targets.quiet import quietly

#: What ``--compute-units`` takes, and coremltools' names for it.
COMPUTE_UNITS = {"all": "ALL", "cpu": "CPU_ONLY", "cpu-gpu": "CPU_AND_GPU", "cpu-ne": "CPU_AND_NE"}

#: What Core ML uses if nobody asks for less.
DEFAULT_UNITS = next(iter(COMPUTE_UNITS))

#: Devices by coremltools' names for them.
_DEVICES = {
    "MLCPUComputeDevice": "CPU",
    "MLGPUComputeDevice": "GPU",
    "MLNeuralEngineComputeDevice": "Neural Engine",
}

#: Of an op that Core ML says nothing about.
_UNKNOWN = "no device named"


def macos_version() -> str:
    """Such as ``15.5``; empty on other systems."""
    return platform.mac_ver()[0] if sys.platform == "darwin" else ""


def missing() -> str:
    """Why Core ML can't be used on this machine, in one clause, or empty."""
    if not macos_version():
        return "Core ML is there on macOS only"
    try:
        with quietly():
            from coremltools.models import model
    except ImportError:
        return "coremltools, which runs Core ML, is not installed"
    if model._MLModelProxy is None:
        return "coremltools can't load its part for Core ML on this system"
    return ""


def available() -> bool:
    """Whether this machine can run packages in Core ML."""
    return not missing()


def machine(compute_units: str) -> str:
    """Processor, model, system and compute units in words: what a time was measured on."""
    names = [_sysctl("machdep.cpu.brand_string") or platform.machine()]
    if model := _sysctl("hw.model"):
        names.append(f"({model})")
    return f"{' '.join(names)}, macOS {macos_version()}, Core ML with compute units {compute_units}"


def _sysctl(name: str) -> str:
    """A fact that the system tells of itself, or empty."""
    try:
        run = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


@dataclass(frozen=True)
class ComputePlan:
    """Where Core ML means to run a function's ops; nothing was run for it.

    Attributes:
        function: its name.
        ops: by device, those with most of the cost first; constants aren't among them.
        cost: share of Core ML's own estimate of the work by device, 0 to 1; 0 where it gives none.
    """

    function: str
    ops: dict[str, int]
    cost: dict[str, float]

    def __str__(self) -> str:
        parts = [
            f"{count:,} ops {device if device == _UNKNOWN else f'on the {device}'}"
            + (f" ({self.cost[device]:.0%} of the estimated cost)" if self.cost[device] else "")
            for device, count in self.ops.items()
        ]
        return f"Core ML's plan for {self.function}, not a measurement: {', '.join(parts) or 'it names no ops'}"


def compute_plan(path: Path, function: str, *, compute_units: str = DEFAULT_UNITS, single: bool = False) -> ComputePlan:
    """Core ML's plan for a function.

    coremltools 9.0 can't tell Core ML which function of several it means. Where Core ML takes the default one, it says
    nothing about the ops of others, and they are counted as such.

    Args:
        path: of the .mlpackage.
        function: its name.
        compute_units: one of ``COMPUTE_UNITS``.
        single: the package is of one function, which it calls ``main``.

    Raises:
        Unsupported: Core ML isn't on this machine.
        RuntimeRefused: it doesn't load the package, or gives no plan.
    """
    _need()
    return _plan_of(_load(path, function, compute_units, single), function, compute_units, single)


def _plan_of(model: Any, function: str, compute_units: str, single: bool) -> ComputePlan:
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    ops: dict[str, int] = {}
    cost: dict[str, float] = {}
    with _asking(f"Core ML gives no plan for {function}"):
        with quietly():
            units = ct.ComputeUnit[COMPUTE_UNITS[compute_units]]
            plan = MLComputePlan.load_from_path(model.get_compiled_model_path(), compute_units=units)
        for one in plan.model_structure.program.functions["main" if single else function].block.operations:
            # Operators are called by the opset that brought them: ios18.constexpr_lut_to_dense.
            kind = one.operator_name.rpartition(".")[2]
            if kind == "const" or kind.startswith("constexpr_"):
                continue
            usage = plan.get_compute_device_usage_for_mlprogram_operation(one)
            estimate = plan.get_estimated_cost_for_mlprogram_operation(one)
            device = _DEVICES.get(type(getattr(usage, "preferred_compute_device", None)).__name__, _UNKNOWN)
            ops[device] = ops.get(device, 0) + 1
            cost[device] = cost.get(device, 0.0) + (0.0 if estimate is None else float(estimate.weight))
    order = sorted(ops, key=lambda device: (-cost[device], -ops[device]))
    return ComputePlan(function, {d: ops[d] for d in order}, {d: cost[d] for d in order})


class AppleRunner(Sequence):
    """One sequence in Core ML, as :class:`targets.base.Runner` says.

    Every function is a model object of its own, loaded when it is first called for. All share one state, made by
    decode's, if Core ML allows that, which Apple's documentation doesn't say. When a prefill is loaded, a state that
    nobody needs tells. If it can't be shared, prompts are read token by token, and ``told`` says so.

    Args:
        folder: of the artifact.
        compute_units: one of ``COMPUTE_UNITS``.

    Raises:
        BadInput: the folder doesn't hold a package of ours.
        Unsupported: Core ML isn't on this machine.
        RuntimeRefused: Core ML doesn't load decode; later, that it doesn't load or run another function.
    """

    def __init__(self, folder: Path, *, compute_units: str = DEFAULT_UNITS) -> None:
        _need()
        self._folder, self._units = folder, compute_units
        path = folder / contract.FILE_NAME
        if not path.is_dir():
            raise BadInput("this part of the artifact is missing", where=str(path), fix="build it again")
        super().__init__(read_contract(_metadata(path), path))
        self._functions: dict[int, Any] = {}
        self._shares: dict[int, bool] = {}
        self._notes: list[str] = []
        self._state: Any = None
        self._function(1)
        self._forget()

    def streams(self) -> dict[int, Floats]:
        """None: Core ML shows nothing from inside a function."""
        return {}

    def told(self) -> list[str]:
        """What the report should say about this run: a state that isn't shared, and the plan of every function."""
        found = list(self._notes)
        for bucket, model in self._functions.items():
            try:
                found.append(str(_plan_of(model, entry_name(bucket), self._units, not self.host.stateful)))
            except RuntimeRefused as refusal:
                found.append(str(refusal))
        return found

    def close(self) -> None:
        """Let go of the models and of the state."""
        self._functions.clear()
        self._state = None

    def _function(self, bucket: int) -> Any:
        if bucket not in self._functions:
            single = not self.host.stateful
            name = entry_name(bucket)
            path = self._folder / contract.package_name(name, self.host.stateful)
            self._functions[bucket] = _load(path, name, self._units, single)
        return self._functions[bucket]

    def _plan(self, count: int) -> list[tuple[int, int]]:
        plan = self.host.plan(count)
        if all(bucket == 1 or self._reads(bucket) for _, bucket in plan):
            return plan
        # Whatever keeps one function from sharing keeps the others.
        self.host.buckets = []
        return self.host.plan(count)

    def _reads(self, bucket: int) -> bool:
        """Whether a prefill can be used: it writes into a state that decode's model made."""
        if bucket not in self._shares:
            self._shares[bucket] = not self.host.stateful or self._try_to_share(bucket)
        return self._shares[bucket]

    def _try_to_share(self, bucket: int) -> bool:
        model, name = self._function(bucket), entry_name(bucket)
        # Of a sequence of its own, which is thrown away: a call that fails may leave anything in a state.
        given = Host(self.host.contract).inputs(np.ones(bucket, np.int32), bucket)
        state = self._new_state(1)
        try:
            _predict(model, name, dict(given), state)
        except RuntimeRefused as refusal:
            own = self._new_state(bucket)
            _predict(model, name, dict(given), own)  # refused with its own state too: it isn't about sharing
            self._notes.append(f"with a state of {DECODE}, {refusal}; so prompts were read token by token")
            return False
        if any(self._read(state, port).any() for port in {s["port"] for s in self.host.contract["state"] if s["port"]}):
            return True
        self._notes.append(f"{name} leaves a state of {DECODE} as it was, so prompts were read token by token")
        return False

    def _call(self, bucket: int, given: dict[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        found = _predict(self._function(bucket), entry_name(bucket), given, self._state)
        want = (bucket, self.host.vocab)
        if "logits" not in found or np.shape(found["logits"]) != want:
            raise RuntimeRefused(f"{entry_name(bucket)} gives no logits of sizes {list(want)} in Core ML")
        return found

    def _held(self, port: str) -> NDArray[Any]:
        return self._read(self._state, port)

    def _read(self, state: Any, port: str) -> NDArray[Any]:
        with _asking(f"Core ML doesn't show the state {port!r}"):
            return np.asarray(state.read_state(port))

    def _forget(self) -> None:
        self._state = self._new_state(1) if self.host.stateful else None

    def _new_state(self, bucket: int) -> Any:
        model = self._function(bucket)
        with _asking(f"Core ML makes no state for {entry_name(bucket)}"):
            return model.make_state()


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """A call into Core ML, of which any exception is a refusal.

    Args:
        what: isn't done then, as a sentence.

    Raises:
        RuntimeRefused: with Core ML's own words behind ours.
    """
    try:
        yield
    except Exception as fault:  # the proxy passes on whatever Core ML throws
        raise RuntimeRefused(f"{what}: {_line(fault)}") from fault


def _need() -> None:
    if what := missing():
        raise Unsupported(what, fix="try it on a Mac with: pip install 'needle-export[coreml]'")


def _line(fault: BaseException) -> str:
    """What an exception says, on one line of bearable length."""
    return " ".join(str(fault).split())[:300] or type(fault).__name__


def _metadata(path: Path) -> dict[str, str]:
    import coremltools as ct

    try:
        with quietly():
            return dict(ct.models.MLModel(str(path), skip_model_load=True).user_defined_metadata)
    except Exception as fault:  # coremltools raises what its parser does
        raise BadInput(f"coremltools can't read it: {_line(fault)}", where=str(path), fix="build it again") from fault


def _load(path: Path, function: str, compute_units: str, single: bool) -> Any:
    """The model object of a function, loaded by Core ML.

    Raises:
        RuntimeRefused: Core ML doesn't load it.
    """
    import coremltools as ct

    model = None
    try:
        with quietly():
            model = ct.models.MLModel(
                str(path),
                function_name=None if single else function,
                compute_units=ct.ComputeUnit[COMPUTE_UNITS[compute_units]],
            )
            # coremltools keeps a failure to itself until it is asked for something that needs the loaded model.
            model.get_compiled_model_path()
    except Exception as fault:  # the proxy passes on whatever Core ML throws
        reason = _line(getattr(model, "_framework_error", None) or fault)
        raise RuntimeRefused(f"Core ML doesn't load {function} with compute units {compute_units}: {reason}") from fault
    return model


def _predict(model: Any, name: str, given: dict[str, NDArray[Any]], state: Any) -> Mapping[str, NDArray[Any]]:
    """One prediction.

    Raises:
        RuntimeRefused: Core ML raised something.
    """
    with _asking(f"Core ML can't run {name}"):
        found: Mapping[str, NDArray[Any]] = model.predict(given) if state is None else model.predict(given, state=state)
    return found
