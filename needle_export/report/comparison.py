"""Artifacts of several reports side by side: their figures, which no other beats, and what a reader must know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from needle_export.config.metrics import ANSWERS, BY_NAME, METRICS
from needle_export.errors import BadInput
from needle_export.report.evaluation import Evaluation, Key, chosen, shared_key
from needle_export.report.metrics import NOT_EVALUATED, Value, metrics_of, prompts
from needle_export.report.schema import Artifact, CheckpointInfo, Report, Status, load_report
from needle_export.report.units import plural, size, small, threads, whole
from needle_export.report.view import STATUS

LOSS = "kl"
"""The figure that stands for what a scheme costs where artifacts are marked."""

LABELS = ("folder", "target", "weights")

SORTS = ("size", *LABELS, *(metric.name for metric in METRICS if metric.name != "size"))
"""What rows can be sorted by; the first is taken where nobody asks."""

RANDOM = "RANDOM WEIGHTS, made for tests: sizes and speeds are real, losses mean nothing"
"""What is said, first of all, of artifacts whose weights mean nothing."""

_HASH = 8


@dataclass(frozen=True)
class Model:
    """The float model that an artifact's loss refers to: a checkpoint at a depth, with what was merged into it."""

    checkpoint: str
    sha256: str
    layers: int
    lora: tuple[str, ...]
    random: bool


@dataclass(frozen=True)
class Origin:
    """Where and how figures were measured (or estimated); ``threads`` 0: as the runtime chooses."""

    kind: str
    host: str
    threads: int


@dataclass(frozen=True)
class Evaluated:
    """Queries that answers were counted over, and how they were asked; figures of the same ``key`` compare.

    Attributes:
        of: the rest in words.
        low, high: ends of the 95 % interval of exact calls.
    """

    of: str
    sha256: str
    tools_sha256: str | None
    queries: int
    constrained: bool
    max_new_tokens: int
    low: float
    high: float

    @property
    def key(self) -> Key:
        """As of an evaluation."""
        return self.sha256, self.tools_sha256, self.queries, self.constrained, self.max_new_tokens


@dataclass(frozen=True)
class Row:
    """An artifact in the comparison.

    Attributes:
        folder: as it was given.
        name: what notes call it: the folder, and the target where the folder has several artifacts.
        status: how far the artifact was proven.
        context: positions that its caches hold; None where the report doesn't tell.
        unbeaten: no other artifact of the same model is no larger and no lossier, and better in one; None where the
            loss is unknown.
        latency, memory: where they were measured; None where they weren't.
        prefill_tokens, memory_tokens: length of the prompt that prefill is told for, and of the one that was read for
            the memory of all that is loaded.
        decode_position: tokens before the decode step.
        answers: the evaluation that figures of answers are of; None where there is none.
        metrics: figures by name.
    """

    folder: str
    name: str
    target: str
    weights: str
    status: Status
    model: Model
    context: int | None
    unbeaten: bool | None
    latency: Origin | None
    memory: Origin | None
    prefill_tokens: int | None
    memory_tokens: int | None
    decode_position: int | None
    answers: Evaluated | None
    metrics: dict[str, Value]


@dataclass(frozen=True)
class Comparison:
    """Rows in order, warnings that mustn't be missed, and notes on what the figures can be held against."""

    sort: str
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def read(path: Path) -> Report:
    """The report of a published folder, whose files must be there with the sizes that it lists; or a report alone.

    Raises:
        BadInput: there is no report, or it isn't one; or a file of the folder is missing or of another size.
    """
    report = load_report(path)
    if not path.is_dir():
        return report
    for file in (file for artifact in report.artifacts for file in artifact.files):
        place = path / file.name
        if not place.is_file():
            raise BadInput("this file of the artifact is missing", where=str(place), fix="build it again")
        found = place.stat().st_size
        if found != file.bytes:
            raise BadInput(f"this file has {found} bytes, and the report says {file.bytes}", where=str(place),
                           fix="build it again or copy it again")
    return report


def unbeaten(points: Sequence[tuple[float, float] | None]) -> list[bool | None]:
    """Which points (size, loss) no other beats: is no greater in both, and smaller in one. None for a point unknown.

    Equal points don't beat each other; an unknown one beats none.
    """
    known = [point for point in points if point is not None]

    def beaten(size: float, loss: float) -> bool:
        return any(s <= size and x <= loss and (s, x) != (size, loss) for s, x in known)

    return [None if point is None else not beaten(*point) for point in points]


