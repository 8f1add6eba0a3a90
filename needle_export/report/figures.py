"""A figure of an artifact as a budget needs it: the value, what it rests on, and where it is of.

A latency of a device is one that was imported from there, or an estimate, and the two are never mixed: an estimate
answers only a budget that asks for one by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from needle_export.config.budget import Budget
from needle_export.config.metrics import ANSWERS, LATENCIES, MEMORY
from needle_export.report.elsewhere import LatencyEstimate
from needle_export.report.evaluation import Evaluation, Proportion
from needle_export.report.measured import Latency
from needle_export.report.metrics import NOT_EVALUATED, answer_values, metrics_of
from needle_export.report.schema import Artifact, Report
from needle_export.report.sizes import OVERHEAD
from needle_export.report.units import plural
from needle_export.report.units import threads as threads_told

Basis = Literal["counted", "measured", "imported", "estimated", "evaluated"]
"""What a value is: read off the files or the reference, timed where the report says, brought from a device, computed
from a device's rates, or counted over answers to a file of queries."""

MEASURED = (*MEMORY, *LATENCIES)
"""Figures that depend on the machine."""

_ESTIMATE = "it is an estimate, which decides only where the budget says estimated = true"


@dataclass(frozen=True)
class Found:
    """A figure, or why there is none; ``where`` must be the same where two are compared."""

    value: float | None
    basis: Basis = "counted"
    where: str = ""
    why: str = ""


def figure_of(budget: Budget, report: Report, artifact: Artifact, prompt: int | None, device: str | None) -> Found:
    """The figure that a budget bounds.

    Args:
        prompt: length of the prompt that prefill is told for, in tokens; None takes the longest.
        device: that a latency is told for; None is the machine that the build was measured on.
    """
    if budget.role is not None:
        size = artifact.size
        return Found(size.overhead_bytes if budget.role == OVERHEAD else size.by_role.get(budget.role, 0))
    if budget.metric in LATENCIES:
        if device is not None:
            return _elsewhere(budget, artifact, prompt, device)
        return _here(budget, report, artifact, prompt)
    if budget.metric in ANSWERS:
        return _answers(budget, artifact)
    value = metrics_of(report, artifact, prompt)[budget.metric]
    memory = artifact.memory
    if budget.metric in MEASURED and value.value is not None and memory is not None:
        return Found(value.value, "measured", _machine(memory.host, memory.threads), value.why)
    return Found(value.value, why=value.why)


def _answers(budget: Budget, artifact: Artifact) -> Found:
    """A figure of answers: of the one evaluation that is meant; which of several counts is nothing to guess."""
    of = [e for e in artifact.evaluations
          if e.constrained != budget.unconstrained and budget.data in (None, e.data.file)]
    if len(of) != 1:
        grammar = "without the grammar" if budget.unconstrained else "with the grammar"
        if not artifact.evaluations:
            why = NOT_EVALUATED
        elif not of:
            told = "; ".join(e.of for e in artifact.evaluations)
            why = f"not evaluated {grammar}{f' on {budget.data}' if budget.data else ''}; there is {told}"
        else:
            hint = "" if budget.data else ": say data = ... in the budget"
            why = f"evaluated several times {grammar}, on {'; '.join(e.of for e in of)}{hint}"
        return Found(None, "evaluated", why=why)
    value = answer_values(artifact, of[0])[budget.metric]
    if value.value is None:
        return Found(None, "evaluated", f"on {of[0].of}", value.why)
    share = _proportion(budget.metric, of[0])
    why = "" if share is None else f"95 % interval {100 * share.low:.1f} to {100 * share.high:.1f} %"
    return Found(value.value, "evaluated", f"on {of[0].of}, at most {plural(of[0].max_new_tokens, 'token')}", why)


def _proportion(metric: str, e: Evaluation) -> Proportion | None:
    shares = {"exact_call_accuracy": e.exact_calls, "nothing_precision": e.nothing_precision,
              "nothing_recall": e.nothing_recall,
              "reference_agreement": None if e.reference is None else e.reference.same_calls}
    return shares[metric]


def _here(budget: Budget, report: Report, artifact: Artifact, prompt: int | None) -> Found:
    value = metrics_of(report, artifact, prompt)[budget.metric]
    if value.value is None or artifact.latency is None:
        return Found(None, "measured", why=value.why)
    latency = artifact.latency
    where = f"{_machine(latency.host, latency.threads)}, {_length(budget.metric, latency, prompt)}"
    if latency.kind == "estimated" and not budget.estimated:
        return Found(None, "estimated", where, _ESTIMATE)
    return Found(value.value, latency.kind, where, value.why)


def _elsewhere(budget: Budget, artifact: Artifact, prompt: int | None, device: str) -> Found:
    """A latency of a device: the slowest that was imported from it, else an estimate for it."""
    imported = [i for i in artifact.imported if (i.device, i.phase) == (device, budget.metric)]
    if budget.metric == "prefill":
        length = max((i.tokens for i in imported), default=0) if prompt is None else prompt
        imported = [i for i in imported if i.tokens == length]
    if imported:
        slowest = max(imported, key=lambda i: i.ms)
        value = slowest.ms if budget.metric == "decode" else slowest.tokens / slowest.ms * 1e3
        where = f"on {device}, {slowest.statistic}, from {slowest.file}, for {plural(slowest.tokens, 'token')}"
        return Found(value, "imported", where)
    estimates = [e for e in artifact.estimates if e.device == device]
    if not estimates:
        return Found(None, why=f"nothing was measured on {device}, and there is no estimate for it")
    return _estimated(budget, estimates[0], prompt)


def _estimated(budget: Budget, estimate: LatencyEstimate, prompt: int | None) -> Found:
    if budget.metric == "decode":
        value, length = estimate.decode_ms, f"after {plural(estimate.position, 'token')}"
    else:
        rates = {p.tokens: p.tokens_per_s for p in estimate.prefill}
        tokens = max(rates, default=0) if prompt is None else prompt
        if tokens not in rates:
            return Found(None, "estimated", why=f"there is no estimate of a prompt of {plural(tokens, 'token')}")
        value, length = rates[tokens], f"for {plural(tokens, 'token')}"
    where = f"for {estimate.device}, with rates of kind {estimate.basis}, {length}"
    return Found(value, "estimated", where) if budget.estimated else Found(None, "estimated", where, _ESTIMATE)


def _length(metric: str, latency: Latency, prompt: int | None) -> str:
    """After or for how many tokens a latency is."""
    if metric == "decode":
        return f"after {plural(latency.decode.position if latency.decode else 0, 'token')}"
    longest = max((p.tokens for p in latency.prefill), default=0)
    return f"for {plural(longest if prompt is None else prompt, 'token')}"


def _machine(host: str, threads: int) -> str:
    return f"on {host}, {threads_told(threads)}"
