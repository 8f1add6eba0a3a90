"""Budgets: bounds for the figures of artifacts, as people write them in TOML.

docs/budgets.md describes the format. What a budget says of a report is for ``report.gate`` to tell.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from needle_export.config.metrics import ANSWERS, BY_NAME, LATENCIES, Metric, Unit
from needle_export.config.options import TARGETS
from needle_export.config.strict import Strict, read_toml
from needle_export.config.units import quantity
from needle_export.errors import BadInput

BoundKind = Literal["absolute", "share", "difference"]

#: How a unit is read: the kind of quantity, and what its SI value is multiplied by.
_QUANTITIES: Mapping[Unit, tuple[str, float]] = {
    "bytes": ("bytes", 1.0),
    "ms": ("time", 1e3),
    "tokens/s": ("speed", 1.0),
}

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_SHARE = re.compile(rf"({_NUMBER})\s*%")
_ENTRY = re.compile(r"\s*\[\[\s*(?:budget|\"budget\"|'budget')\s*\]\]")
_PLAIN = re.compile(rf"({_NUMBER})(?: ([a-z/]+))?")


@dataclass(frozen=True)
class Bound:
    """One end of what is allowed.

    Attributes:
        kind: "absolute", or how it follows from a baseline: "share" of its value, or "difference" from it.
        value: in the metric's unit, of a share the change as a fraction (+2 % is 0.02).
        text: as it was written.
    """

    kind: BoundKind
    value: float
    text: str

    @property
    def relative(self) -> bool:
        """Whether a baseline is needed."""
        return self.kind != "absolute"

    def against(self, baseline: float | None) -> float:
        """The bound in the metric's unit.

        Raises:
            ValueError: it is relative, and there is no baseline.
        """
        if self.kind == "absolute":
            return self.value
        if baseline is None:
            raise ValueError("there is no baseline")
        return baseline * (1 + self.value) if self.kind == "share" else baseline + self.value


class Budget(Strict):
    """One ``[[budget]]`` entry.

    Attributes:
        metric: name of the figure, one of ``config.metrics.METRICS``.
        max, min: the bound, exactly one of them: text with a unit, a number where the figure has none; with a sign it
            is relative to a baseline.
        target, weights, role, device: what it is about; None is any. In ``weights`` a ``*`` stands for anything.
        prompt: length of the prompt that prefill is told for, in tokens; None takes the longest measured.
        data: name of the file of queries that answers are of; None is the only one that there is.
        unconstrained: whether answers are those without the grammar.
        estimated: whether an estimated latency may decide.
        optional: whether it may match nothing, or meet a figure that wasn't measured, without failing.
    """

    metric: str
    max: str | float | None = None
    min: str | float | None = None
    target: str | None = None
    weights: str | None = None
    role: str | None = None
    device: str | None = None
    prompt: Annotated[int, pydantic.Field(gt=0)] | None = None
    data: str | None = None
    unconstrained: bool = False
    estimated: bool = False
    optional: bool = False

    @pydantic.field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        return _known(value, tuple(BY_NAME), "metric")

    @pydantic.field_validator("target")
    @classmethod
    def _known_target(cls, value: str | None) -> str | None:
        return value if value is None else _known(value, TARGETS, "target")

    @pydantic.model_validator(mode="after")
    def _sensible(self) -> Budget:
        if (self.max is None) == (self.min is None):
            raise ValueError("a budget has either max or min" + ("" if self.max is None else ", not both"))
        if self.role is not None and self.metric != "size":
            raise ValueError(f"only size is known by role, not {self.metric}")
        if self.prompt is not None and self.metric != "prefill":
            raise ValueError(f"a prompt belongs to prefill, not to {self.metric}")
        if (self.data is not None or self.unconstrained) and self.metric not in ANSWERS:
            raise ValueError(f"only answers are of data, not {self.metric}")
        if self.estimated and self.metric not in LATENCIES:
            raise ValueError(f"only {' and '.join(LATENCIES)} can be estimated, not {self.metric}")
        _ = self.bound
        return self

    @property
    def figure(self) -> Metric:
        """The metric with its unit and meaning."""
        return BY_NAME[self.metric]

    @property
    def upper(self) -> bool:
        """Whether the bound is ``max``."""
        return self.max is not None

    @property
    def bound(self) -> Bound:
        """The bound, read.

        Raises:
            ValueError: it isn't one for this metric.
        """
        written = self.max if self.max is not None else self.min
        assert written is not None
        return parse_bound(written, self.figure.unit)

    @property
    def sentence(self) -> str:
        """What is asked, in words: ``size of routing, tflite int4: at most 35.5 MB``."""
        of = f" of {self.role}" if self.role else f" of {self.prompt} tokens" if self.prompt else ""
        which = " ".join(part for part in (self.target, self.weights) if part)
        on = f"on {self.device}" if self.device else ""
        of_data = " ".join(part for part in (f"on {self.data}" if self.data else "",
                                             "without the grammar" if self.unconstrained else "") if part)
        about = "".join(f", {part}" for part in (which, on, of_data) if part)
        return f"{self.metric}{of}{about}: {'at most' if self.upper else 'at least'} {self.bound.text}"


class BudgetFile(Strict):
    """A file of budgets."""

    #: Checked for being there below, so that a misspelt table is named as what it is.
    budget: tuple[Budget, ...] = ()


def parse_budgets(path: Path) -> tuple[Budget, ...]:
    """The budgets of a file, in order.

    Raises:
        BadInput: it can't be read, or an entry isn't a budget; names the file and the key.
    """
    found = read_toml(BudgetFile, path).budget
    if not found:
        raise BadInput("there is no budget in it", where=str(path), fix="write an entry under [[budget]]")
    return found


def entry_lines(path: Path, count: int) -> tuple[int | None, ...]:
    """Lines, from 1, in which the entries of a file of budgets begin; None for all where they aren't told apart.

    Args:
        path: the file, which was read.
        count: entries that it has.
    """
    text = path.read_text(encoding="utf-8")
    lines = [number for number, line in enumerate(text.split("\n"), 1) if _ENTRY.match(line)]
    # An array written in one, or a header inside a text of several lines, would be another number of them.
    return tuple(lines) if len(lines) == count else (None,) * count


def parse_bound(written: str | float, unit: Unit) -> Bound:
    """A bound for a figure of a unit.

    Args:
        written: ``"35.5 MB"``, ``"4 ms"``, ``"250 tokens/s"``, ``"99 %"``, ``0.05``; ``"+2 %"``, ``"-100 kB"`` and
            ``"+0.01"`` are relative to a baseline.
        unit: the metric's.

    Raises:
        ValueError: it isn't one; the text says what would be.
    """
    if not isinstance(written, str):
        return Bound("absolute", _plain_number(written, unit), f"{written:g}")
    text = " ".join(written.split())
    sign = text[:1] if text[:1] in ("+", "-") else ""
    rest = text.removeprefix(sign).strip()
    share = _SHARE.fullmatch(rest)
    shown = f"{sign}{rest}"
    if sign:
        factor = -1.0 if sign == "-" else 1.0
        if not share:
            return Bound("difference", factor * _absolute(rest, unit), shown)
        change = factor * float(share[1]) / 100
        if not -1 <= change < math.inf:
            raise ValueError(f"a change of {shown} can't be")
        return Bound("share", change, shown)
    if share and unit != "share":
        raise ValueError(f"{text!r} is a share of what? Write '+{text}' to allow so much more than the baseline")
    if share:
        return Bound("absolute", _in_range(float(share[1]) / 100, unit), shown)
    return Bound("absolute", _in_range(_absolute(rest, unit), unit), shown)


def _plain_number(value: float, unit: Unit) -> float:
    if unit in _QUANTITIES:
        example = {"bytes": "35.5 MB", "ms": "4 ms", "tokens/s": "250 tokens/s"}[unit]
        raise ValueError(f"{value:g} needs its unit, as in '{example}'")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value:g} is below 0 or not finite; a relative bound is text, as in '+0.01'")
    return _in_range(value, unit)


def _absolute(text: str, unit: Unit) -> float:
    """A quantity without a sign, in the metric's unit."""
    if unit in _QUANTITIES:
        kind, factor = _QUANTITIES[unit]
        # Powers of ten leave dust in the last digits, and a bound is met exactly or not.
        return round(quantity(text, kind) * factor, 9)
    match = _PLAIN.fullmatch(text)
    if match is None or match[2] not in (None, unit) or not math.isfinite(float(match[1])):
        example = "0.99 or 99 %" if unit == "share" else f"0.05 or 0.05 {unit}"
        raise ValueError(f"{text[:60]!r} is no bound in {unit}, such as {example}")
    return float(match[1])


def _in_range(value: float, unit: Unit) -> float:
    if unit == "share" and value > 1:
        raise ValueError(f"{value:g} is more than everything; a share is at most 1, or 100 %")
    return value


def _known(value: str, names: tuple[str, ...], what: str) -> str:
    if value in names:
        return value
    near = difflib.get_close_matches(value, names, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
    raise ValueError(f"there is no {what} {value[:60]!r}; {hint}")
