"""Several builds of one command line: run them, and show how each ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from needle_export.cli.failures import Failure, describe
from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import progress_of
from needle_export.errors import NeedleExportError, Unsupported

if TYPE_CHECKING:
    from needle_export.batch import Job, Outcome
    from needle_export.plan import Plan


def build_several(
    plans: Sequence[tuple[str, Path, Plan | NeedleExportError]], *, no_cache: bool, as_json: bool, quiet: bool
) -> None:
    """Build plans one after another, print how each ended, and end with the exit code of the first that failed.

    Args:
        plans: each with its name and folder; or why there is none.
    """
    from needle_export import batch, reuse

    jobs = [
        batch.Job(name, plan) if isinstance(plan, NeedleExportError)
        else batch.Job(name, plan.options, plan.refusals, plan.info(), plan.device)
        for name, _, plan in plans
    ]
    cache, outcomes, table = None if no_cache else reuse.open_cache(), [], not (as_json or quiet)
    try:
        with progress_of(silent=not table) as progress:
            for outcome in batch.run(jobs, progress, cache):
                outcomes.append(outcome)
    except BaseException:
        # What was published stays, so it is told.
        if table:
            emit(_text(jobs, outcomes))
        raise
    if as_json:
        emit(_json(plans, outcomes))
    elif table:
        emit(_text(jobs, outcomes))
    failures = [(o.job.name, describe(o.error)) for o in outcomes if o.error is not None]
    for name, failure in failures:
        click.echo(f"error: {name}: {failure.sentence}", err=True)
    if failures:
        raise click.exceptions.Exit(failures[0][1].exit_code)
    if all(o.status == "refused" for o in outcomes):
        click.echo("error: the devices refuse all of these builds; needle-export plan says why of each", err=True)
        raise click.exceptions.Exit(Unsupported.exit_code)


def _text(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> str:
    """A row for each build; those that none came of are interrupted or weren't begun."""
    from needle_export.report.text import Page
    from needle_export.report.units import size
    from needle_export.report.view import Section

    rows: list[tuple[str, ...]] = []
    # What is said of several builds is said once.
    notes: dict[str, list[str]] = {}
    for job, outcome in zip(jobs, [*outcomes, *[None] * (len(jobs) - len(outcomes))], strict=True):
        artifact = outcome.report.artifacts[0] if outcome is not None and outcome.report is not None else None
        rows.append((
            job.name,
            "not built" if outcome is None else _status(outcome),
            "-" if artifact is None else f"{artifact.target} {artifact.weights}",
            "-" if artifact is None else size(artifact.size.total_bytes),
        ))
        told = [f"refused: {reason}" for reason in job.refusals]
        if outcome is not None and outcome.error is not None:
            told.append(f"failed: {describe(outcome.error).sentence}")
        for sentence in told:
            notes.setdefault(sentence, []).append(job.name)
    page = Page(color=use_color(), width=page_width())
    page.section(Section("Builds", ("build", "status", "artifact", "size"), tuple(rows), frozenset({3})))
    for sentence, names in notes.items():
        page.note(f"{', '.join(names)}: {sentence}")
    return page.text()


def _status(outcome: Outcome) -> str:
    if not outcome.same_as:
        return outcome.status
    return f"{'failed, ' if outcome.error is not None else ''}same as {outcome.same_as}"


def _json(plans: Sequence[tuple[str, Path, Any]], outcomes: Sequence[Outcome]) -> str:
    from needle_export.report.codec import encode

    builds = [
        {
            "name": outcome.job.name,
            "out": str(out),
            "status": outcome.status,
            "same_as": outcome.same_as or None,
            "refusals": list(outcome.job.refusals),
            "error": None if outcome.error is None else _error(describe(outcome.error)),
            "report": None if outcome.report is None else encode(outcome.report),
        }
        for (_, out, _), outcome in zip(plans, outcomes, strict=True)
    ]
    return json.dumps({"builds": builds}, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _error(failure: Failure) -> dict[str, Any]:
    return dict(json.loads(failure.as_json())["error"])
