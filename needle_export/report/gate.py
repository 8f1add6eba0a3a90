"""Budgets held against reports: a verdict for each artifact that a budget is about, and what follows from all of them.

Nothing passes silently. A budget that no artifact matches, a figure that wasn't measured, and an estimate that no
budget admits by name are failures of their own, with the reason.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from needle_export.config.budget import Budget
from needle_export.config.metrics import Unit
from needle_export.config.strict import validate
from needle_export.errors import CheckFailed, NeedleExportError, UsageError
from needle_export.report.comparison import RANDOM
from needle_export.report.figures import MEASURED, Basis, Found, figure_of
from needle_export.report.metrics import prompts
from needle_export.report.schema import Artifact, Report
from needle_export.report.sizes import OVERHEAD
from needle_export.report.units import plural
from needle_export.report.view import ROLE_MEANINGS

Status = Literal["within", "exceeded", "unknown", "unmatched", "skipped"]
"""Of a verdict: inside the bound; beyond it; the figure can't be told; nothing is meant; left out, and nobody minds."""

ROLES = (*ROLE_MEANINGS, OVERHEAD)
"""What a budget of size may be for."""

SLACK, HEADROOM = 0.05, 0.01
"""A tighter budget is suggested where more than ``SLACK`` of it is unused: the value and ``HEADROOM``, rounded up."""


@dataclass(frozen=True)
class Entry:
    """A budget and where it is written.

    Attributes:
        budget: what is asked.
        file: its path, or the device or recipe that it came with.
        line: where the entry begins; None where that isn't a line of its own.
        in_file: whether ``file`` is a path.
        report: the only one whose artifacts are meant, by its name; None for all.
        device: what latencies are of where the budget names no device and nobody chose one.
    """

    budget: Budget
    file: str
    line: int | None = None
    in_file: bool = True
    report: str | None = None
    device: str | None = None

    @property
    def place(self) -> str:
        """For people: ``budgets.toml, line 3``."""
        return self.file if self.line is None else f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class Verdict:
    """What a budget says of an artifact.

    Attributes:
        status: see :data:`Status`.
        budget: in words.
        metric, role, device: of the budget.
        file, line, in_file: where it is written, as of an :class:`Entry`.
        report, target, weights: the artifact; empty where none is meant.
        unit: of the numbers.
        value: of the artifact; None where it can't be told.
        bound: what is allowed, in the metric's unit; None where it can't be told.
        upper: whether more than that is too much, or less too little.
        baseline: the value that a relative bound follows from; else None.
        basis: what the value is.
        where: the machine or device that it is of, with what is needed to compare it; empty for what was counted.
        why: the reason of a status without a comparison, or what must be known about the value; may be empty.
        suggestion: a tighter bound, ready to paste; empty where there is none.
    """

    status: Status
    budget: str
    metric: str
    role: str | None
    device: str | None
    file: str
    line: int | None
    in_file: bool
    report: str
    target: str
    weights: str
    unit: Unit
    value: float | None
    bound: float | None
    upper: bool
    baseline: float | None
    basis: Basis
    where: str
    why: str
    suggestion: str


@dataclass(frozen=True)
class Gate:
    """All verdicts in the order of the budgets, what must not be missed, and the exit code that follows."""

    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    exit_code: int

    def failure(self) -> NeedleExportError | None:
        """What to end with: a budget that is exceeded or can't be told before one that nothing matches; or None."""
        failed = [v for v in self.verdicts if v.status in ("exceeded", "unknown")]
        if failed:
            exceeded = sum(v.status == "exceeded" for v in failed)
            unknown = len(failed) - exceeded
            told = [f"{plural(exceeded, 'budget')} exceeded"] if exceeded else []
            told += [f"{plural(unknown, 'figure')} that a budget needs can't be told"] if unknown else []
            return CheckFailed(" and ".join(told), fix="see the table")
        lost = [v for v in self.verdicts if v.status == "unmatched"]
        if lost:
            first = lost[0]
            place = first.file if first.line is None else f"{first.file}, line {first.line}"
            more = f" ({plural(len(lost), 'such budget')})" if len(lost) > 1 else ""
            return UsageError(f"{first.budget}: {first.why}{more}", where=place,
                              fix="correct it, or say optional = true")
        if not any(v.status == "within" for v in self.verdicts):
            return UsageError("nothing was checked: every budget was skipped", fix="see the table")
        return None


