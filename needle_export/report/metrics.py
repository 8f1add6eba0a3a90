"""The figures of an artifact by name: what compares artifacts, bounds them or charts them reads a report here.

A figure has a unit and a value, or the reason why it has none. Three losses stand apart and are never added up: what a
scheme does to the float model, what rounded caches do on top, and what the artifact adds to both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from needle_export.config.metrics import ANSWERS, BY_NAME, LATENCIES, MEMORY, METRICS, Unit
from needle_export.report.evaluation import Evaluation, Key, chosen
from needle_export.report.schema import Artifact, Report


@dataclass(frozen=True)
class Value:
    """A figure of one artifact.

    Attributes:
        value: None where there is none.
        unit: of the value.
        why: why there is none, or why it is this one without having been measured; empty otherwise.
    """

    value: float | None
    unit: Unit
    why: str = ""


NO_SCHEME = "no scheme: no weight was rounded"

NOT_EVALUATED = "not evaluated: needle-export evaluate counts right answers"

_NO_ANSWER, _NO_QUERY = "no answer calls nothing", "no query calls for nothing"

FLOAT_CACHES = "the reference keeps keys and values in float32"


def metrics_of(
    report: Report, artifact: Artifact, prompt: int | None = None, answers: Key | None = None
) -> dict[str, Value]:
    """The figures of an artifact, by name, one for each of :data:`METRICS`.

    Args:
        report: that the artifact is in.
        prompt: length of the prompt that prefill is told for, in tokens; None takes the longest that was measured.
        answers: key of the evaluation that answers are told of; None takes :func:`.evaluation.chosen`.
    """
    found = {
        "size": _value("size", artifact.size.total_bytes),
        "compressed": _value("compressed", artifact.size.compressed_bytes),
        "state": _value("state", artifact.state_bytes.total_bytes),
        **_memory(artifact),
        **_latency(artifact, prompt),
        **_scheme_loss(artifact.parity),
        "cache_kl": _cache_loss(artifact.parity),
        **_own_error(artifact.parity),
        **answer_values(artifact, chosen(artifact.evaluations, answers)),
    }
    return {metric.name: found[metric.name] for metric in METRICS}


def prompts(artifacts: Sequence[Artifact]) -> int | None:
    """The longest prompt that was measured of all artifacts that have any; None if there is no such length."""
    lengths = [{p.tokens for p in a.latency.prefill} for a in artifacts if a.latency and a.latency.prefill]
    return max(set.intersection(*lengths), default=None) if lengths else None


def not_measured(artifact: Artifact) -> str:
    """Why an artifact without a measurement has none."""
    if artifact.status == "verified-on-runtime":
        return "not measured: built with --no-bench"
    return "not measured: nothing here runs it but an evaluator, and that says nothing about a device"


def _value(name: str, value: float | None, why: str = "") -> Value:
    return Value(value, BY_NAME[name].unit, why)


def _memory(artifact: Artifact) -> dict[str, Value]:
    memory = artifact.memory
    if memory is None:
        why = not_measured(artifact) if artifact.latency is None else "not measured: this target or system has no way"
        return {name: _value(name, None, why) for name in MEMORY}
    decode = memory.decode
    return {
        "load_rss": _value("load_rss", decode.rss_bytes),
        "load_rss_all": _value("load_rss_all", memory.all.rss_bytes),
        "runtime_rss": _value("runtime_rss", decode.baseline_bytes),
    }


def _latency(artifact: Artifact, prompt: int | None) -> dict[str, Value]:
    latency = artifact.latency
    if latency is None:
        # What is estimated or imported for a device is found under that device, and never stands in for this.
        why = not_measured(artifact)
        return {name: _value(name, None, why) for name in LATENCIES}
    rates = {p.tokens: p.tokens_per_s for p in latency.prefill}
    decode = (
        _value("decode", None, "no decode step was measured")
        if latency.decode is None
        else _value("decode", latency.decode.ms_p50)
    )
    length = max(rates, default=None) if prompt is None else prompt
    if length is None or length not in rates:
        of = "no prompt" if length is None else f"no prompt of {length} tokens"
        return {"decode": decode, "prefill": _value("prefill", None, f"{of} was measured")}
    return {"decode": decode, "prefill": _value("prefill", rates[length])}


def _scheme_loss(parity: Mapping[str, object]) -> dict[str, Value]:
    """What the scheme does to the float model; null in the report means that it rounds nothing."""
    names = {"kl": ("kl", 0.0), "token_agreement": ("argmax_equal", 1.0)}
    if "scheme_loss" not in parity:
        why = "the report doesn't tell what the scheme costs"
        return {name: _value(name, None, why) for name in names}
    loss = parity["scheme_loss"]
    if loss is None:
        return {name: _value(name, exact, NO_SCHEME) for name, (_, exact) in names.items()}
    return {name: _number(name, loss, key) for name, (key, _) in names.items()}


def _cache_loss(parity: Mapping[str, object]) -> Value:
    if "cache_loss" not in parity:
        return _value("cache_kl", None, "the report doesn't tell what caches cost")
    loss = parity["cache_loss"]
    return _value("cache_kl", 0.0, FLOAT_CACHES) if loss is None else _number("cache_kl", loss, "kl")


def _own_error(parity: Mapping[str, object]) -> dict[str, Value]:
    return {
        "artifact_error": _number("artifact_error", parity, "max_abs"),
        "artifact_kl": _number("artifact_kl", parity, "kl"),
    }


def answer_values(artifact: Artifact, evaluation: Evaluation | None) -> dict[str, Value]:
    """Figures of answers by name, of an evaluation of the artifact; none where there is no evaluation."""
    if evaluation is None:
        why = "evaluated on other data, or without the grammar" if artifact.evaluations else NOT_EVALUATED
        return {name: _value(name, None, why) for name in ANSWERS}
    e = evaluation
    same = None if e.reference is None else e.reference.same_calls
    shares = dict(zip(ANSWERS, (e.exact_calls, e.nothing_precision, e.nothing_recall, same), strict=True))
    whys = dict(zip(ANSWERS, ("", _NO_ANSWER, _NO_QUERY, e.reference_why), strict=True))
    return {
        name: _value(name, None, whys[name]) if share is None else _value(name, share.share)
        for name, share in shares.items()
    }


def _number(name: str, values: object, key: str) -> Value:
    """A number of the free-form part of a report; what isn't one is missing."""
    value = values.get(key) if isinstance(values, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return _value(name, None, f"the report has no number {key!r} for it")
    return _value(name, float(value))
