"""What a report says to people, before anyone decides how it looks.

Text, Markdown and later views render these facts and sections; none of them reads a report itself, so
all say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from needle_export.report import elsewhere_view, evaluation_view
from needle_export.report.measured import Latency
from needle_export.report.schema import Artifact, Fusion, LeftUnfused, Report
from needle_export.report.units import milliseconds, percent, plural, rate, size, small, threads, whole

Mood = Literal["plain", "good", "bad"]

ROLE_MEANINGS = {
    "routing": "q, k: where to look",
    "content": "v, gate, out: what to write",
    "memory": "engram",
    "mixing": "Monarch MLP",
    "lanes": "hyper-connections",
    "vocabulary": "tied embedding",
    "heads": "probes",
    "norms": "",
}
"""Roles in the order in which people meet them, with what each is."""

RANDOM_ANSWERS = "RANDOM WEIGHTS, made for tests: sizes and speeds are real, answers mean nothing"
"""What is said, first of all, of a report whose weights mean nothing."""

STATUS = {
    "verified-on-runtime": "verified on the runtime",
    "verified-by-evaluator": "verified by our evaluator, not on the runtime",
    "converted-only": "converted only: nothing has run it",
}
"""How far an artifact was proven, in words."""

_RUNTIMES = ("onnxruntime", "ai-edge-litert", "coremltools")
_MAX_ROWS = 15
_MAX_ITEMS = 8


@dataclass(frozen=True)
class Fact:
    """One line of the summary."""

    label: str
    value: str
    mood: Mood = "plain"


@dataclass(frozen=True)
class Section:
    """A table with its title.

    Attributes:
        title: what it shows.
        columns: their names.
        rows: cells, as many a row as there are columns.
        numbers: indices of columns to be set flush right.
        bars: a fraction of 0 to 1 for each row, to be drawn where a view can; None for no bars.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    bars: tuple[float, ...] | None = None


def title(report: Report) -> str:
    """The model in one line."""
    c = report.checkpoint
    depth = f"{c.layers} of {c.parent_layers} layers" if c.layers != c.parent_layers else f"{c.layers} layers"
    lora = "".join(f" + {adapter.path_name}" for adapter in c.lora)
    return f"{c.path_name}{lora}, {depth}, {whole(c.parameters)} parameters"


def warnings(report: Report) -> list[str]:
    """What a reader must not miss."""
    out = []
    if report.checkpoint.random:
        out.append(RANDOM_ANSWERS)
    for artifact in report.artifacts:
        if artifact.status != "verified-on-runtime":
            out.append(f"{artifact.target} {artifact.weights} is {STATUS[artifact.status]}")
    return out


def facts(report: Report, artifact: Artifact) -> list[Fact]:
    """The essential about an artifact: size, whether it is right, how fast it is, what it keeps."""
    good = artifact.status == "verified-on-runtime"
    status = STATUS[artifact.status]
    runtimes = [f"{name} {artifact.versions[name]}" for name in _RUNTIMES if name in artifact.versions]
    if good and runtimes:
        status += f" ({', '.join(runtimes)})"
    files, total = plural(len(artifact.files), "file"), artifact.size.total_bytes
    out = [
        Fact("size", f"{size(total)} ({whole(total)} bytes, {files}), {size(artifact.size.compressed_bytes)} in a zip"),
        Fact("status", status, "good" if good else "bad"),
    ]
    if parity := _parity_line(artifact.parity):
        out.append(Fact("parity", parity))
    if weights := _weights_line(artifact.parity):
        out.append(Fact("weights", weights))
    out += _latency_facts(artifact.latency)
    out.append(Fact("memory", _memory_line(artifact)))
    context = report.options.get("context")
    at = f", for {whole(context)} tokens" if isinstance(context, int) else ""
    out.append(Fact("state", f"{size(artifact.state_bytes.total_bytes)} between steps{at}"))
    if report.checkpoint.dropped_heads:
        out.append(Fact("left out", ", ".join(f"{name} head" for name in report.checkpoint.dropped_heads)))
    out += [Fact("answers", evaluation_view.line(e)) for e in artifact.evaluations]
    missed = {op: f for op, f in artifact.fusion.items() if f.fused < f.expected}
    out.append(Fact("fusion", _fusion_line(artifact.fusion, missed), "bad" if missed else "good"))
    return out + [Fact(label, text) for label, text in elsewhere_view.lines(artifact)]