def recorded(name: str, report: Report) -> list[Entry]:
    """The budgets that a report's own plan holds its artifacts to; of a build without recipe and device, none.

    Args:
        name: that the report's artifacts go by.
    """
    plan = report.plan
    if plan is None:
        return []
    source = " and ".join(part for part in (plan.recipe, plan.device) if part)
    budgets = (validate(Budget, dict(entry), f"{name}: plan.budgets[{i}]") for i, entry in enumerate(plan.budgets))
    return [Entry(budget, source, in_file=False, report=name, device=plan.device) for budget in budgets]


def check(
    entries: Sequence[Entry],
    reports: Sequence[tuple[str, Report]],
    baselines: Sequence[tuple[str, Report]] = (),
    device: str | None = None,
) -> Gate:
    """Hold budgets against the artifacts of reports.

    Args:
        entries: the budgets.
        reports: each with the name that its artifacts go by.
        baselines: what relative budgets refer to, likewise.
        device: the one to check for: budgets of others are skipped, and latencies are of it.

    Raises:
        UsageError: a budget is of no role that there is, is relative without a baseline, or there are no budgets.
    """
    if not entries:
        raise UsageError("there are no budgets to check", where="--budgets", fix="give a file of budgets, or --device")
    for entry in entries:
        _check_entry(entry, bool(baselines))
    verdicts = tuple(v for entry in entries for v in _verdicts(entry, reports, baselines, device))
    random = [name for name, report in reports if report.checkpoint.random]
    warnings = (f"{RANDOM} ({', '.join(random)})",) if random else ()
    gate = Gate(verdicts, warnings, 0)
    failure = gate.failure()
    return gate if failure is None else Gate(verdicts, warnings, failure.exit_code)


def _check_entry(entry: Entry, has_baseline: bool) -> None:
    budget = entry.budget
    if budget.role is not None and budget.role not in ROLES:
        near = difflib.get_close_matches(budget.role, ROLES, 1, 0.5)
        raise UsageError(f"there is no role {budget.role!r}", where=entry.place,
                         fix=f"did you mean {near[0]}?" if near else f"choose from {', '.join(ROLES)}")
    if budget.bound.relative and not has_baseline and not budget.optional:
        raise UsageError(f"{budget.sentence} is relative to a baseline, and none is given", where=entry.place,
                         fix="give --baseline, or say optional = true")


def _verdicts(
    entry: Entry,
    reports: Sequence[tuple[str, Report]],
    baselines: Sequence[tuple[str, Report]],
    chosen: str | None,
) -> Iterator[Verdict]:
    budget = entry.budget
    if chosen is not None and budget.device not in (None, chosen):
        yield _verdict(entry, "skipped", why=f"it is for another device, {budget.device}")
        return
    reports = [(name, report) for name, report in reports if entry.report in (None, name)]
    meant = list(_meant(budget, reports))
    if not meant:
        there = ", ".join(dict.fromkeys(f"{a.target} {a.weights}" for _, r in reports for a in r.artifacts))
        status: Status = "skipped" if budget.optional else "unmatched"
        yield _verdict(entry, status, why=f"no artifact is meant; there is {there}")
        return
    for name, report, artifact in meant:
        yield _judge(entry, name, report, artifact, baselines, budget.device or chosen or entry.device)


def _meant(budget: Budget, reports: Sequence[tuple[str, Report]]) -> Iterator[tuple[str, Report, Artifact]]:
    for name, report in reports:
        for artifact in report.artifacts:
            if budget.target in (None, artifact.target) and fnmatchcase(artifact.weights, budget.weights or "*"):
                yield name, report, artifact


