"""Where the bytes of an artifact are, as areas: by role, and within a role by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needle_export.report.charts import text_width
from needle_export.report.cited import Citation, Number
from needle_export.report.sizes import OVERHEAD, TensorBytes
from needle_export.report.treemap import Rect, squarify
from needle_export.report.units import size
from needle_export.report.view import ROLE_MEANINGS

TYPE = 12.0
"""Size of the type in an area, px."""

_TONES = frozenset((*ROLE_MEANINGS, OVERHEAD))
"""Roles that have a colour."""

_ROLE_LINE = 20.0
_LINE = 16.0
_PAD = 6.0


@dataclass(frozen=True)
class Part:
    """Bytes of a role in one layer; ``label`` is short, ``name`` says it in words."""

    label: str
    name: str
    bytes: Number


@dataclass(frozen=True)
class Role:
    """A role with all of its bytes; ``parts`` sum to them, and are empty where the report doesn't split it."""

    name: str
    meaning: str
    bytes: Number
    share: Number
    parts: tuple[Part, ...]

    @property
    def tone(self) -> str:
        """The class of its colour; a role that nobody knows gets that of overhead."""
        return self.name if self.name in _TONES else OVERHEAD


@dataclass(frozen=True)
class Frame:
    """Where a map is drawn: for windows of a kind, in px. It stretches with the window, and its type doesn't.

    Attributes:
        name: the class by which a style sheet shows it.
        narrowest: width for which labels must fit.
        usual: width that areas are cut for.
        height: at every width.
    """

    name: str
    narrowest: float
    usual: float
    height: float


FRAMES = (Frame("phone", 294, 326, 480), Frame("desk", 620, 1000, 420))


@dataclass(frozen=True)
class Area:
    """One area of a map.

    Attributes:
        tone: the class of its role's colour.
        rect: x and width in percent of the map's width, y and height in px.
        label: written into it where it fits, else empty.
        title: all that there is to say about it.
        bytes: what it stands for.
    """

    tone: str
    rect: Rect
    label: str
    title: str
    bytes: Number


@dataclass(frozen=True)
class Outline:
    """A role in a map: the rectangle around its areas; ``label`` and ``size`` are written where they fit."""

    tone: str
    rect: Rect
    label: str
    size: Number | None


@dataclass(frozen=True)
class Map:
    """A treemap in one frame."""

    frame: Frame
    areas: tuple[Area, ...]
    outlines: tuple[Outline, ...]


def maps(roles: Sequence[Role]) -> tuple[Map, ...]:
    """The roles as a treemap in each frame; those without bytes have no area."""
    return tuple(_map([role for role in roles if role.bytes.value], frame) for frame in FRAMES)


def _map(roles: Sequence[Role], frame: Frame) -> Map:
    rects = squarify([int(role.bytes.value) for role in roles], Rect(0, 0, frame.usual, frame.height))
    areas, outlines = [], []
    for role, rect in zip(roles, rects, strict=True):
        outline = _outline(role, rect, frame)
        outlines.append(outline)
        areas += _areas(role, rect, frame, covered=bool(outline.label))
    return Map(frame, tuple(areas), tuple(outlines))


def _outline(role: Role, rect: Rect, frame: Frame) -> Outline:
    room = rect.width * frame.narrowest / frame.usual - 2 * _PAD
    if rect.height < _ROLE_LINE or room < text_width(role.name, TYPE):
        return Outline(role.tone, _stretched(rect, frame), "", None)
    both = room >= text_width(f"{role.name}  {role.bytes.text}", TYPE)
    return Outline(role.tone, _stretched(rect, frame), role.name, role.bytes if both else None)


def _areas(role: Role, rect: Rect, frame: Frame, *, covered: bool) -> list[Area]:
    """The layers of a role; the upper left one leaves room for the role's name if that is written."""
    if not role.parts:
        return [Area(role.tone, _stretched(rect, frame), "", f"{role.name}: {role.bytes.text}", role.bytes)]
    parts = [part for part in role.parts if part.bytes.value]
    out = []
    for part, cell in zip(parts, squarify([int(part.bytes.value) for part in parts], rect), strict=True):
        room = cell.width * frame.narrowest / frame.usual - 2 * _PAD
        below = cell.height - (_ROLE_LINE if covered and cell.y < rect.y + _ROLE_LINE else 0)
        label = part.label if room >= text_width(part.label, TYPE) and below >= _LINE + 2 else ""
        title = f"{role.name}, {part.name}: {part.bytes.text}"
        out.append(Area(role.tone, _stretched(cell, frame), label, title, part.bytes))
    return out


def _stretched(rect: Rect, frame: Frame) -> Rect:
    """With x and width in percent, so that it follows the window."""
    return Rect(100 * rect.x / frame.usual, rect.y, 100 * rect.width / frame.usual, rect.height)


def parts_of(cite: Citation, role: str, tensors: Sequence[TensorBytes], place: tuple[str | int, ...],
             ) -> tuple[Part, ...]:
    """A role's bytes by layer, then what belongs to no layer by tensor; empty where that is one part only.

    Args:
        tensors: of an artifact, at ``place`` in its report.
    """
    depth = max((len(t.by_layer) for t in tensors if t.role == role), default=0)
    parts = [Part(str(layer), f"layer {layer}", cite.layer(role, layer, *place)) for layer in range(depth)]
    parts.append(Part("all", "several layers at once", cite.beside_layers(role, *place)))
    parts += [Part(_last(tensor.name), tensor.name, cite(size, *place, index, "bytes"))
              for index, tensor in enumerate(tensors) if tensor.role == role and not tensor.by_layer]
    found = tuple(part for part in parts if part.bytes.value)
    return found if len(found) > 1 else ()


def _last(name: str) -> str:
    """What a tensor is called within its module: ``key_proj`` of ``engrams/key_proj/kernel``."""
    return name.removesuffix("/kernel").rpartition("/")[2]