def sections(report: Report, artifact: Artifact) -> list[Section]:
    """Everything else about an artifact; sections without content are left out."""
    every = [_answers(artifact), _bytes(artifact), _tensors(artifact), _fusion(artifact), _left(artifact),
             _nodes(artifact), _state(artifact), _prefill(artifact.latency), _elsewhere(artifact), _runtimes(artifact),
             _signatures(artifact), _parity(artifact), _kept_float(artifact), _gpu_lint(artifact), _files(artifact),
             _pairs("Plan", plan_told(report)), _pairs("Built with", report.options),
             _pairs("Versions", artifact.versions)]
    return [section for section in every if section.rows]


def plan_told(report: Report) -> dict[str, str]:
    """The recipe, the device and the budgets that a build was planned with; empty without."""
    plan = report.plan
    if plan is None:
        return {}
    # Whatever the order of the keys: in a file they are sorted.
    bounds = (", ".join(str(value) if key == "metric" else f"{key} {value}"
                        for key, value in sorted(entry.items(), key=lambda item: (item[0] != "metric", item[0])))
              for entry in plan.budgets)
    told = {"recipe": plan.recipe, "device": plan.device, "budgets": "; ".join(bounds)}
    return {key: value for key, value in told.items() if value}


def _parity_line(parity: Mapping[str, Any]) -> str:
    """The comparison in one line, of whatever numbers are there; the format leaves them free."""

    def number(key: str, values: object = parity) -> float | None:
        value = values.get(key) if isinstance(values, Mapping) else None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    parts = []
    if (equal := number("argmax_equal")) is not None:
        steps = number("steps")
        parts.append(f"{equal:.0f}{'' if steps is None else f' of {steps:.0f}'} next tokens equal")
    if (error := number("max_abs")) is not None:
        limit = number("logits", parity.get("tolerance"))
        allowed = "" if limit is None else f" (allowed {small(limit)})"
        parts.append(f"largest logit error {small(error)}{allowed}")
    if (sqnr := number("sqnr_db")) is not None:
        parts.append(f"SQNR {sqnr:.0f} dB")
    return ", ".join(parts)


def _weights_line(parity: Mapping[str, Any]) -> str:
    """What of the stored numbers was compared; nothing where the report doesn't say."""
    if "weights" not in parity:
        return ""
    compared = parity["weights"]
    if not isinstance(compared, Mapping):
        return "not compared with the checkpoint's: this target doesn't read them back"
    counts = [compared.get(key) for key in ("matrices", "bytes", "folded")]
    matrices, stored, folded = (count if isinstance(count, int) else 0 for count in counts)
    noun = "matrix" if matrices == 1 else "matrices"
    line = f"{whole(matrices)} {noun}, {size(stored)}: the checkpoint's in every bit"
    return line + (f"; {whole(folded)} more with constants folded in, which only logits tell of" if folded else "")


def _latency_facts(latency: Latency | None) -> list[Fact]:
    if latency is None:
        return [Fact("decode", "not measured")]
    out = []
    if decode := latency.decode:
        out.append(Fact("decode", f"{milliseconds(decode.ms_p50)} a token, {rate(decode.tokens_per_s)} "
                        f"({latency.kind}; 95 % within {milliseconds(decode.ms_p95)}; "
                        f"after {plural(decode.position, 'token')})"))
    if latency.prefill:
        best = latency.prefill[-1]
        out.append(Fact("prefill", f"{plural(best.tokens, 'token')} in {milliseconds(best.ms_p50)}, "
                        f"{rate(best.tokens_per_s)} ({latency.kind})"))
    load = [f"{name} {milliseconds(value)}" for name, value in (("load", latency.load_ms),
                                                               ("first token", latency.first_ms))
            if value is not None]
    if latency.peak_rss_bytes is not None:
        load.append(f"peak memory {size(latency.peak_rss_bytes)}")
    if load:
        out.append(Fact("start", f"{', '.join(load)} ({latency.kind})"))
    out.append(Fact(latency.kind, f"on {latency.host}, {threads(latency.threads)}, by: {latency.command}"))
    return out


