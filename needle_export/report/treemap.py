"""Areas in proportion to bytes: a squarified treemap, as pure geometry.

M. Bruls, K. Huizing, J. J. van Wijk, "Squarified Treemaps", 2000: rows are filled along the shorter side of what is
left, as long as the worst ratio of sides in the row gets better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rect:
    """A rectangle: its upper left corner, width and height."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        """Width times height."""
        return self.width * self.height


def squarify(weights: Sequence[int], frame: Rect) -> list[Rect]:
    """Rectangles that fill the frame, with areas in proportion to the weights, in the weights' order.

    The largest comes first, in the upper left corner; equal ones keep their order. A weight of 0 gets no area.

    Raises:
        ValueError: for a weight below 0, or for weights above 0 in a frame without area.
    """
    if any(weight < 0 for weight in weights):
        raise ValueError("a weight is below 0")
    total = sum(weights)
    if total and not (frame.width > 0 and frame.height > 0):
        raise ValueError("the frame has no area")
    out = [Rect(frame.x, frame.y, 0, 0)] * len(weights)
    order = sorted((index for index, weight in enumerate(weights) if weight), key=lambda index: -weights[index])
    rest, left = frame, total
    while order:
        count = _row_length([weights[index] for index in order], rest, left)
        row, order = order[:count], order[count:]
        taken = sum(weights[index] for index in row)
        for index, rect in zip(row, _cut(rest, [weights[i] for i in row], taken, left), strict=True):
            out[index] = rect
        rest, left = _without(rest, taken, left), left - taken
    return out


def _row_length(weights: Sequence[int], rest: Rect, left: int) -> int:
    """How many of the weights, which descend, make the row with the best worst ratio along the shorter side.

    Args:
        left: the sum of the weights, which ``rest`` is there for.
    """
    side, scale = min(rest.width, rest.height), rest.area / left
    best, taken = float("inf"), 0
    for count, weight in enumerate(weights, 1):
        taken += weight
        depth = taken * scale / side
        # A row's worst is its longest or its shortest: weights descend, so the first or the last.
        lengths = (weights[0] * scale / depth, weight * scale / depth)
        worst = max(max(length / depth, depth / length) for length in lengths)
        if worst > best:
            return count - 1
        best = worst
    return len(weights)


def _cut(rest: Rect, row: Sequence[int], taken: int, left: int) -> list[Rect]:
    """The row's rectangles: side by side along the shorter side of the rest."""
    share = taken / left
    out, before = [], 0
    for weight in row:
        start, length = before / taken, weight / taken
        if rest.width >= rest.height:
            out.append(Rect(rest.x, rest.y + start * rest.height, share * rest.width, length * rest.height))
        else:
            out.append(Rect(rest.x + start * rest.width, rest.y, length * rest.width, share * rest.height))
        before += weight
    return out


def _without(rest: Rect, taken: int, left: int) -> Rect:
    """What a row leaves of the rest."""
    share = taken / left
    if rest.width >= rest.height:
        return Rect(rest.x + share * rest.width, rest.y, (1 - share) * rest.width, rest.height)
    return Rect(rest.x, rest.y + share * rest.height, rest.width, (1 - share) * rest.height)
