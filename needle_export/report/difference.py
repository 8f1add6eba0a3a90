"""What changed from one report to another, and which part of it made an artifact grow: the largest change first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from needle_export.config.metrics import ANSWERS, LATENCIES, MEMORY, METRICS, Unit
from needle_export.report.comparison import RANDOM
from needle_export.report.evaluation import chosen, shared_key
from needle_export.report.metrics import metrics_of, prompts
from needle_export.report.schema import Artifact, Report
from needle_export.report.sizes import OVERHEAD
from needle_export.report.units import plural, threads

#: Figures that a table of their own tells in parts.
_IN_PARTS = ("size", "state")


@dataclass(frozen=True)
class Change:
    """A count before and after; None where there was or is no such thing, which counts as 0 in ``delta``."""

    name: str
    old: int | None
    new: int | None
    delta: int


@dataclass(frozen=True)
class TensorChange:
    """Bytes of a tensor before and after, as :class:`Change`.

    Attributes:
        layers: blocks, from 0, whose bytes differ; empty outside the stack.
    """

    name: str
    role: str
    old: int | None
    new: int | None
    delta: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class FigureChange:
    """A figure before and after.

    Attributes:
        metric: its name.
        unit: of all three numbers.
        old, new: None where there is none.
        delta: None where there is none, or where the two can't be compared.
        why: the reason for that; empty where there is a delta.
    """

    metric: str
    unit: Unit
    old: float | None
    new: float | None
    delta: float | None
    why: str


@dataclass(frozen=True)
class Setting:
    """Something that was decided otherwise: an option, the checkpoint, a version. Empty: there was or is no such."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class ArtifactDifference:
    """How an artifact changed.

    Attributes:
        old, new: what they go by: report, target, weights.
        settings: what was decided otherwise.
        total, compressed: bytes of the files, as they are and in a zip archive.
        roles: bytes by role, and the overhead; the deltas sum to that of ``total``.
        tensors: bytes by tensor; the deltas of a role sum to the role's.
        files: bytes by file.
        state: bytes by part of the state between steps.
        ops: nodes of decode by operator.
        nodes: of both graphs.
        figures: every other figure, in the order of the tables.
    """

    old: str
    new: str
    settings: tuple[Setting, ...]
    total: Change
    compressed: Change
    roles: tuple[Change, ...]
    tensors: tuple[TensorChange, ...]
    files: tuple[Change, ...]
    state: tuple[Change, ...]
    ops: tuple[Change, ...]
    nodes: tuple[Change, ...]
    figures: tuple[FigureChange, ...]


