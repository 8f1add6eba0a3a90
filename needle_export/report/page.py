"""Reports as one HTML page for people: nothing is loaded from anywhere, nothing in it is a program."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from needle_export.report.cards import Card, Phrase, Table, make_card, pairs
from needle_export.report.cited import Citation, Number
from needle_export.report.cited import share as percent_of
from needle_export.report.comparison import RANDOM, Row, compare
from needle_export.report.drawings import (
    Answered,
    Bar,
    Line,
    Plot,
    Sized,
    bars,
    by_length,
    size_and_answers,
    size_and_loss,
)
from needle_export.report.schema import Artifact, Report
from needle_export.report.units import plural, whole

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATE, _STYLE = "page.html.j2", "page.css"


@dataclass(frozen=True)
class Origin:
    """A model that artifacts of the page were made from, and what its report says of it.

    Attributes:
        title: the checkpoint's name and merged adapters.
        depth, parameters: of the model as built.
        random: its weights mean nothing.
        table: everything else.
    """

    title: str
    depth: Phrase
    parameters: Number
    random: bool
    table: Table


@dataclass(frozen=True)
class Page:
    """All that a page shows, in the order in which it does."""

    origins: tuple[Origin, ...]
    warnings: tuple[str, ...]
    cards: tuple[Card, ...]
    plot: Plot | None
    unknown_loss: tuple[str, ...]
    answers: Plot | None
    answers_of: str
    unevaluated: tuple[str, ...]
    untimed: tuple[str, ...]
    random: str
    prompts: Plot | None
    steps: tuple[Bar, ...]
    kinds: frozenset[str]
    notes: tuple[str, ...]
    made_by: str


def render_page(reports: Sequence[tuple[str, Report]]) -> str:
    """One page over all artifacts of reports, smallest first, as HTML that ends in a newline.

    Args:
        reports: each with the name that its artifacts go by.
    """
    # The policy lets exactly this style in, so it must reach the page as it was hashed.
    style = _packed(_resource(_STYLE))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    template = _environment().get_template(_TEMPLATE)
    text = template.render(page=prepare(reports), style=_markup(style), style_hash=digest)
    return _packed(text) + "\n"


def prepare(reports: Sequence[tuple[str, Report]]) -> Page:
    """The data of a page."""
    found = compare(reports)
    cites = [Citation(index, report) for index, (_, report) in enumerate(reports)]
    cards = _cards(reports, found.rows, cites)
    shown = [(row, card) for row, card in zip(found.rows, cards, strict=True)]
    sized, unknown = _sized(shown)
    answered, answers_of = _answered(shown, cites, reports)
    lines = [
        Line(card.name, card.target, timing.kind, timing.machine,
             tuple((prompt.tokens, prompt.ms) for prompt in timing.prompts))
        for card in cards for timing in card.timings
    ]
    steps = bars((card.name, card.target, timing.kind, timing.machine, timing.decode, timing.within)
                 for card in cards for timing in card.timings if timing.decode)
    random = [card.name for row, card in shown if row.model.random]
    of = f" ({', '.join(random)})" if len(random) < len(cards) else ""
    first = reports[0][1]
    return Page(
        origins=tuple(_origins(reports, cites)), cards=cards,
        # The banner says of random weights what the first warning does.
        warnings=tuple(warning for warning in found.warnings if not warning.startswith(RANDOM)),
        plot=size_and_loss(sized), unknown_loss=unknown, untimed=tuple(card.name for card in cards if not card.timings),
        answers=size_and_answers(answered), answers_of=answers_of,
        unevaluated=tuple(card.name for card in cards if not card.answers),
        random=f"{RANDOM}{of}" if random else "", prompts=by_length(lines), steps=steps,
        kinds=frozenset(timing.kind for card in cards for timing in card.timings),
        notes=_notes(found.notes, len(cards)),
        made_by=f"{first.tool.name} {first.tool.version}, report schema {first.schema}",
    )


def _notes(notes: Sequence[str], artifacts: int) -> tuple[str, ...]:
    """What compare says below its table; the page has a word for its mark, and none where nothing is compared."""
    mark = "*: "
    if artifacts == 1:
        return tuple(note for note in notes if not note.startswith(mark))
    return tuple(f"unbeaten: {note.removeprefix(mark)}" if note.startswith(mark) else note for note in notes)


def _cards(reports: Sequence[tuple[str, Report]], rows: Sequence[Row], cites: Sequence[Citation]) -> tuple[Card, ...]:
    """A card for each row of the comparison; names that several have get their folders."""
    waiting: dict[tuple[object, ...], list[tuple[Citation, int, Artifact]]] = {}
    for (name, report), cite in zip(reports, cites, strict=True):
        for index, artifact in enumerate(report.artifacts):
            key = (name, artifact.target, artifact.weights, artifact.size.total_bytes)
            waiting.setdefault(key, []).append((cite, index, artifact))
    cards = []
    for at, row in enumerate(rows):
        found = waiting[row.folder, row.target, row.weights, row.metrics["size"].value].pop(0)
        cards.append(make_card(f"a{at}", row, *found))
    names = [card.name for card in cards]
    return tuple(card if names.count(card.name) == 1 else replace(card, name=f"{card.name}, {_last(card.folder)}")
                 for card in cards)


def _last(folder: str) -> str:
    """The last part of a folder's name, which tells it from others in most cases."""
    parts = [part for part in folder.replace("\\", "/").split("/") if part not in ("", ".")]
    return parts[-1] if parts else folder


