"""Runs functions of a package over one set of states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needle_export.errors import BadInput, UsageError
from needle_export.targets.coreml.evaluate.constants import RUNTIME, to_fp16
from needle_export.targets.coreml.evaluate.package import Package
from needle_export.targets.coreml.evaluate.plan import ConstantPool, Plan, Step, plan_function
from needle_export.targets.coreml.evaluate.spec import Op
from needle_export.targets.coreml.evaluate.types import FLOATS, TensorType

Precision = Literal["float32", "declared"]
Arrays = dict[str, NDArray[Any]]

#: The largest finite float16.
FP16_MAX = 65504.0


@dataclass(frozen=True)
class NumericFinding:
    """Elements that an op made and that are no numbers any more.

    Attributes:
        op_name, op_type, function: where. It is the op at which they arise: what they spread to isn't listed.
        kind: "overflow" (beyond the largest float16, or infinite), "nan", "underflow" (not zero before it was
            rounded), or for a stored constant "constant nan" or "constant infinite".
        count: of elements, over all runs.
    """

    op_name: str
    op_type: str
    function: str
    kind: str
    count: int


class States(MutableMapping[str, NDArray[Any]]):
    """States by name as numpy arrays; reading copies, and assigning sets all elements."""

    def __init__(self, types: Mapping[str, TensorType], rounds: bool) -> None:
        self._types, self._rounds = dict(types), rounds
        self.tensors: dict[str, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """All zeros."""
        self.tensors = {name: torch.zeros(t.shape, dtype=RUNTIME[t.dtype]) for name, t in self._types.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.tensors[name].numpy().copy()

    def __setitem__(self, name: str, value: NDArray[Any]) -> None:
        if name not in self._types:
            raise UsageError(f"there is no state {name!r}", fix=f"states: {', '.join(self._types)}")
        self.tensors[name] = _taken(value, self._types[name], self._rounds, f"state {name!r}")

    def __delitem__(self, name: str) -> NoReturn:
        raise UsageError("a state can't be removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)


class Evaluator:
    """Functions of a package, run op by op.

    A value depends on nothing but what is computed: no step changes a tensor in place, and a run that fails leaves
    the states as they were.

    Args:
        package: to run.
        precision: "float32" computes every float in float32, whatever is declared. "declared" rounds each
            result to float16 where the program declares it; within an op, sums included, it computes in float32.
        threads: of torch while it runs; one if None. More are slower where anything else runs on the machine.
        underflow: whether results that are rounded to zero are findings too.

    Raises:
        BadInput: functions have states of one name and different shapes.
    """

    def __init__(
        self, package: Package, precision: Precision = "float32", threads: int | None = None, *, underflow: bool = False
    ) -> None:
        if precision not in ("float32", "declared"):
            raise UsageError(f"there is no precision {precision!r}", fix='"float32" or "declared"')
        self.package = package
        self._declared = precision == "declared"
        self._threads, self._underflow = threads or 1, underflow
        types: dict[str, TensorType] = {}
        for function in package.functions.values():
            for name, declared in function.states.items():
                if types.setdefault(name, declared) != declared:
                    raise BadInput(
                        f"state {name!r} is {types[name]} in one function and {declared} in another",
                        where=str(package.path),
                    )
        self._state = States(types, self._declared)
        self._plans: dict[str, Plan] = {}
        self._watch: frozenset[str] = frozenset()
        #: Results of the ops that are watched, of the last run.
        self.watched: Arrays = {}
        self._counts: dict[tuple[str, str, str, str], int] = {}
        self._pool = ConstantPool(
            self._declared, lambda op, function, kind, count: self._note(op, function, f"constant {kind}", count)
        )

    @property
    def state(self) -> States:
        """All states, shared by the functions."""
        return self._state

    def reset(self) -> None:
        """Set all states to zero; findings stay."""
        self._state.clear()

    @property
    def findings(self) -> list[NumericFinding]:
        """What was found so far, in the order in which it was found first."""
        return [NumericFinding(*key, count) for key, count in self._counts.items()]

    def forget_findings(self) -> None:
        """Begin to count anew; stored constants are looked at once, and not again."""
        self._counts.clear()

    def _note(self, op: Op, function: str, kind: str, count: int) -> None:
        if count:
            key = (op.name, op.type, function, kind)
            self._counts[key] = self._counts.get(key, 0) + count

    def watch(self, names: Iterable[str]) -> None:
        """Keep the first result of these ops of every run in ``watched``."""
        self._watch = frozenset(names)

    def prepare(self, name: str) -> None:
        """Plan a function and decompress its constants, which the first run does otherwise."""
        with torch.inference_mode():
            if name not in self._plans:
                self._plans[name] = plan_function(self.package.function(name), self._pool)

    def run(self, name: str, inputs: Mapping[str, Any]) -> Arrays:
        """Run a function once.

        Args:
            name: of the function.
            inputs: arrays of the declared shapes, by name; states aren't among them.

        Returns:
            Its outputs by name: float32 for floats, else the declared type as far as torch has it.

        Raises:
            BadInput: the package has no such function or contradicts itself, or an index leaves its axis.
            UsageError: inputs are missing, unknown or of other shapes.
            UnknownOp: the function has an op that the evaluator doesn't know.
        """
        self.prepare(name)
        self.watched = {}
        plan = self._plans[name]
        places = plan.places.copy()
        wanted = plan.function.inputs
        if set(inputs) != set(wanted):
            lacks, more = sorted(set(wanted) - set(inputs)), sorted(set(inputs) - set(wanted))
            what = f"needs input {lacks[0]!r}" if lacks else f"has no input {more[0]!r}"
            raise UsageError(f"function {name!r} {what}", fix=f"it takes {len(wanted)}: see the package's description")
        for key, place in plan.inputs.items():
            places[place] = _taken(inputs[key], wanted[key], self._declared, f"input {key!r} of function {name!r}")
        for key, place in plan.states.items():
            places[place] = self._state.tensors[key]
        with torch.inference_mode(), _threads(self._threads):
            self._steps(plan, places)
        for key, place in plan.states.items():
            self._state.tensors[key] = _there(places[place])
        return {key: _there(places[place]).numpy().copy() for key, place in plan.outputs.items()}

    def _steps(self, plan: Plan, places: list[Tensor | None]) -> None:
        function = plan.function.name
        for step in plan.steps:
            arguments = [places[place] for place in step.arguments]
            try:
                result = step.kernel(*arguments)
            except (IndexError, RuntimeError, ValueError, TypeError) as error:
                reason = " ".join(str(error).split())
                raise BadInput(f"can't be computed: {reason}", where=_where(step, function)) from error
            results = result if isinstance(result, tuple | list) else (result,)
            if len(results) != len(step.outputs):
                raise BadInput(f"gives {len(results)} results", where=_where(step, function))
            for at, value in enumerate(results):
                declared, shape = step.types[at], step.shapes[at]
                if (value.shape != shape if shape is not None else not _fits(value.shape, declared.shape)) or (
                    value.dtype is not RUNTIME[declared.dtype]
                ):
                    raise BadInput(
                        f"gives {value.dtype} of sizes {list(value.shape)} and declares {declared}",
                        where=_where(step, function),
                    )
                if self._declared and not step.moves and declared.dtype in FLOATS:
                    value = self._finish(step, function, value, declared, arguments)
                places[step.outputs[at]] = value
            if step.op.name in self._watch:
                self.watched[step.op.name] = _there(places[step.outputs[0]]).numpy().copy()
            for place in step.drops:
                places[place] = None

    def _finish(
        self, step: Step, function: str, value: Tensor, declared: TensorType, arguments: list[Tensor | None]
    ) -> Tensor:
        """A result as it is declared; what went wrong on the way is noted."""
        half = declared.dtype == "float16"
        rounded = to_fp16(value) if half else value
        # Written so that NaN is explained too; the largest float16 may stand for a value just above it.
        peak = float(torch.linalg.vector_norm(rounded, float("inf"))) if rounded.numel() else 0.0
        if not peak < (FP16_MAX if half else float("inf")):
            self._explain(step, function, value, half, arguments)
        if self._underflow and half:
            self._note(step.op, function, "underflow", int(((rounded == 0) & (value != 0)).sum()))
        return rounded

    def _explain(self, step: Step, function: str, value: Tensor, half: bool, arguments: list[Tensor | None]) -> None:
        floats = [one for one in arguments if isinstance(one, Tensor) and one.dtype is torch.float32]
        infinite = torch.isinf(value)
        over = (value.abs() > FP16_MAX) & ~infinite if half else torch.zeros_like(infinite)
        if not any(bool(torch.isinf(one).any()) for one in floats):
            over = over | infinite
        self._note(step.op, function, "overflow", int(over.sum()))
        if not any(bool(torch.isnan(one).any()) for one in floats):
            self._note(step.op, function, "nan", int(torch.isnan(value).sum()))


def _where(step: Step, function: str) -> str:
    return f"function {function!r}, op {step.op.name!r} of type {step.op.type!r}"


def _fits(shape: torch.Size, declared: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(want in (-1, size) for size, want in zip(shape, declared, strict=True))


def _there(value: Tensor | None) -> Tensor:
    assert value is not None, "a value that is returned is never dropped"
    return value


def _taken(value: Any, declared: TensorType, rounds: bool, what: str) -> Tensor:
    """A copy of an array, in the type that it is computed in.

    Raises:
        UsageError: it has another shape, or a kind of elements that the declared one can't stand for.
    """
    array = np.asarray(value)
    whole = declared.dtype not in FLOATS
    if not _fits(torch.Size(array.shape), declared.shape) or (whole and array.dtype.kind not in "biu"):
        raise UsageError(f"{what} is {declared}, not {array.dtype}{list(array.shape)}")
    # Two unsigned types have no arithmetic in torch, hence numpy converts.
    target = str(RUNTIME[declared.dtype]).removeprefix("torch.")
    tensor = torch.from_numpy(np.array(array, dtype=target, order="C"))
    return to_fp16(tensor) if rounds and declared.dtype == "float16" else tensor


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
