"""A function made ready to run: constants in their places, an implementation for every op, and when values go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from needle_export.errors import BadInput
from needle_export.targets.coreml.evaluate import ops
from needle_export.targets.coreml.evaluate.call import OPS, Call, Kernel, UnknownOp
from needle_export.targets.coreml.evaluate.compressed import decompress
from needle_export.targets.coreml.evaluate.constants import Constant, Plain
from needle_export.targets.coreml.evaluate.spec import FunctionInfo, Op, Value
from needle_export.targets.coreml.evaluate.types import FLOATS, TensorType

assert ops  # imported for what it registers

#: Rounds results and looks at them: (step, result, arguments) to result.
Finish = Callable[["Step", Any, list[Any]], Any]


@dataclass(frozen=True)
class Step:
    """One op, bound.

    Attributes:
        op: that it computes.
        kernel: that computes it.
        arguments: places of its arguments.
        outputs: places of its outputs; one in the same place as a state writes it.
        types: of the outputs, for a check.
        shapes: of the outputs where they are known, else None.
        drops: places whose values nobody asks for any more.
        moves: whether results are values of arguments, so that nothing is rounded.
    """

    op: Op
    kernel: Kernel
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    types: tuple[TensorType, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    drops: tuple[int, ...]
    moves: bool


@dataclass
class Plan:
    """A function's steps, with a value for every place that is known beforehand."""

    function: FunctionInfo
    places: list[Tensor | None]
    inputs: dict[str, int]
    states: dict[str, int]
    outputs: dict[str, int]
    steps: tuple[Step, ...] = ()


@dataclass
class ConstantPool:
    """Constants of all functions of a package: equal ones are decompressed once.

    Args:
        rounds: whether decompressed values are rounded to a declared float16.
        report: is told of NaN and infinite elements: (op, function, kind, count).
    """

    rounds: bool
    report: Callable[[Op, str, str, int], None]
    _known: dict[Any, Constant] = field(default_factory=dict)
    _unseen: dict[Any, Op] = field(default_factory=dict)

    def plain(self, value: Value, op: Op, function: str) -> Constant:
        """A constant as it is stored."""
        fresh = Plain(value)
        known = self._known.setdefault(fresh.key, fresh)
        if known is fresh:
            for kind, count in fresh.unusual().items():
                self.report(op, function, kind, count)
        return known

    def compressed(self, op: Op, inputs: dict[str, Constant], function: str) -> Constant:
        """What a constexpr op stands for."""
        fresh = decompress(op, inputs, self.rounds, f"function {function!r}")
        known = self._known.setdefault(fresh.key, fresh)
        if known is fresh:
            self._unseen[fresh.key] = op
        return known

    def look_at(self, constant: Constant, function: str) -> None:
        """Tell of elements of a decompressed constant that are beyond float16, once."""
        op = self._unseen.pop(constant.key, None)
        if op is None or constant.type.dtype not in FLOATS or bool(torch.isfinite(constant.dense).all()):
            return
        self.report(op, function, "overflow", int((~torch.isfinite(constant.dense)).sum()))