def _sized(shown: Sequence[tuple[Row, Card]]) -> tuple[list[Sized], tuple[str, ...]]:
    """Artifacts whose loss is known, and names of those whose loss isn't."""
    known, unknown = [], []
    for row, card in shown:
        numbers = {tile.title: tile.number for tile in card.tiles}
        size, loss = numbers["size"], numbers["KL"]
        if size is None or loss is None:
            unknown.append(card.name)
        else:
            group = (row.model.sha256, row.model.layers, row.model.lora)
            known.append(Sized(card.name, card.target, group, size, loss, bool(row.unbeaten)))
    return known, tuple(unknown)


def _answered(shown: Sequence[tuple[Row, Card]], cites: Sequence[Citation], reports: Sequence[tuple[str, Report]],
              ) -> tuple[list[Answered], str]:
    """Artifacts with right answers to the same queries, and what these are; none where queries differ."""
    rows = [row for row, _ in shown if row.answers]
    if len({row.answers.key for row in rows if row.answers}) != 1 or rows[0].answers is None:
        return [], ""
    key, out = rows[0].answers.key, []
    for _, card in shown:
        tiles = {tile.title: tile.number for tile in card.tiles}
        size, share = tiles["size"], tiles["exact calls"]
        if size is None or share is None:
            continue
        cite, index = cites[share.report], int(share.source.split("/")[2])
        several = reports[share.report][1].artifacts[index].evaluations
        at = next(i for i, e in enumerate(several) if e.key == key)
        low, high = (cite(percent_of, "artifacts", index, "evaluations", at, "exact_calls", end)
                     for end in ("low", "high"))
        out.append(Answered(card.name, card.target, size, share, low, high))
    return out, rows[0].answers.of


def _origins(reports: Sequence[tuple[str, Report]], cites: Sequence[Citation]) -> list[Origin]:
    """The models, each once, in the order in which they come."""
    out: dict[object, Origin] = {}
    for (_, report), cite in zip(reports, cites, strict=True):
        c = report.checkpoint
        depth: Phrase = (cite(whole, "checkpoint", "layers"),)
        if c.layers != c.parent_layers:
            depth = (*depth, " of ", cite(whole, "checkpoint", "parent_layers"))
        facts = {"sha256": c.sha256, "format": c.format, "geometry": c.geometry, "dropped_heads": c.dropped_heads}
        table = pairs("The model", cite, ("checkpoint",), facts)
        adapters = tuple((("adapter",), (f"{a.path_name}, SHA-256 {a.sha256}",)) for a in c.lora)
        out.setdefault((c.sha256, c.layers, c.lora), Origin(
            "".join((c.path_name, *(f" + {a.path_name}" for a in c.lora))), (*depth, " layers"),
            cite(whole, "checkpoint", "parameters"), c.random, replace(table, rows=(*table.rows, *adapters)),
        ))
    return list(out.values())


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_resource), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=_visible,
    )
    environment.tests["number"] = lambda value: isinstance(value, Number)
    environment.filters["plural"] = plural
    environment.filters["px"] = lambda value: f"{value:.2f}".rstrip("0").rstrip(".")
    return environment


def _packed(text: str) -> str:
    """Text without empty lines, and without an end of line."""
    return "\n".join(line for line in text.split("\n") if line.strip())


def _resource(name: str) -> str:
    return (resources.files("needle_export.report") / "templates" / name).read_text(encoding="utf-8")


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _visible(value: Any) -> Any:
    """Text whose control characters, and those that turn the direction of writing, are replaced."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value)
