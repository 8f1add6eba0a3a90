"""An artifact as a page shows it: figures, areas, checks, rewrites and tables, as plain data with cited numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from needle_export.config.metrics import LATENCIES, METRICS
from needle_export.report.areas import Map, Role, maps, parts_of
from needle_export.report.cited import Citation, Number, number, share
from needle_export.report.comparison import Row
from needle_export.report.drawings import shape_of
from needle_export.report.schema import Artifact, LeftUnfused, Status
from needle_export.report.sizes import OVERHEAD
from needle_export.report.timings import Timing, timings
from needle_export.report.units import size, small, whole
from needle_export.report.view import ROLE_MEANINGS, STATUS, places_of, plan_told

Phrase = tuple[str | Number, ...]
"""Text with numbers in it."""

PROOF: dict[Status, str] = {
    "verified-on-runtime": "It was run in the runtime that it is for and compared with the reference: the logits of "
    "every position, the most likely token of every decode step, and the state at the end.",
    "verified-by-evaluator": "It was compared with the reference through an evaluator of ours, which reads the "
    "finished files and runs them op by op. The runtime that it is for took no part, and neither did a device.",
    "converted-only": "The files were written, and nothing has run them. Whether they compute the model is unknown.",
}
"""What each status says, and what it doesn't."""

GRADES: dict[Status, str] = {"verified-on-runtime": "good", "verified-by-evaluator": "fair", "converted-only": "poor"}

_ITEMS = 8