class _Planner:
    def __init__(self, function: FunctionInfo, pool: ConstantPool) -> None:
        self.function, self.pool = function, pool
        self.types: dict[str, TensorType] = {**function.inputs, **function.states}
        self.constants: dict[str, Constant] = {}
        self.place: dict[str, int] = {}
        self.values: list[Tensor | None] = []
        for name in self.types:
            self._new(name, None)

    def _new(self, name: str, value: Tensor | None) -> int:
        self.place[name] = len(self.values)
        self.values.append(value)
        return self.place[name]

    def _at(self, name: str) -> int:
        """The place of a value; a constant gets one when a kernel first asks for its elements."""
        if name not in self.place:
            constant = self.constants[name]
            self._new(name, constant.dense)
            self.pool.look_at(constant, self.function.name)
        return self.place[name]

    def _names(self, op: Op) -> dict[str, tuple[str, ...]]:
        """Arguments by name; those written in place are given names that no program can have."""
        names = {}
        for parameter, argument in op.inputs.items():
            found = []
            for number, one in enumerate(argument):
                if isinstance(one, str):
                    found.append(one)
                    continue
                name = f"\0{op.name}\0{parameter}\0{number}"
                self.constants[name] = self.pool.plain(one, op, self.function.name)
                self.types[name] = one.type
                found.append(name)
            names[parameter] = tuple(found)
        return names

    def plan(self) -> Plan:
        bound = []
        for op in self.function.ops:
            names = self._names(op)
            if op.type == "const" or op.type.startswith("constexpr_"):
                self._constant(op, names)
            elif op.type in ("read_state", "write_state"):
                bound.append(self._state(op, names))
            else:
                bound.append(self._op(op, names))
            for name, declared in op.outputs:
                self.types[name] = declared
        inputs = {name: self.place[name] for name in self.function.inputs}
        states = {name: self.place[name] for name in self.function.states}
        outputs = {name: self._at(name) for name in self.function.outputs}
        plan = Plan(self.function, self.values, inputs, states, outputs)
        plan.steps = tuple(self._with_drops(bound, {*outputs.values(), *states.values()}))
        return plan

    def _constant(self, op: Op, names: dict[str, tuple[str, ...]]) -> None:
        where = f"function {self.function.name!r}, op {op.name!r} of type {op.type!r}"
        inputs = {}
        for parameter, argument in names.items():
            if len(argument) != 1 or argument[0] not in self.constants:
                raise BadInput(f"parameter {parameter!r} isn't one constant", where=where)
            inputs[parameter] = self.constants[argument[0]]
        if op.type != "const":
            constant = self.pool.compressed(op, inputs, self.function.name)
        elif set(inputs) != {"val"} or len(op.outputs) != 1:
            raise BadInput("a constant has one value and one output", where=where)
        else:
            constant = inputs["val"]
        if constant.type != op.outputs[0][1]:
            raise BadInput(f"holds {constant.type} and declares {op.outputs[0][1]}", where=where)
        self.constants[op.outputs[0][0]] = constant

    def _state(self, op: Op, names: dict[str, tuple[str, ...]]) -> Step:
        call = Call(op, self.function.name, self.types, self.constants, names)
        declared = call.type("input")
        state = names["input"][0]
        call.check(state in self.function.states, f"names {state!r}, which is no state")
        if op.type == "read_state":
            call.finish()
            call.check(call.outputs == (declared,), "declares another type than its state has")
            arguments, outputs = (self.place[state],), (self._new(op.outputs[0][0], None),)
        else:
            data = call.tensor("data")
            call.finish()
            call.check(data == declared, f"writes {data} into a state of {declared}")
            call.check(not op.outputs, "has an output")
            # Values are never changed where they lie, so a state may share its tensor with others.
            arguments, outputs = (self._at(call.arguments[0]),), (self.place[state],)
        return Step(op, lambda value: value, arguments, outputs, (declared,), (declared.shape,), (), True)

    def _op(self, op: Op, names: dict[str, tuple[str, ...]]) -> Step:
        call = Call(op, self.function.name, self.types, self.constants, names)
        known = OPS.get(op.type)
        if known is None:
            raise UnknownOp("the evaluator doesn't know this type of op", where=call.where)
        kernel = known.implement(call)
        call.finish()
        arguments = tuple(self._at(name) for name in call.arguments)
        outputs = tuple(self._new(name, None) for name, _ in op.outputs)
        shapes = tuple(None if -1 in declared.shape else declared.shape for declared in call.outputs)
        return Step(op, kernel, arguments, outputs, call.outputs, shapes, (), known.moves)

    def _with_drops(self, steps: list[Step], kept: set[int]) -> list[Step]:
        """Steps that drop what is asked for the last time; constants stay for the next run."""
        seen = set(kept) | {place for place, value in enumerate(self.values) if value is not None}
        done = []
        for step in reversed(steps):
            drops = []
            for place in dict.fromkeys((*step.arguments, *step.outputs)):
                if place not in seen:
                    seen.add(place)
                    drops.append(place)
            done.append(
                Step(
                    step.op,
                    step.kernel,
                    step.arguments,
                    step.outputs,
                    step.types,
                    step.shapes,
                    tuple(drops),
                    step.moves,
                )
            )
        return done[::-1]


def plan_function(function: FunctionInfo, pool: ConstantPool) -> Plan:
    """Make a function ready to run.

    Raises:
        UnknownOp: an op, or a parameter of one, that the evaluator doesn't know.
        BadInput: the program contradicts itself.
    """
    return _Planner(function, pool).plan()