def _memory_line(artifact: Artifact) -> str:
    """What loading takes, in one line; the machine is named unless the times name it."""
    memory = artifact.memory
    if memory is None:
        return "not measured"
    decode, every = memory.decode, memory.all
    same = artifact.latency is not None and artifact.latency.host == memory.host
    return (f"{size(decode.rss_bytes)} resident after loading decode and a step, {size(decode.baseline_bytes)} of it "
            f"before loading; {size(every.rss_bytes)} after loading everything and a prompt of "
            f"{plural(memory.prompt_tokens, 'token')} "
            f"(measured{'' if same else f' on {memory.host}'}, {threads(memory.threads)})")


def _fusion_line(fusion: Mapping[str, Fusion], missed: Mapping[str, Fusion]) -> str:
    if not fusion:
        return "no fused ops in this build"
    if missed:
        short = (f"{op} {f.fused} of {f.expected}" for op, f in sorted(missed.items()))
        return f"incomplete: {', '.join(short)}"
    made = sum(f.fused for f in fusion.values())
    return f"complete, {plural(made, 'fused op')} of {plural(len(fusion), 'kind')}"


def _answers(artifact: Artifact) -> Section:
    heads = ("figure", *("" for _ in artifact.evaluations))
    return Section("Answers to queries (evaluated)", heads, evaluation_view.rows(artifact))


def _bytes(artifact: Artifact) -> Section:
    s = artifact.size
    named = [(role, s.by_role[role]) for role in ROLE_MEANINGS if role in s.by_role]
    named += [(role, count) for role, count in sorted(s.by_role.items()) if role not in ROLE_MEANINGS]
    named.append(("overhead", s.overhead_bytes))
    rows = [(role, ROLE_MEANINGS.get(role, "graph, names, padding" if role == "overhead" else ""),
             whole(count), percent(count, s.total_bytes)) for role, count in named]
    rows.append(("total", "", whole(s.total_bytes), percent(s.total_bytes, s.total_bytes)))
    shares = [count / s.total_bytes if s.total_bytes else 0.0 for _, count in named]
    return Section("Where the bytes are", ("role", "weights", "bytes", "share"), tuple(rows),
                   frozenset({2, 3}), (*shares, 0.0))


def _tensors(artifact: Artifact) -> Section:
    every, total = artifact.size.tensors, artifact.size.total_bytes
    rows = [(t.name, t.role, whole(t.bytes), percent(t.bytes, total)) for t in every[:_MAX_ROWS]]
    if rest := sum(t.bytes for t in every[_MAX_ROWS:]):
        rows.append((plural(len(every) - _MAX_ROWS, "other tensor"), "", whole(rest), percent(rest, total)))
    return Section("Largest tensors, all blocks together", ("tensor", "role", "bytes", "share"), tuple(rows),
                   frozenset({2, 3}))


def _fusion(artifact: Artifact) -> Section:
    rows = tuple((op, whole(f.fused), whole(f.expected), whole(len(f.left)))
                 for op, f in sorted(artifact.fusion.items()))
    return Section("Fused ops", ("op", "fused", "expected", "left"), rows, frozenset({1, 2, 3}))


def _left(artifact: Artifact) -> Section:
    rows = []
    for op, fusion in sorted(artifact.fusion.items()):
        reasons: dict[str, list[LeftUnfused]] = {}
        for left in fusion.left:
            reasons.setdefault(left.reason, []).append(left)
        rows += [(op, places_of(places), places[0].node, reason) for reason, places in reasons.items()]
    return Section("Left unfused, and why", ("op", "layers", "first node", "reason"), tuple(rows))


def places_of(places: Sequence[LeftUnfused]) -> str:
    layers = sorted({place.layer for place in places if place.layer is not None})
    outside = ["outside the stack"] if any(place.layer is None for place in places) else []
    return ", ".join([*ranges(layers), *outside])