@dataclass(frozen=True)
class Tile:
    """A figure with what it counts, or why there is none; ``estimated`` where nothing was run for it."""

    title: str
    number: Number | None
    estimated: bool
    why: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """A table of phrases; ``numeric`` are columns set flush right, ``shares`` bars of 0 to 1, one a row, or empty."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Phrase, ...], ...]
    numeric: frozenset[int] = frozenset()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """A fused op: how often it was made, of how many places, and how many were left."""

    op: str
    fused: Number
    expected: Number
    left: Number
    share: float


@dataclass(frozen=True)
class Fused:
    """All rewrites of an artifact: the incomplete first; ``left`` has the places that stayed, by reason."""

    fused: Number
    expected: Number
    kinds: Number
    complete: bool
    rewrites: tuple[Rewrite, ...]
    left: Table | None


@dataclass(frozen=True)
class Card:
    """Everything about an artifact.

    Attributes:
        key: names it within the page.
        shape: class of its target.
        grade: class of its status.
        tiles: figures, the first ones those that matter most.
        answers: evaluations, each with the words of what it is of.
        facts: the comparison with the reference, a label and a phrase each.
        runtimes: what became of it where, None where the report tells of no runtime.
        details: everything else.
    """

    key: str
    name: str
    folder: str
    target: str
    weights: str
    shape: str
    status: Status
    status_words: str
    proof: str
    grade: str
    unbeaten: bool | None
    tiles: tuple[Tile, ...]
    answers: tuple[tuple[str, Table], ...]
    roles: tuple[Role, ...]
    maps: tuple[Map, ...]
    facts: tuple[tuple[str, Phrase], ...]
    runtimes: Table | None
    fusion: Fused | None
    timings: tuple[Timing, ...]
    state: Table
    memory: Table | None
    notes: tuple[str, ...]
    details: tuple[Table, ...]


def make_card(key: str, row: Row, cite: Citation, index: int, artifact: Artifact) -> Card:
    """The card of the artifact with this index in its report.

    Args:
        row: of the same artifact, which has its figures and its mark.
    """
    at = ("artifacts", index)
    roles = _roles(cite, at, artifact)
    return Card(
        key=key, name=f"{artifact.target} {artifact.weights}", folder=row.folder, target=artifact.target,
        weights=artifact.weights, shape=shape_of(artifact.target), status=artifact.status,
        status_words=STATUS[artifact.status], proof=PROOF[artifact.status], grade=GRADES[artifact.status],
        unbeaten=row.unbeaten,
        tiles=tuple(
            Tile(m.title, cite.metric(index, m.name, row.metrics[m.name]),
                 m.name in LATENCIES and row.latency is not None and row.latency.kind == "estimated",
                 row.metrics[m.name].why, m.meaning)
            for m in METRICS
        ),
        answers=tuple(_answers(cite, at, artifact)), roles=roles, maps=maps(roles),
        facts=tuple(_facts(cite, at)), runtimes=_runtimes(cite, at, artifact), fusion=_fusion(cite, at, artifact),
        timings=timings(cite, index, artifact), state=_state(cite, at, artifact),
        memory=_memory(cite, at, artifact), notes=artifact.notes,
        details=tuple(table for table in _details(cite, at, artifact) if table.rows),
    )


Place = tuple[str | int, ...]


def _roles(cite: Citation, at: Place, artifact: Artifact) -> tuple[Role, ...]:
    total = (*at, "size", "total_bytes")
    known = [role for role in ROLE_MEANINGS if role in artifact.size.by_role]
    out = []
    for role in [*known, *sorted(set(artifact.size.by_role) - set(known))]:
        place = (*at, "size", "by_role", role)
        parts = parts_of(cite, role, artifact.size.tensors, (*at, "size", "tensors"))
        out.append(Role(role, ROLE_MEANINGS.get(role, ""), cite(size, *place), cite.share(place, total), parts))
    place = (*at, "size", "overhead_bytes")
    rest = Role(OVERHEAD, "graph, names, padding", cite(size, *place), cite.share(place, total), ())
    return (*out, rest)


_SHARES = {
    ("exact_calls",): "exact calls",
    ("tool_names",): "right tools",
    ("nothing_precision",): "nothing: precision",
    ("nothing_recall",): "nothing: recall",
    ("invalid",): "aren't calls",
    ("cut",): "cut at a limit",
    ("reference", "same_calls"): "as the float reference",
    ("reference", "same_tokens"): "same tokens as it",
    ("reference", "exact_calls"): "its own exact calls",
}
"""Shares of an evaluation, in the order of the page, with what they are called."""


def _answers(cite: Citation, at: Place, artifact: Artifact) -> Iterable[tuple[str, Table]]:
    for i, e in enumerate(artifact.evaluations):
        rows: list[tuple[Phrase, ...]] = []
        for keys, name in _SHARES.items():
            place = (*at, "evaluations", i, *keys)
            if not cite.has(*place, "share"):
                continue  # nothing was counted
            counts = (cite(whole, *place, "count"), " of ", cite(whole, *place, "of"))
            ends = (cite(share, *place, "low"), " to ", cite(share, *place, "high"))
            rows.append(((name,), (cite(share, *place, "share"),), counts, ends))
        why = f"; beside the float reference {e.reference_why}" if e.reference_why else ""
        table = Table("Answers", ("figure", "share", "queries", "95 % interval"), tuple(rows), frozenset({1, 2, 3}))
        yield f"{e.of}, in {e.runtime}{why}", table


def _facts(cite: Citation, at: Place) -> Iterable[tuple[str, Phrase]]:
    """The comparison with the reference, of whatever numbers are there; the format leaves them free."""

    def there(*keys: str) -> bool:
        return cite.has(*at, "parity", *keys)

    def cited(form: Callable[[Any], str], *keys: str) -> Number:
        return cite(form, *at, "parity", *keys)

    if there("argmax_equal"):
        steps: Phrase = (" of ", cited(_count, "steps")) if there("steps") else ()
        yield "next tokens equal", (cited(_count, "argmax_equal"), *steps)
    if there("max_abs"):
        allowed: Phrase = (", allowed ", cited(small, "tolerance", "logits")) if there("tolerance", "logits") else ()
        yield "largest logit error", (cited(small, "max_abs"), *allowed)
    if there("sqnr_db"):
        yield "signal to error", (cited(_decibels, "sqnr_db"),)
    if there("weights", "matrices"):
        held: Phrase = (", ", cited(_bytes, "weights", "bytes")) if there("weights", "bytes") else ()
        folded: Phrase = ()
        if there("weights", "folded"):
            folded = ("; ", cited(_count, "weights", "folded"), " more with constants folded in, told by logits alone")
        yield "matrices read back, equal in every bit", (cited(_count, "weights", "matrices"), *held, *folded)
    else:
        yield "matrices read back", ("none",)
    if there("rounded", "max_abs"):
        equal: Phrase = ()
        if there("rounded", "argmax_equal") and there("rounded", "steps"):
            equal = (", ", cited(_count, "rounded", "argmax_equal"), " of ", cited(_count, "rounded", "steps"),
                     " next tokens equal")
        yield "with every result rounded as declared", (cited(small, "rounded", "max_abs"), " logit error", *equal)


def _runtimes(cite: Citation, at: Place, artifact: Artifact) -> Table | None:
    words = {None: "not tried", True: "yes", False: "no"}
    rows: list[tuple[Phrase, ...]] = []
    for i, check in enumerate(artifact.runtimes):
        error: Phrase = ("–",) if check.max_abs is None else (cite(small, *at, "runtimes", i, "max_abs"),)
        equal = "unknown" if check.reproduced is None else words[check.reproduced]
        rows.append(((f"{check.runtime} {check.version}".strip(),), (words[check.loaded],), (equal,), error,
                     (check.reason,)))
    columns = ("runtime", "loads it", "equals the reference", "largest logit error", "why not")
    return Table("Runtimes", columns, tuple(rows), frozenset({3})) if rows else None


def _fusion(cite: Citation, at: Place, artifact: Artifact) -> Fused | None:
    if not artifact.fusion:
        return None
    place = (*at, "fusion")
    rewrites = [
        Rewrite(op, cite(whole, *place, op, "fused"), cite(whole, *place, op, "expected"),
                cite.count("", *place, op, "left"), f.fused / f.expected if f.expected else 1.0)
        for op, f in sorted(artifact.fusion.items())
    ]
    # What is short of its promise mustn't hide among what is complete.
    rewrites.sort(key=lambda r: (min(r.share, 1.0), -r.left.value, -r.fused.value))
    left: list[tuple[Phrase, ...]] = []
    for op, fusion in sorted(artifact.fusion.items()):
        reasons: dict[str, list[LeftUnfused]] = {}
        for found in fusion.left:
            reasons.setdefault(found.reason, []).append(found)
        left += [((op,), (places_of(places),), (places[0].node,), (reason,)) for reason, places in reasons.items()]
    return Fused(
        cite(whole, *place, "*", "fused"), cite(whole, *place, "*", "expected"), cite.count("kind", *place),
        all(f.fused >= f.expected for f in artifact.fusion.values()), tuple(rewrites),
        Table("Left unfused, and why", ("op", "layers", "first node", "reason"), tuple(left)) if left else None,
    )


def _state(cite: Citation, at: Place, artifact: Artifact) -> Table:
    place, total = (*at, "state_bytes", "by_part"), (*at, "state_bytes", "total_bytes")
    parts = sorted(artifact.state_bytes.by_part)
    rows = [((part,), (cite(size, *place, part),), (cite.share((*place, part), total),)) for part in parts]
    rows.append((("total",), (cite(size, *total),), (cite.share(total, total),)))
    whole_state = artifact.state_bytes.total_bytes or 1
    shares = (*(artifact.state_bytes.by_part[part] / whole_state for part in parts), 0.0)
    return Table("State between steps", ("part", "bytes", "share"), tuple(rows), frozenset({1, 2}), shares)


def _memory(cite: Citation, at: Place, artifact: Artifact) -> Table | None:
    if artifact.memory is None:
        return None
    rows: list[tuple[Phrase, ...]] = []
    for part, name in (("decode", "decode, after a step"), ("all", "everything, after a prompt")):
        place = (*at, "memory", part)
        cells = [cite(size, *place, key) if cite.has(*place, key) else "–"
                 for key in ("baseline_bytes", "rss_bytes", "mapped_bytes", "peak_bytes")]
        rows.append(((name,), *((cell,) for cell in cells)))
    return Table("Memory that loading takes (measured)",
                 ("loaded", "before loading", "resident", "of it, pages of files", "peak"),
                 tuple(rows), frozenset({1, 2, 3, 4}))


def _details(cite: Citation, at: Place, artifact: Artifact) -> Iterable[Table]:
    total = (*at, "size", "total_bytes")
    places = [(*at, "size", "tensors", i, "bytes") for i in range(len(artifact.size.tensors))]
    yield Table("Bytes by tensor, all layers together", ("tensor", "role", "bytes", "share"), tuple(
        ((t.name,), (t.role,), (cite(whole, *place),), (cite.share(place, total),))
        for t, place in zip(artifact.size.tensors, places, strict=True)
    ), frozenset({2, 3}))
    kept = sorted(enumerate(artifact.kept_float), key=lambda item: (-item[1].bytes, item[1].name))
    rows: list[tuple[Phrase, ...]] = [
        ((weight.name,), (cite(whole, *at, "kept_float", i, "bytes"),), (weight.reason,))
        for i, weight in kept
    ]
    if rows:
        every = (*at, "kept_float", "*", "bytes")
        rows.append((("total",), (cite(whole, *every),), (cite.share(every, total, 2), " of the files")))
    yield Table("Kept in floating point", ("weight", "bytes", "reason"), tuple(rows), frozenset({1}))
    yield Table("Files", ("name", "bytes", "SHA-256"), tuple(
        ((f.name,), (cite(whole, *at, "files", i, "bytes"),), (f.sha256,)) for i, f in enumerate(artifact.files)
    ), frozenset({1}))
    yield _nodes(cite, at, artifact)
    yield Table("Signatures, and how a delegate cuts them",
                ("signature", "ops", "partitions", "ops in them", "delegate", "cut by"), tuple(
        ((name,), *((cite(whole, *at, "signatures", name, key),) for key in ("ops", "partitions", "delegated")),
         (s.delegate,), (", ".join(x.op for x in s.left if x.splits) or "none",))
        for name, s in artifact.signatures.items()
    ), frozenset({1, 2, 3}))
    yield Table("GPU delegate: a lint from public sources, not a result",
                ("rule", "op", "count", "what is reported", "source"), tuple(
        ((x.rule,), (x.op,), (cite(whole, *at, "gpu_lint", i, "count"),), (x.why,), (x.source,))
        for i, x in enumerate(artifact.gpu_lint)
    ), frozenset({2}))
    shown = {key: value for key, value in artifact.parity.items() if key != "scheme"}
    yield pairs("Comparison with the reference", cite, (*at, "parity"), shown)
    yield pairs("Plan", cite, ("plan",), plan_told(cite.report))
    yield pairs("Built with", cite, ("options",), cite.report.options)
    yield Table("Versions", ("library", "version"),
                tuple(((name,), (version,)) for name, version in sorted(artifact.versions.items())))


def _nodes(cite: Citation, at: Place, artifact: Artifact) -> Table:
    nodes = artifact.nodes
    rows: list[tuple[Phrase, ...]] = [(("decode, all",), (cite(whole, *at, "nodes", "decode"),))]
    if nodes.prefill is not None:
        rows.append((("prefill, all",), (cite(whole, *at, "nodes", "prefill"),)))
    ops = sorted(nodes.by_op, key=lambda op: (-nodes.by_op[op], op))
    rows += [((op,), (cite(whole, *at, "nodes", "by_op", op),)) for op in ops]
    return Table("Graph nodes (by operator: decode)", ("operator", "nodes"), tuple(rows), frozenset({1}))


def pairs(title: str, cite: Citation, at: Place, values: Mapping[str, Any]) -> Table:
    """Free-form values of a report, one a row; what is nested has its keys joined by dots."""
    return Table(title, ("name", "value"), tuple(
        ((".".join(str(key) for key in keys),), phrase) for keys, phrase in _flat(cite, at, (), values)))


def _flat(cite: Citation, at: Place, keys: Place, value: object) -> Iterable[tuple[Place, Phrase]]:
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _flat(cite, at, (*keys, key), value[key])
    else:
        yield keys, _phrase(cite, (*at, *keys), value)


def _phrase(cite: Citation, place: Place, value: object) -> Phrase:
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return ("none",)
    if isinstance(value, bool):
        return ("yes" if value else "no",)
    if number(value):
        return (cite(_general, *place),)
    if isinstance(value, list | tuple):
        out: list[str | Number] = []
        for i, item in enumerate(value[:_ITEMS]):
            out += [*([", "] if i else []), *_phrase(cite, (*place, i), item)]
        if len(value) > _ITEMS:
            out += [", … ", cite.count("", *place), " in all"]
        return tuple(out)
    if isinstance(value, Mapping):
        return tuple(piece for i, key in enumerate(sorted(value))
                     for piece in (", " if i else "", f"{key} ", *_phrase(cite, (*place, key), value[key])))
    return (str(value),)


def _general(value: float) -> str:
    return whole(value) if isinstance(value, int) else f"{value:.6g}"


def _count(value: float) -> str:
    return whole(round(value))


def _bytes(value: float) -> str:
    return size(round(value))


def _decibels(value: float) -> str:
    return f"{value:.0f} dB"

