"""What a chart needs to know before it is drawn: scales, round numbers on axes, and room for labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CHAR = 0.62
"""Width of an average character in units of the type's size; on the wide side, so that what fits does fit."""


LINE = 1.1
"""From a line of a label to the next, in units of the type's size."""

_MARKER = 7.0
"""Half the side of the square that a marker covers."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` to a fraction of 0 to 1, by value or by its logarithm."""

    low: float
    high: float
    logarithmic: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.logarithmic and self.low <= 0):
            raise ValueError(f"an axis can't go from {self.low} to {self.high}")

    def __call__(self, value: float) -> float:
        """Where a value is; outside of 0 to 1 where it is outside of the scale."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def from_zero(greatest: float, count: int = 5) -> tuple[Scale, tuple[float, ...]]:
    """A scale from 0 to a round number that holds ``greatest``, and about ``count`` round numbers on it."""
    step = _round_step((greatest or 1.0) / count)
    steps = max(1, math.ceil((greatest or 1.0) / step - 1e-9))
    return Scale(0.0, steps * step), tuple(index * step for index in range(steps + 1))


def decades(least: float, greatest: float) -> tuple[Scale, tuple[float, ...]]:
    """A logarithmic scale over whole powers of ten that hold both, and these powers; both are above 0."""
    low, high = math.floor(math.log10(least) + 1e-9), math.ceil(math.log10(greatest) - 1e-9)
    high = max(high, low + 1)
    return Scale(10.0**low, 10.0**high, True), tuple(10.0**power for power in range(low, high + 1))


def around(values: Sequence[float]) -> Scale:
    """A logarithmic scale with a little room on both sides of the values, which are all above 0."""
    low, high = min(values), max(values)
    room = (high / low) ** 0.06 if high > low else 2.0
    return Scale(low / room, high * room, True)


def rounds(scale: Scale, most: int = 5) -> tuple[float, ...]:
    """Round numbers on a logarithmic scale, not many more than ``most``, the same of each decade."""
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    found: list[float] = []
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [digit * 10.0**power for power in powers for digit in digits
                 if scale.low <= digit * 10.0**power <= scale.high]
        if len(found) <= most:
            break
    return tuple(found)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that isn't below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def text_width(text: str, size: float) -> float:
    """About how wide a text is, the longest of its lines, in the unit of its size."""
    return max(map(len, text.split("\n"))) * size * _CHAR


@dataclass(frozen=True)
class Label:
    """Where a point's label stands: which side of it, and where its line of text begins or ends and lies.

    Attributes:
        anchor: ``start`` (to the right of the point), ``end`` (to the left) or ``middle`` (above or below).
        dx, dy: from the point to the anchor at the text's middle height.
        away: so far that a line should lead there.
    """

    anchor: str
    dx: float
    dy: float
    away: bool = False


_BESIDE, _OVER = 10.0, 16.0
"""How far a label stands from its point, sideways and up or down, for type of 12 px."""

AROUND = (
    Label("start", _BESIDE, 0), Label("end", -_BESIDE, 0), Label("middle", 0, -_OVER), Label("middle", 0, _OVER),
    *(Label(anchor, side, down)
      for anchor, side in (("start", _BESIDE), ("end", -_BESIDE)) for down in (-_OVER, _OVER)),
    *(Label(anchor, 2 * side, steps * _OVER * way, away=True) for steps in (2, 3, 4, 5)
      for anchor, side in (("start", _BESIDE), ("end", -_BESIDE)) for way in (1, -1)),
)
"""Places around a point, the best first."""

BESIDE = (
    Label("start", _BESIDE, 0),
    *(Label("start", 2 * _BESIDE, steps * _OVER / 2 * way, away=True) for steps in range(1, 9) for way in (-1, 1)),
    Label("end", -_BESIDE, 0),
)
"""Places beside the end of a line."""


def place_labels(points: Sequence[tuple[float, float]], texts: Sequence[str], size: float, widths: Sequence[float],
                 height: float, places: Sequence[Label] = AROUND) -> list[Label | None]:
    """A place for each point's label that covers neither a point nor another label, in a frame of each of the widths.

    Args:
        points: x as a fraction of the width, y in the unit of the height.
        size: of the type.
        widths: of the frame, narrowest and widest; in between points only move apart.
        places: that are tried, in this order.

    Returns:
        None for a label that has no place; then a table must name the point.
    """
    taken = [[_around(x * width, y) for x, y in points] for width in widths]
    out: list[Label | None] = []
    for index, ((x, y), text) in enumerate(zip(points, texts, strict=True)):
        long = text_width(text, size)
        for label in places:
            below = size * (0.6 + LINE * text.count("\n"))
            boxes = [_box(x * width + label.dx, y + label.dy, long, below, label.anchor) for width in widths]
            if all(_free(box, [b for at, b in enumerate(others) if at != index], width, height)
                   for box, others, width in zip(boxes, taken, widths, strict=True)):
                for box, others in zip(boxes, taken, strict=True):
                    others.append(box)
                out.append(label)
                break
        else:
            out.append(None)
    return out


def _free(box: Box, others: Sequence[Box], width: float, height: float) -> bool:
    """Whether a label is inside the frame and covers nothing."""
    inside = box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= height
    return inside and not any(_overlap(box, other) for other in others)


def _around(x: float, y: float) -> Box:
    """What a point's marker covers."""
    return x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER


def _box(x: float, y: float, width: float, below: float, anchor: str) -> Box:
    """What a label covers whose first line has its middle at y, with this much below that."""
    left = {"start": x, "end": x - width, "middle": x - width / 2}[anchor]
    return left, y - _OVER / 2, left + width, y + below


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
