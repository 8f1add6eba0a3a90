"""The charts of a page as positions: across in percent of a plot's width, down in px, so that only lines stretch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from needle_export.report.charts import BESIDE, Label, around, decades, from_zero, place_labels, rounds, text_width
from needle_export.report.cited import Number
from needle_export.report.timings import Kind
from needle_export.report.units import milliseconds, size, small, whole

HEIGHT = 260.0
"""Of a plot, px."""

WIDTHS = (240.0, 640.0)
"""A plot's width on the narrowest phone and at most, px."""

TYPE = 12.0

_ZERO_BAND = 44.0
"""Height of the strip for losses of exactly 0, which a logarithmic axis can't hold, px."""

_LINES = 0.6
"""Share of a plot that lines take; the rest is for their names."""

_LONGEST = 70.0
"""Length of the longest bar in percent; the rest is for what the slower steps take."""

_TARGETS = ("onnx", "tflite", "coreml")
_MAX_LABEL = 24


@dataclass(frozen=True)
class Tick:
    """A number on an axis: where, and how it is written. ``line`` is drawn across the plot."""

    at: float
    text: str
    line: bool = True


@dataclass(frozen=True)
class Mark:
    """A point.

    Attributes:
        x, y: percent and px.
        shape: the target's class, which decides its form and colour.
        solid: filled; what is hollow says in words why.
        label: where its name stands, None where there is no room.
        name: of it.
        title: all that there is to say about it.
        numbers: that its place shows.
    """

    x: float
    y: float
    shape: str
    solid: bool
    label: Label | None
    name: str
    title: str
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Segment:
    """A straight line between two points."""

    x1: float
    y1: float
    x2: float
    y2: float
    shape: str
    dashed: bool


@dataclass(frozen=True)
class Plot:
    """A chart with two axes; ``unnamed`` are names of points that it has no room for."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    segments: tuple[Segment, ...]
    unnamed: tuple[str, ...]
    height: float = HEIGHT
    zero: float | None = None


@dataclass(frozen=True)
class Sized:
    """An artifact between size and loss."""

    name: str
    target: str
    group: object
    size: Number
    loss: Number
    unbeaten: bool


@dataclass(frozen=True)
class Answered:
    """An artifact between size and right answers, with the ends of the 95 % interval."""

    name: str
    target: str
    size: Number
    share: Number
    low: Number
    high: Number


@dataclass(frozen=True)
class Line:
    """Times of one artifact on one machine by length of the prompt: (tokens, ms)."""

    name: str
    target: str
    kind: Kind
    machine: str
    points: tuple[tuple[Number, Number], ...]


@dataclass(frozen=True)
class Bar:
    """A time as a bar, and the one that 95 of 100 stay within, in percent of the room; ``beyond`` if it is longer."""

    name: str
    target: str
    kind: Kind
    machine: str
    ms: Number
    within: Number | None
    length: float
    whisker: float
    beyond: bool


def shape_of(target: str) -> str:
    """The class of a target's colour and form; a target that nobody knows gets one of its own."""
    return target if target in _TARGETS else "other"


def size_and_loss(points: Sequence[Sized]) -> Plot | None:
    """Size across, loss upwards, by their logarithms, losses of 0 in a strip below; None where nothing is to be seen.

    The lines join what no other artifact of the same group beats.
    """
    positive = [p.loss.value for p in points if p.loss.value > 0]
    if len(points) < 2 or not positive:
        return None
    across = around([float(p.size.value) for p in points])
    upward, losses = decades(min(positive), max(positive))
    zero = len(positive) < len(points)
    height = HEIGHT - (_ZERO_BAND if zero else 0)

    def y(value: float) -> float:
        return (1 - upward(value)) * height if value > 0 else HEIGHT - _ZERO_BAND / 2

    places = [(across(p.size.value), y(p.loss.value)) for p in points]
    labels = place_labels(places, [shortened(p.name) for p in points], TYPE, WIDTHS, HEIGHT)
    marks = tuple(
        Mark(100 * place[0], place[1], shape_of(p.target), p.unbeaten, label, shortened(p.name),
             f"{p.name}: {p.size.text}, KL {p.loss.text}" + (", unbeaten" if p.unbeaten else ""), (p.size, p.loss))
        for p, place, label in zip(points, places, labels, strict=True)
    )
    steps: list[Segment] = []
    for group in dict.fromkeys(p.group for p in points):
        best = sorted({place for p, place in zip(points, places, strict=True) if p.group == group and p.unbeaten})
        for (x1, y1), (x2, y2) in pairwise(best):
            steps += [Segment(100 * x1, y1, 100 * x2, y1, "front", False),
                      Segment(100 * x2, y1, 100 * x2, y2, "front", False)]
    y_ticks = [Tick(y(value), small(value)) for value in losses]
    if zero:
        y_ticks.append(Tick(y(0), "0", line=False))
    sizes = [Tick(100 * across(value), _axis_size(value)) for value in rounds(across)]
    return Plot(_apart(sizes), tuple(y_ticks), marks,
                tuple(steps), _unnamed(marks), zero=height if zero else None)