def compare(reports: Sequence[tuple[str, Report]], sort: str = SORTS[0]) -> Comparison:
    """The artifacts of reports in one table.

    Prefill is of the longest prompt that was measured of all of them, or of each one's longest if there is none;
    answers are likewise of an evaluation that all of them have which have any.

    Args:
        reports: each with the name that its artifacts go by.
        sort: one of :data:`SORTS`; the best come first, and those without the figure last.
    """
    prompt = prompts([artifact for _, report in reports for artifact in report.artifacts])
    answers = shared_key([artifact.evaluations for _, report in reports for artifact in report.artifacts])
    rows = [
        _row(name, report, artifact, prompt, answers) for name, report in reports for artifact in report.artifacts
    ]
    rows = _marked(rows)
    # By folder and figures first, so that the order of the arguments decides nothing.
    rows.sort(key=lambda row: (row.folder, row.target, row.weights))
    rows.sort(key=lambda row: _key(row, sort))
    return Comparison(sort, tuple(rows), tuple(_warnings(rows)), tuple(_notes(rows, _rounded(reports))))


def _row(
    name: str, report: Report, artifact: Artifact, prompt: int | None, answers: Key | None
) -> Row:
    latency, memory = artifact.latency, artifact.memory
    lengths = [p.tokens for p in latency.prefill] if latency else []
    context = report.options.get("context")
    return Row(
        folder=name,
        name=name if len(report.artifacts) == 1 else f"{name} {artifact.target} {artifact.weights}",
        target=artifact.target,
        weights=artifact.weights,
        status=artifact.status,
        model=_model(report.checkpoint),
        context=context if isinstance(context, int) else None,
        unbeaten=None,
        latency=Origin(latency.kind, latency.host, latency.threads) if latency else None,
        memory=Origin("measured", memory.host, memory.threads) if memory else None,
        prefill_tokens=max(lengths, default=None) if prompt is None or not lengths else prompt,
        memory_tokens=memory.prompt_tokens if memory else None,
        decode_position=latency.decode.position if latency and latency.decode else None,
        answers=_evaluated(chosen(artifact.evaluations, answers)),
        metrics=metrics_of(report, artifact, prompt, answers),
    )


def _evaluated(e: Evaluation | None) -> Evaluated | None:
    if e is None:
        return None
    return Evaluated(e.of, *e.key, e.exact_calls.low, e.exact_calls.high)


def _model(checkpoint: CheckpointInfo) -> Model:
    return Model(checkpoint.path_name, checkpoint.sha256, checkpoint.layers, tuple(a.sha256 for a in checkpoint.lora),
                 checkpoint.random)


def _identity(model: Model) -> tuple[object, ...]:
    """What makes losses comparable; a file's name has no part in it."""
    return model.sha256, model.layers, model.lora


def _marked(rows: list[Row]) -> list[Row]:
    """Rows that know whether another of the same model beats them; other models' losses are no measure for it."""
    out = list(rows)
    for identity in {_identity(row.model) for row in rows}:
        alike = [index for index, row in enumerate(rows) if _identity(row.model) == identity]
        for index, mark in zip(alike, unbeaten([_point(rows[i]) for i in alike]), strict=True):
            out[index] = replace(rows[index], unbeaten=mark)
    return out


def _point(row: Row) -> tuple[float, float] | None:
    size, loss = row.metrics["size"].value, row.metrics[LOSS].value
    return None if size is None or loss is None else (size, loss)


def _key(row: Row, sort: str) -> tuple[bool, float | str]:
    if sort in LABELS:
        return False, str(getattr(row, sort))
    value = row.metrics[sort].value
    if value is None:
        return True, 0.0
    return False, -value if BY_NAME[sort].more_is_better else value


def _warnings(rows: Sequence[Row]) -> list[str]:
    random = [row for row in rows if row.model.random]
    warnings = [f"{RANDOM} ({_names(random)})"] if random else []
    lesser = [row for row in rows if row.status != "verified-on-runtime"]
    return warnings + [f"{STATUS[g[0].status]}: {_names(g)}" for g in _groups(lesser, lambda row: row.status)]


def _notes(rows: Sequence[Row], rounded: Sequence[str]) -> list[str]:
    """What the figures are, where they were measured, and what must not be held against what."""
    models = _groups(rows, lambda row: _identity(row.model))
    several = len(models) > 1
    of = "of the same model " if several else ""
    notes = [f"*: no other {of}is at most as large and as lossy (KL), and better in one of the two"]
    unknown = [row for row in rows if row.unbeaten is None]
    if unknown:
        notes.append(f"can't be marked, as the loss is unknown: {_names(unknown)}")
    if several:
        told = [(_named(group[0].model), group) for group in models]
        notes.append("several models: sizes compare, but a loss refers to its own model's float weights, and a mark to "
                     f"artifacts of that model: {_listed(told)}")
    notes.append("KL, tokens equal: float to scheme, on the reference; export error: scheme to artifact, the largest "
                 "difference of a logit; the two are never added up")
    notes += rounded
    if len({row.context for row in rows}) > 1:
        held = [("unknown" if g[0].context is None else f"{whole(g[0].context)} tokens", g)
                for g in _groups(rows, lambda row: row.context)]
        notes.append("contexts differ; state and load memory grow with them, and the losses are of other texts: "
                     + _listed(held))
    return [*notes, *_measurements(rows), *_answers(rows), *_missing(rows)]