def ranges(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers with runs joined: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _nodes(artifact: Artifact) -> Section:
    nodes = artifact.nodes
    by_count = sorted(nodes.by_op.items(), key=lambda item: (-item[1], item[0]))
    rows = [("decode, all", whole(nodes.decode))]
    if nodes.prefill is not None:
        rows.append(("prefill, all", whole(nodes.prefill)))
    rows += [(op, whole(count)) for op, count in by_count[:_MAX_ROWS]]
    if rest := by_count[_MAX_ROWS:]:
        rows.append((plural(len(rest), "other operator"), whole(sum(count for _, count in rest))))
    return Section("Graph nodes (by operator: decode)", ("operator", "nodes"), tuple(rows), frozenset({1}))


def _state(artifact: Artifact) -> Section:
    s = artifact.state_bytes
    rows = [(part, whole(count), percent(count, s.total_bytes)) for part, count in sorted(s.by_part.items())]
    rows.append(("total", whole(s.total_bytes), percent(s.total_bytes, s.total_bytes)))
    return Section("State between steps", ("part", "bytes", "share"), tuple(rows), frozenset({1, 2}))


def _prefill(latency: Latency | None) -> Section:
    rows = () if latency is None else tuple(
        (whole(p.tokens), milliseconds(p.ms_p50), rate(p.tokens_per_s)) for p in latency.prefill)
    kind = "" if latency is None else f" ({latency.kind})"
    return Section(f"Prefill{kind}", ("prompt tokens", "median", "rate"), rows, frozenset({0, 1, 2}))


def _elsewhere(artifact: Artifact) -> Section:
    title = "Latency, by where it comes from"
    return Section(title, elsewhere_view.COLUMNS, tuple(elsewhere_view.rows(artifact)), frozenset({3, 4}))


def _runtimes(artifact: Artifact) -> Section:
    rows = []
    for check in artifact.runtimes:
        loaded = {None: "not tried", True: "yes", False: "no"}[check.loaded]
        equal = {None: "unknown", True: "yes", False: "no"}[check.reproduced]
        error = "" if check.max_abs is None else small(check.max_abs)
        rows.append((f"{check.runtime} {check.version}".strip(), loaded, equal, error, check.reason))
    return Section("Runtimes", ("runtime", "loads it", "reproduces the reference", "largest logit error", "reason"),
                   tuple(rows), frozenset({3}))


def _signatures(artifact: Artifact) -> Section:
    rows = []
    for name, s in artifact.signatures.items():
        cutters = ", ".join(f"{x.op} {whole(x.splits)}" for x in s.left if x.splits) or "none"
        rows.append((name, whole(s.ops), f"{whole(s.partitions)} by {s.delegate}", whole(s.delegated), cutters))
    return Section("Signatures, and how a delegate cuts them",
                   ("signature", "ops", "partitions", "ops in them", "cut by"), tuple(rows), frozenset({1, 3}))


def _gpu_lint(artifact: Artifact) -> Section:
    rows = tuple((x.rule, x.op, whole(x.count), x.why, x.source) for x in artifact.gpu_lint)
    return Section("GPU delegate: a lint from public sources, not a result",
                   ("rule", "op", "count", "what is reported", "source"), rows, frozenset({2}))


def _parity(artifact: Artifact) -> Section:
    shown = {key: value for key, value in artifact.parity.items() if key != "scheme"}
    return _pairs("Comparison with the reference", shown)


def _kept_float(artifact: Artifact) -> Section:
    kept = sorted(artifact.kept_float, key=lambda k: (-k.bytes, k.name))
    rows = [(k.name, whole(k.bytes), k.reason) for k in kept[:_MAX_ROWS]]
    if rest := kept[_MAX_ROWS:]:
        rows.append((plural(len(rest), "other weight"), whole(sum(k.bytes for k in rest)), "see report.json"))
    if kept:
        total, files = sum(k.bytes for k in kept), artifact.size.total_bytes
        # Two decimals, as it is often about 1 %.
        rows.append(("total", whole(total), f"{100 * total / files if files else 0:.2f} % of the files"))
    return Section("Kept in floating point", ("weight", "bytes", "reason"), tuple(rows), frozenset({1}))


def _files(artifact: Artifact) -> Section:
    rows = tuple((file.name, whole(file.bytes), file.sha256) for file in artifact.files)
    return Section("Files", ("name", "bytes", "SHA-256"), rows, frozenset({1}))


def _pairs(name: str, values: Mapping[str, Any]) -> Section:
    rows = tuple((key, _shown(value)) for key, value in sorted(values.items()))
    return Section(name, ("name", "value"), rows)


def _shown(value: object) -> str:
    if value is None or (isinstance(value, (Mapping, list, tuple)) and not value):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return whole(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        more = [] if len(value) <= _MAX_ITEMS else [f"and {len(value) - _MAX_ITEMS} more"]
        return ", ".join([*(_shown(item) for item in value[:_MAX_ITEMS]), *more])
    return str(value)