def size_and_answers(points: Sequence[Answered]) -> Plot | None:
    """Size across by its logarithm, right answers upwards to all of them, each with its interval; None of one alone."""
    if len(points) < 2:
        return None
    across = around([float(p.size.value) for p in points])
    # Down from all that are right: what is missing is what differs.
    missing, steps = from_zero(1 - min(p.low.value for p in points), 4)

    def y(share: float) -> float:
        return missing(1 - share) * HEIGHT

    places = [(across(p.size.value), y(p.share.value)) for p in points]
    labels = place_labels(places, [shortened(p.name) for p in points], TYPE, WIDTHS, HEIGHT)
    marks = tuple(
        Mark(100 * place[0], place[1], shape_of(p.target), True, label, shortened(p.name),
             f"{p.name}: {p.size.text}, exact calls {p.share.text}, 95 % interval {p.low.text} to {p.high.text}",
             (p.size, p.share))
        for p, place, label in zip(points, places, labels, strict=True)
    )
    whiskers = tuple(Segment(100 * at, y(p.low.value), 100 * at, y(p.high.value), shape_of(p.target), False)
                     for p, (at, _) in zip(points, places, strict=True))
    y_ticks = tuple(Tick(y(1 - step), f"{100 * (1 - step):.3g} %") for step in steps)
    x_ticks = _apart([Tick(100 * across(value), _axis_size(value)) for value in rounds(across)])
    return Plot(x_ticks, y_ticks, marks, whiskers, _unnamed(marks))


def by_length(lines: Sequence[Line]) -> Plot | None:
    """Length of the prompt across by its logarithm, time upwards; None where nothing was timed."""
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    lengths = sorted({int(tokens.value) for tokens, _ in points})
    scale = around([float(length) for length in lengths])
    upward, times = from_zero(max(ms.value for _, ms in points), 4)
    def across(length: float) -> float:
        return scale(length) * _LINES

    marks: list[tuple[float, float]] = []
    shown: list[tuple[Line, Number, Number, bool]] = []
    segments = []
    for line in lines:
        places = [(across(tokens.value), (1 - upward(ms.value)) * HEIGHT) for tokens, ms in line.points]
        segments += [Segment(100 * a[0], a[1], 100 * b[0], b[1], shape_of(line.target), line.kind == "estimated")
                     for a, b in pairwise(places)]
        for at, (place, (tokens, ms)) in enumerate(zip(places, line.points, strict=True)):
            marks.append(place)
            shown.append((line, tokens, ms, at == len(places) - 1))
    # The last point of a line bears its name; the others only stand in the way of it.
    texts = [_line_name(line) if last else "" for line, _, _, last in shown]
    labels = place_labels(marks, texts, TYPE, WIDTHS, HEIGHT, BESIDE)
    made = tuple(
        Mark(100 * place[0], place[1], shape_of(line.target), line.kind != "estimated", label if text else None, text,
             f"{line.name}, {tokens.text} tokens: {ms.text}, {line.kind}: {line.machine}", (tokens, ms))
        for place, (line, tokens, ms, _), label, text in zip(marks, shown, labels, texts, strict=True)
    )
    x_ticks = _apart([Tick(100 * across(length), whole(length)) for length in lengths])
    y_ticks = tuple(Tick((1 - upward(time)) * HEIGHT, _ms(time)) for time in times)
    return Plot(x_ticks, y_ticks, made, tuple(segments), _unnamed(made))


def bars(rows: Iterable[tuple[str, str, Kind, str, Number, Number | None]]) -> tuple[Bar, ...]:
    """Bars from (name, target, kind, machine, ms, within), as long as their times."""
    given = list(rows)
    scale = _LONGEST / (max((ms.value for *_, ms, _ in given), default=0) or 1)
    return tuple(
        Bar(name, shape_of(target), kind, machine, ms, within, scale * ms.value,
            min(100.0, scale * within.value) if within else 0.0, bool(within and scale * within.value > 100))
        for name, target, kind, machine, ms, within in given
    )


def _unnamed(marks: Iterable[Mark]) -> tuple[str, ...]:
    return tuple(", ".join(mark.name.split("\n")) for mark in marks if mark.name and mark.label is None)


def shortened(name: str) -> str:
    """A name that has room in a chart: what tells it from others of its kind has a line of its own."""
    lines = name.split(", ", 1)
    return "\n".join(line if len(line) <= _MAX_LABEL else f"{line[:_MAX_LABEL - 1]}…" for line in lines)


def _line_name(line: Line) -> str:
    """What isn't this program's own measurement says in a second line what it is."""
    return shortened(line.name) if line.kind == "measured" else f"{shortened(line.name)}\n{line.kind}"


def _ms(value: float) -> str:
    return milliseconds(value) if value >= 1000 else f"{value:g} ms"


def _axis_size(value: float) -> str:
    """A round size without zeros behind the point."""
    number, _, unit = size(round(value)).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _apart(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """Ticks across, but for those that would touch the one before on the narrowest phone."""
    out: list[Tick] = []
    for tick in ticks:
        half = text_width(tick.text, TYPE) / 2 + 4
        if not out or (tick.at - out[-1].at) / 100 * WIDTHS[0] >= half + text_width(out[-1].text, TYPE) / 2:
            out.append(tick)
    return tuple(out)
