"""One operation as its implementation sees it: declared types, parameters known beforehand, arguments at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.coreml.evaluate.constants import Constant, python_value
from needle_export.targets.coreml.evaluate.spec import Op
from needle_export.targets.coreml.evaluate.types import TensorType


class UnknownOp(Unsupported):
    """An op, or a parameter of one, whose meaning the evaluator doesn't know (exit 5)."""


#: Computes outputs from the tensors that an implementation asked for, in that order.
Kernel = Callable[..., Any]

#: Looks at an op once and returns what computes it.
Implementation = Callable[["Call"], Kernel]


@dataclass(frozen=True)
class Known:
    """An implementation; ``moves`` says that it makes no new values, so that nothing is left to round."""

    implement: Implementation
    moves: bool


#: Implementations by type of op.
OPS: dict[str, Known] = {}


def op(*types: str, moves: bool = False) -> Callable[[Implementation], Implementation]:
    """Register an implementation."""

    def register(implement: Implementation) -> Implementation:
        for type in types:
            OPS[type] = Known(implement, moves)
        return implement

    return register


class _Required:
    """Stands for: no default."""


REQUIRED = _Required()


class Call:
    """One op that is being planned.

    Every parameter must be asked for: one that the implementation doesn't know is an error and never ignored.

    Args:
        op: of the program.
        function: that it is in.
        types: of every value of the function, by name.
        constants: values that don't depend on inputs, by name; those written in place have names too.
        names: of the op's arguments by parameter.
    """

    def __init__(
        self,
        op: Op,
        function: str,
        types: Mapping[str, TensorType],
        constants: Mapping[str, Constant],
        names: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.op, self.function = op, function
        self.outputs = tuple(declared for _, declared in op.outputs)
        #: Names of the values that the kernel is given.
        self.arguments: list[str] = []
        self._types, self._constants, self._names = types, constants, names
        self._asked: set[str] = set()

    @property
    def where(self) -> str:
        """The op in a message."""
        return f"function {self.function!r}, op {self.op.name!r} of type {self.op.type!r}"

    def refuse(self, what: str) -> NoReturn:
        """Say that the op does something that the evaluator doesn't know."""
        raise UnknownOp(what, where=self.where)

    def check(self, holds: bool, what: str) -> None:
        """The program is wrong if this doesn't hold."""
        if not holds:
            raise BadInput(what, where=self.where)

    def _name(self, parameter: str) -> str:
        self._asked.add(parameter)
        names = self._names.get(parameter, ())
        self.check(len(names) == 1, f"parameter {parameter!r} has {len(names)} values and not one")
        return names[0]

    def given(self, parameter: str) -> bool:
        """Whether the op has an optional parameter."""
        self._asked.add(parameter)
        return bool(self._names.get(parameter))

    def type(self, parameter: str) -> TensorType:
        """Declared type of a parameter."""
        return self._types[self._name(parameter)]

    def tensor(self, parameter: str) -> TensorType:
        """Ask for a tensor at run time; its declared type."""
        name = self._name(parameter)
        self.arguments.append(name)
        return self._types[name]

    def tensors(self, parameter: str) -> list[TensorType]:
        """Ask for all tensors of a parameter that takes several."""
        self._asked.add(parameter)
        names = self._names.get(parameter, ())
        self.arguments += names
        return [self._types[name] for name in names]

    def constant(self, parameter: str) -> Constant | None:
        """The constant behind a parameter, still compressed, or None if it depends on inputs."""
        return self._constants.get(self._name(parameter))

    def value(self, parameter: str, default: Any = REQUIRED) -> Any:
        """A parameter that must be known beforehand: a number, a text, lists of numbers, or the default."""
        if default is not REQUIRED and not self.given(parameter):
            return default
        constant = self.constant(parameter)
        if constant is None:
            self.refuse(f"parameter {parameter!r} isn't constant")
        return python_value(constant)

    def same(self, *parameters: str) -> None:
        """Check that parameters, and the first output, have one element type."""
        types = {parameter: self.type(parameter).dtype for parameter in parameters}
        types["its output"] = self.outputs[0].dtype
        if len(set(types.values())) > 1:
            self.check(False, "element types differ: " + ", ".join(f"{key} {value}" for key, value in types.items()))

    def finish(self) -> None:
        """Check that every parameter was asked for.

        Raises:
            UnknownOp: one wasn't.
        """
        if more := sorted(set(self._names) - self._asked):
            self.refuse(f"parameter {more[0]!r} isn't known")


def axis_of(call: Call, axis: int, rank: int) -> int:
    """An axis counted from the front."""
    call.check(-rank <= axis < rank, f"axis {axis} is outside rank {rank}")
    return axis % rank
