"""coremltools' model class as it would be on a Mac, with our evaluator behind it: the boundary that tests can't cross.

What Core ML does is copied from coremltools 9.0's Python code and from docs/ios.md. What nobody here has seen it do,
such as whether functions share a state, is a switch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

VERSION = "15.5"


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        load: functions that Core ML doesn't load.
        predict: functions whose predictions raise.
        foreign: what becomes of a state that another function's model made: "taken", "refused" or "ignored".
        states: whether there are any, which begin with macOS 15.
        reading: whether a state can be read.
        plan: whether there is a compute plan.
        scale: of the logits; 1 is right.
        forgets: writes into states are lost.
    """

    load: frozenset[str] = frozenset()
    predict: frozenset[str] = frozenset()
    foreign: str = "taken"
    states: bool = True
    reading: bool = True
    plan: bool = True
    scale: float = 1.0
    forgets: bool = False
    #: Names of the functions that were called, in order.
    called: list[str] = field(default_factory=list)
    #: (function, compute units) of the models that were loaded.
    loaded: list[tuple[str, str]] = field(default_factory=list)


FAULTS = Faults()


class FakeState:
    """States of a sequence, and the model that made them."""

    def __init__(self, maker: FakeModel) -> None:
        self.maker = maker
        self.arrays = {name: np.zeros(t.shape, np.float16) for name, t in maker.function.states.items()}

    def read_state(self, name: str) -> np.ndarray:
        if not FAULTS.reading:
            raise RuntimeError("reading isn't possible")
        return self.arrays[name].copy()


class FakeModel:
    """``coremltools.models.MLModel``."""

    def __new__(cls, model: str, **given: Any) -> Any:
        if "mil_program" in given:  # a converter that has made a program wants the class itself
            from coremltools.models.model import MLModel

            return MLModel(model, **given)
        return super().__new__(cls)

    def __init__(
        self, model: str, *, skip_model_load: bool = False, compute_units: Any = None, function_name: str | None = None
    ) -> None:
        from needle_export.targets.coreml.evaluate import Evaluator, load_package

        package = load_package(model)
        if function_name is not None and "main" in package.functions:
            raise ValueError('function_name must be "main" for non multifunction model')
        self.name = function_name or package.default
        self.user_defined_metadata = package.metadata
        self.function = package.function(self.name)
        self.path = model
        self._framework_error: Exception | None = None
        self.evaluator: Any = None
        if skip_model_load:
            return
        FAULTS.loaded.append((self.name, compute_units.name))
        if self.name in FAULTS.load:
            self._framework_error = RuntimeError("Failed to build the model execution plan")
            warnings.warn("You will not be able to run predict() on this Core ML model.", RuntimeWarning, stacklevel=2)
            return
        self.evaluator = Evaluator(package, "declared")

    def get_compiled_model_path(self) -> str:
        if self.evaluator is None:
            raise Exception("This model was not loaded or compiled with the Core ML Framework.")
        return f"{self.path}#{self.name}"

    def make_state(self) -> FakeState:
        if not FAULTS.states:
            raise Exception("State functionality is only supported on macOS 15+")
        return FakeState(self)

    def predict(self, data: dict[str, Any], state: FakeState | None = None) -> dict[str, np.ndarray]:
        for name in data:
            if name not in self.function.inputs:
                raise KeyError(f'Provided key "{name}", in the input dict, does not match')
        for name, value in data.items():  # as coremltools does, in the caller's own dictionary
            data[name] = value.astype(np.float32) if value.dtype == np.float16 else value
        FAULTS.called.append(self.name)
        if self.name in FAULTS.predict:
            raise RuntimeError("Unable to compute the prediction\nusing a neural network model.")
        if self.function.states and state is None:
            raise RuntimeError("The input feature for k_00 must be an MLState, but it was not")
        foreign = state is not None and state.maker is not self
        if foreign and FAULTS.foreign == "refused":
            raise RuntimeError("the state was made by another model")
        arrays = state.arrays if state is not None else {}
        for name, array in arrays.items():
            self.evaluator.state[name] = array
        found: dict[str, np.ndarray] = self.evaluator.run(self.name, data)
        if not FAULTS.forgets and not (foreign and FAULTS.foreign == "ignored"):
            for name in arrays:
                arrays[name] = self.evaluator.state[name].astype(np.float16)
        found["logits"] = found["logits"] * np.float32(FAULTS.scale)
        return found


class MLNeuralEngineComputeDevice:
    """Stands for the device; code looks at the name of the class."""


class MLCPUComputeDevice:
    """Likewise."""


class FakePlan:
    """``coremltools.models.compute_plan.MLComputePlan``: products on the Neural Engine, some ops on no device."""

    def __init__(self, path: str) -> None:
        from needle_export.targets.coreml.evaluate import load_package

        package, _, name = path.partition("#")
        function = load_package(package).function(name)
        operations = [SimpleNamespace(operator_name=f"ios18.{op.type}") for op in function.ops]
        block = SimpleNamespace(operations=operations)
        program = SimpleNamespace(functions={name: SimpleNamespace(block=block)})
        self.model_structure = SimpleNamespace(program=program)

    @classmethod
    def load_from_path(cls, path: str, compute_units: Any) -> FakePlan:
        if not FAULTS.plan:
            raise RuntimeError("MLComputePlan needs a newer system")
        return cls(path)

    def get_compute_device_usage_for_mlprogram_operation(self, op: Any) -> Any:
        kind = op.operator_name.removeprefix("ios18.")
        if kind == "cast":
            return None
        device = MLNeuralEngineComputeDevice() if kind in ("linear", "matmul") else MLCPUComputeDevice()
        return SimpleNamespace(preferred_compute_device=device)

    def get_estimated_cost_for_mlprogram_operation(self, op: Any) -> Any:
        return SimpleNamespace(weight=0.01) if op.operator_name == "ios18.linear" else None


def install(change: Callable[[Any, str, Any], None] = setattr, **faults: Any) -> Faults:
    """Put the fake in coremltools' place; what it returns tells what happened and can be changed."""
    from needle_export.targets.coreml import apple
    from needle_export.targets.quiet import quietly

    with quietly():
        import coremltools
        from coremltools.models import compute_plan, model

    change(model, "_MLModelProxy", object())
    change(coremltools.models, "MLModel", FakeModel)
    change(compute_plan, "MLComputePlan", FakePlan)
    change(apple, "macos_version", lambda: VERSION)
    fresh = Faults(**faults)
    FAULTS.__dict__.update(fresh.__dict__)
    return FAULTS


def site(folder: Path) -> dict[str, str]:
    """What makes another Python process of ours meet the fake: variables for its environment."""
    root = Path(__file__).parents[2]
    code = "from tests.support.fake_coreml import install\ninstall()\n"
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": f"{folder}:{root}"}