@dataclass(frozen=True)
class Difference:
    """Artifacts that both reports have, and those that one of them has.

    Attributes:
        artifacts: those of the same target and weights; where each report has one left, those two.
        added, removed: the others, as target and weights.
        warnings: what must not be missed.
    """

    artifacts: tuple[ArtifactDifference, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    warnings: tuple[str, ...]


def difference(old: tuple[str, Report], new: tuple[str, Report]) -> Difference:
    """From one report to another, each with the name that it goes by.

    Only what differs is listed, apart from totals and figures.
    """
    (old_name, before), (new_name, after) = old, new
    pairs, removed, added = _paired(before, after)
    random = [name for name, report in (old, new) if report.checkpoint.random]
    warnings = (f"{RANDOM} ({', '.join(dict.fromkeys(random))})",) if random else ()
    return Difference(
        tuple(_difference(f"{old_name} {_label(a)}", before, a, f"{new_name} {_label(b)}", after, b) for a, b in pairs),
        tuple(map(_label, added)), tuple(map(_label, removed)), warnings)


def _label(artifact: Artifact) -> str:
    return f"{artifact.target} {artifact.weights}"


def _paired(before: Report, after: Report) -> tuple[list[tuple[Artifact, Artifact]], list[Artifact], list[Artifact]]:
    """Pairs of the same target and weights, what is only before, what is only after; each in its own order."""
    left = list(after.artifacts)
    pairs, alone = [], []
    for artifact in before.artifacts:
        twin = next((other for other in left if _label(other) == _label(artifact)), None)
        if twin is None:
            alone.append(artifact)
        else:
            left.remove(twin)
            pairs.append((artifact, twin))
    if len(alone) == len(left) == 1:
        return [*pairs, (alone[0], left[0])], [], []
    return pairs, alone, left


def _difference(old_name: str, before: Report, old: Artifact, new_name: str, after: Report,
                new: Artifact) -> ArtifactDifference:
    return ArtifactDifference(
        old=old_name,
        new=new_name,
        settings=tuple(_settings(before, old, after, new)),
        total=_change("total", old.size.total_bytes, new.size.total_bytes),
        compressed=_change("compressed", old.size.compressed_bytes, new.size.compressed_bytes),
        roles=_changes({**old.size.by_role, OVERHEAD: old.size.overhead_bytes},
                       {**new.size.by_role, OVERHEAD: new.size.overhead_bytes}),
        tensors=_tensors(old, new),
        files=_changes({f.name: f.bytes for f in old.files}, {f.name: f.bytes for f in new.files}),
        state=_changes(old.state_bytes.by_part, new.state_bytes.by_part),
        ops=_changes(old.nodes.by_op, new.nodes.by_op),
        nodes=_changes(_graphs(old), _graphs(new)),
        figures=_figures(before, old, after, new),
    )


def _change(name: str, old: int | None, new: int | None) -> Change:
    return Change(name, old, new, (new or 0) - (old or 0))


def _changes(old: Mapping[str, int], new: Mapping[str, int]) -> tuple[Change, ...]:
    """What differs, the largest first; growth before shrinkage of the same size."""
    names = dict.fromkeys([*old, *new])
    changes = [_change(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
    return tuple(sorted(changes, key=lambda c: (-abs(c.delta), -c.delta, c.name)))


def _graphs(artifact: Artifact) -> dict[str, int]:
    prefill = artifact.nodes.prefill
    return {"decode": artifact.nodes.decode, **({} if prefill is None else {"prefill": prefill})}


def _tensors(old: Artifact, new: Artifact) -> tuple[TensorChange, ...]:
    before = {(t.name, t.role): t for t in old.size.tensors}
    after = {(t.name, t.role): t for t in new.size.tensors}
    found = []
    for name, role in dict.fromkeys([*before, *after]):
        was, now = before.get((name, role)), after.get((name, role))
        if was == now:
            continue
        layers = _by_layer(was), _by_layer(now)
        depth = max(map(len, layers))
        at = tuple(i for i in range(depth) if _item(layers[0], i) != _item(layers[1], i))
        change = _change(name, was.bytes if was else None, now.bytes if now else None)
        found.append(TensorChange(name, role, change.old, change.new, change.delta, at))
    return tuple(sorted(found, key=lambda t: (-abs(t.delta), -t.delta, t.name)))


def _by_layer(tensor: Any) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.by_layer)


def _item(values: tuple[int, ...], at: int) -> int | None:
    return values[at] if at < len(values) else None


def _settings(before: Report, old: Artifact, after: Report, new: Artifact) -> Iterable[Setting]:
    """What was decided otherwise, and so may explain the rest."""
    pairs: list[tuple[str, object, object]] = [
        ("checkpoint", _checkpoint(before), _checkpoint(after)),
        ("layers", before.checkpoint.layers, after.checkpoint.layers),
        ("adapters", _adapters(before), _adapters(after)),
        ("weights", old.weights, new.weights),
        ("target", old.target, new.target),
        (before.tool.name, before.tool.version, after.tool.version),
    ]
    named = {"layers", "weights", "target", "rules"}
    options = dict.fromkeys([*before.options, *after.options])
    pairs += [(key, before.options.get(key), after.options.get(key)) for key in options if key not in named]
    versions = dict.fromkeys([*old.versions, *new.versions])
    pairs += [(f"{key} (library)", old.versions.get(key), new.versions.get(key)) for key in versions]
    return (Setting(name, _told(was), _told(now)) for name, was, now in pairs if was != now)


def _checkpoint(report: Report) -> str:
    return f"{report.checkpoint.path_name} {report.checkpoint.sha256[:8]}"


def _adapters(report: Report) -> str:
    return ", ".join(f"{a.path_name} {a.sha256[:8]}" for a in report.checkpoint.lora)


def _told(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_told, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(item)}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)


def _figures(before: Report, old: Artifact, after: Report, new: Artifact) -> tuple[FigureChange, ...]:
    prompt = prompts([old, new])
    answers = shared_key([old.evaluations, new.evaluations])
    was, now = metrics_of(before, old, prompt, answers), metrics_of(after, new, prompt, answers)
    out = []
    for metric in METRICS:
        if metric.name in _IN_PARTS or metric.name == "compressed":
            continue
        a, b = was[metric.name], now[metric.name]
        why = (a.why if a.value is None else b.why if b.value is None
               else _incomparable(metric.name, before, old, after, new))
        delta = None if why or a.value is None or b.value is None else b.value - a.value
        out.append(FigureChange(metric.name, metric.unit, a.value, b.value, delta, why))
    return tuple(out)


def _incomparable(metric: str, before: Report, old: Artifact, after: Report, new: Artifact) -> str:
    """Why two values of a figure can't be held against each other; empty where they can."""
    if metric in LATENCIES or metric in MEMORY:
        places = [_place(a, memory=metric in MEMORY) for a in (old, new)]
        return "" if places[0] == places[1] else f"measured {places[0]}, and then {places[1]}"
    if metric in ANSWERS:
        told = [chosen(a.evaluations) for a in (old, new)]
        alike = shared_key([old.evaluations, new.evaluations]) is not None
        return "" if alike else "evaluated on " + ", and then on ".join(e.of for e in told if e is not None)
    if before.options.get("context") != after.options.get("context"):
        return "it is of other texts, as the contexts differ"
    return ""


def _place(artifact: Artifact, *, memory: bool) -> str:
    taken = artifact.memory if memory else artifact.latency
    if taken is None:
        return "nowhere"
    step = ""
    if not memory and artifact.latency and artifact.latency.decode:
        step = f", after {plural(artifact.latency.decode.position, 'token')}"
    return f"on {taken.host}, {threads(taken.threads)}{step}"