def _verdict(
    entry: Entry,
    status: Status,
    *,
    name: str = "",
    artifact: Artifact | None = None,
    found: Found | None = None,
    bound: float | None = None,
    baseline: float | None = None,
    why: str = "",
    suggestion: str = "",
) -> Verdict:
    budget, found = entry.budget, found or Found(None)
    return Verdict(
        status=status,
        budget=budget.sentence,
        metric=budget.metric,
        role=budget.role,
        device=budget.device,
        file=entry.file,
        line=entry.line,
        in_file=entry.in_file,
        report=name,
        target=artifact.target if artifact else "",
        weights=artifact.weights if artifact else "",
        unit=budget.figure.unit,
        value=found.value,
        bound=bound,
        upper=budget.upper,
        baseline=baseline,
        basis=found.basis,
        where=found.where,
        why=why,
        suggestion=suggestion,
    )


def _judge(
    entry: Entry,
    name: str,
    report: Report,
    artifact: Artifact,
    baselines: Sequence[tuple[str, Report]],
    device: str | None,
) -> Verdict:
    budget, bound = entry.budget, entry.budget.bound
    old, prompt, base = None, budget.prompt, None
    if bound.relative:
        matching = _matching(artifact, report, baselines)
        if len(matching) != 1:
            label = f"{artifact.target} {artifact.weights}"
            why = f"the baseline has {'several' if matching else 'no'} {label}" if baselines else "there is no baseline"
            status: Status = "skipped" if budget.optional else "unmatched"
            return _verdict(entry, status, name=name, artifact=artifact, why=why)
        ((base_report, old),) = matching
        if prompt is None and budget.metric == "prefill":
            prompt = prompts([artifact, old])
        base = figure_of(budget, base_report, old, prompt, device)
    found = figure_of(budget, report, artifact, prompt, device)
    missing = found.why if found.value is None else "" if base is None else _incomparable(found, base)
    if missing or found.value is None:
        return _verdict(entry, "skipped" if budget.optional else "unknown", name=name, artifact=artifact, found=found,
                        baseline=base.value if base else None, why=missing)
    allowed = bound.against(base.value if base else None)
    within = found.value <= allowed if budget.upper else found.value >= allowed
    suggestion = _tighter(budget, found.value, allowed) if within else ""
    return _verdict(entry, "within" if within else "exceeded", name=name, artifact=artifact, found=found, bound=allowed,
                    baseline=base.value if base else None, why=found.why, suggestion=suggestion)


def _matching(
    artifact: Artifact, report: Report, baselines: Sequence[tuple[str, Report]]
) -> list[tuple[Report, Artifact]]:
    """Artifacts of the same target and weights; of several, those of the same depth and context."""
    alike = [(r, a) for _, r in baselines for a in r.artifacts
             if (a.target, a.weights) == (artifact.target, artifact.weights)]
    if len(alike) < 2:
        return alike

    def built(of: Report) -> tuple[object, ...]:
        return of.checkpoint.layers, of.options.get("context"), of.options.get("cache")

    return [(r, a) for r, a in alike if built(r) == built(report)]


def _incomparable(found: Found, base: Found) -> str:
    """Why a value can't be held against the baseline's; empty where it can."""
    if base.value is None:
        return f"the baseline has none: {base.why}"
    if (found.basis, found.where) != (base.basis, base.where):
        return f"the baseline's is {base.basis} {base.where}, this one {found.basis} {found.where}"
    return ""


def _tighter(budget: Budget, value: float, allowed: float) -> str:
    """A bound that keeps what was won, ready to paste; empty where there is little to win, or noise to fear.

    Only counted bytes are told so: times and resident memory differ from run to run.
    """
    if budget.figure.unit != "bytes" or budget.metric in MEASURED or not budget.upper or budget.bound.relative:
        return ""
    if value <= 0 or value >= (1 - SLACK) * allowed:
        return ""
    target = value * (1 + HEADROOM)
    step = 10.0 ** (math.floor(math.log10(target)) - 2)
    count = int(math.ceil(target / step) * step) if step >= 1 else math.ceil(target)
    return f'max = "{_written(count)}"' if count < allowed else ""


def _written(count: int) -> str:
    """Bytes with a unit, exactly, for a number of three digits."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.10g} {unit}"
    return f"{count} B"
