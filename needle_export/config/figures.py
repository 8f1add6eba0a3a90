"""Numbers that say where they come from: each with its unit, and published, measured or a guess."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, TypeVar

import pydantic

from needle_export.config.options import SYSTEMS
from needle_export.config.strict import Strict
from needle_export.config.units import quantity

S = TypeVar("S", bound="Sourced")

_ADDRESS = re.compile(r"https://[^\s/]+\.[^\s/]+\S*")

_MIN_REASON = 20


class Sourced(Strict):
    """What every figure has beside its value.

    Attributes:
        kind: where it comes from.
        source: of a published one the https address of the document, and what it says there if that isn't the value
            itself; of a measured one the command; of a guess the reasoning.
    """

    kind: Literal["published", "measured", "guess"]
    source: str

    @pydantic.model_validator(mode="after")
    def _check_source(self: S) -> S:
        said = self.source.strip()
        addressed = _ADDRESS.match(said) is not None
        if self.kind == "published" and not addressed:
            raise ValueError("the source of a published figure begins with the https address of the document")
        if self.kind == "measured" and (not said or addressed):
            raise ValueError("the source of a measured figure is the command that measured it")
        if self.kind == "guess" and (addressed or len(said) < _MIN_REASON):
            raise ValueError("the source of a guess is the reasoning behind it, in words")
        return self

    @property
    def address(self) -> str:
        """The document of a published figure, or empty."""
        found = _ADDRESS.match(self.source.strip()) if self.kind == "published" else None
        return found[0].rstrip(",;:") if found else ""


class Figure(Sourced):
    """A quantity.

    Attributes:
        value: number and unit, as :func:`~needle_export.config.units.quantity` reads them.
    """

    value: str


class Version(Sourced):
    """A version of a runtime or a system.

    Attributes:
        value: whole numbers with dots between: ``1.25.1``.
    """

    value: Annotated[str, pydantic.StringConstraints(pattern=r"^\d{1,5}(\.\d{1,5}){0,3}$")]

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers to compare by, with none that is 0 at the end."""
        return version_parts(self.value)


class Count(Sourced):
    """A whole number that has no unit: an opset, a version of the IR."""

    value: Annotated[int, pydantic.Field(ge=1, le=1000)]


class System(Sourced):
    """The newest of the systems that ``--os`` names whose packages run."""

    value: str

    @pydantic.field_validator("value")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in SYSTEMS:
            raise ValueError(f"there is no {value!r}; choose from {', '.join(SYSTEMS)}")
        return value


def version_parts(text: str) -> tuple[int, ...]:
    """``1.25.0`` as (1, 25): numbers to compare by."""
    parts = [int(part) for part in text.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _of(kind: str) -> Callable[[Figure], Figure]:
    def check(figure: Figure) -> Figure:
        quantity(figure.value, kind)
        return figure

    return check


Bytes = Annotated[Figure, pydantic.AfterValidator(_of("bytes"))]
Time = Annotated[Figure, pydantic.AfterValidator(_of("time"))]
Bandwidth = Annotated[Figure, pydantic.AfterValidator(_of("bandwidth"))]
Compute = Annotated[Figure, pydantic.AfterValidator(_of("compute"))]
Frequency = Annotated[Figure, pydantic.AfterValidator(_of("frequency"))]


def sourced(table: Strict, path: str = "") -> Iterator[tuple[str, Sourced]]:
    """Everything in a table that says where it comes from, with the key path to it, in the order of the file.

    Entries of a list are numbered from 1, those that are for a target are called after it.
    """
    for name in type(table).model_fields:
        value = getattr(table, name)
        here = f"{path}.{name}" if path else name
        if isinstance(value, Sourced):
            yield here, value
        elif isinstance(value, Strict):
            yield from sourced(value, here)
        elif isinstance(value, tuple):
            for number, entry in enumerate(value, 1):
                key = f"{here}[{getattr(entry, 'target', None) or number}]"
                if isinstance(entry, Sourced):
                    yield key, entry
                elif isinstance(entry, Strict):
                    yield from sourced(entry, key)