def _measurements(rows: Sequence[Row]) -> list[str]:
    notes = []
    timed = [row for row in rows if row.latency is not None or row.memory is not None]
    places = _groups(timed, lambda row: frozenset({row.latency, row.memory} - {None}))
    told = [(" and ".join(sorted(_placed(o) for o in {g[0].latency, g[0].memory} if o)), g) for g in places]
    if len(told) == 1:
        notes.append(f"decode, prefill, load RSS: {told[0][0]}")
    elif told:
        notes.append(f"NOT MEASURED ALIKE, so decode, prefill and load RSS don't compare between them: {_listed(told)}")
    steps = _groups([r for r in rows if r.decode_position is not None], lambda row: row.decode_position)
    if steps:
        told = [(plural(g[0].decode_position or 0, "token"), g) for g in steps]
        notes.append(f"decode is of a step after {_one_or_listed(told)}")
    lengths = _groups([r for r in rows if r.metrics["prefill"].value is not None], lambda row: row.prefill_tokens)
    if lengths:
        told = [(plural(g[0].prefill_tokens or 0, "token"), g) for g in lengths]
        notes.append(f"prefill is of a prompt of {_one_or_listed(told)}")
    measured = [row for row in rows if row.memory]
    if measured:
        notes.append(f"load RSS: {BY_NAME['load_rss'].meaning}; of it, before loading: {_sizes(rows, 'runtime_rss')}")
        told = [(plural(g[0].memory_tokens or 0, "token"), g) for g in _groups(measured, lambda row: row.memory_tokens)]
        notes.append(f"{BY_NAME['load_rss_all'].meaning} of {_one_or_listed(told)}: {_sizes(rows, 'load_rss_all')}")
    return notes


def _answers(rows: Sequence[Row]) -> list[str]:
    """Which queries answers were counted over, and how sure the shares are."""
    told = [(row.answers, row) for row in rows if row.answers is not None]
    if not told:
        return []
    groups: dict[Key, list[tuple[Evaluated, Row]]] = {}
    for answers, row in told:
        groups.setdefault(answers.key, []).append((answers, row))
    of = [(group[0][0].of, [row for _, row in group]) for group in groups.values()]
    titles = ", ".join(BY_NAME[name].title for name in ANSWERS)
    if len(of) == 1:
        notes = [f"{titles}: of {of[0][0]}"]
    else:
        notes = [f"NOT EVALUATED ALIKE, so {titles} don't compare between them: {_listed(of)}"]
    ends = "; ".join(f"{100 * a.low:.1f} to {100 * a.high:.1f} % ({row.name})" for a, row in told)
    return [*notes, f"exact calls, 95 % interval: {ends}"]


def _sizes(rows: Sequence[Row], metric: str) -> str:
    """Of every row that has it, a figure in bytes."""
    known = [row for row in rows if row.metrics[metric].value is not None]
    return _listed([(_bytes(group[0], metric), group) for group in _groups(known, lambda row: _bytes(row, metric))])


def _bytes(row: Row, metric: str) -> str:
    return size(int(row.metrics[metric].value or 0))


def _missing(rows: Sequence[Row]) -> list[str]:
    """Figures that rows lack, and values that were not measured, by reason."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        for why in dict.fromkeys(value.why for value in row.metrics.values() if value.why):
            if why == NOT_EVALUATED and not any(r.answers for r in rows):
                continue  # then there is no column of it either
            titles = ", ".join(BY_NAME[name].title for name, value in row.metrics.items() if value.why == why)
            found.setdefault(why, {}).setdefault(titles, []).append(row)
    return [
        f"{why}: " + "; ".join(f"{titles} of {_names(alike)}" for titles, alike in by_titles.items())
        for why, by_titles in found.items()
    ]


def _rounded(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """Of artifacts that an evaluator ran in float32: what becomes of them when every result is rounded."""
    notes = []
    for name, report in reports:
        for artifact in report.artifacts:
            rounded = artifact.parity.get("rounded")
            error = rounded.get("max_abs") if isinstance(rounded, dict) else None
            if isinstance(error, int | float):
                notes.append(f"{name}: the export error is of float32 arithmetic; with every result rounded as "
                             f"declared it is {small(error)}")
    return notes


def _groups(rows: Iterable[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    """Rows by what they share, in the order in which they come."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _named(model: Model) -> str:
    lora = f" + {plural(len(model.lora), 'adapter')} {', '.join(x[:_HASH] for x in model.lora)}" if model.lora else ""
    return f"{model.checkpoint} {model.sha256[:_HASH]}, {plural(model.layers, 'layer')}{lora}"


def _placed(origin: Origin) -> str:
    return f"{origin.kind} on {origin.host}, {threads(origin.threads)}"


def _one_or_listed(told: Sequence[tuple[str, Sequence[Row]]]) -> str:
    return told[0][0] if len(told) == 1 else _listed(told)


def _listed(told: Sequence[tuple[str, Sequence[Row]]]) -> str:
    return "; ".join(f"{what} ({_names(group)})" for what, group in told)


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(dict.fromkeys(row.name for row in rows))
