"""Several builds in one call: one after another, what is the same once, and how each ended."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from needle_export.bundle.cache import Cache
from needle_export.config.device import Device
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.errors import NeedleExportError
from needle_export.report.schema import PlanInfo, Report
from needle_export.reuse import was_taken

log = logging.getLogger(__name__)

Status = Literal["built", "from the cache", "same", "refused", "failed"]


@dataclass(frozen=True)
class Job:
    """One build of several.

    Attributes:
        name: by which it is told apart.
        options: of it, with a folder of its own; or why there are none.
        refusals: why it isn't to be built, a sentence each.
        plan: for the report.
        device: that it is for, or None.
    """

    name: str
    options: BuildOptions | NeedleExportError
    refusals: tuple[str, ...] = ()
    plan: PlanInfo | None = None
    device: Device | None = None


@dataclass(frozen=True)
class Outcome:
    """How one ended.

    Attributes:
        status: ``same`` as another of these builds, ``same_as``, whose artifact was published here too.
        report: of what was published, or None.
        error: that ended it, or None; of the same artifact, the other's.
    """

    job: Job
    status: Status
    report: Report | None = None
    same_as: str = ""
    error: Exception | None = None


def run(jobs: Sequence[Job], progress: Progress, cache: Cache | None) -> Iterator[Outcome]:
    """Build one after another, whatever becomes of those before; each outcome when it is known.

    An interrupt ends it. What was published by then stays.

    Args:
        cache: as :func:`pipeline.build` takes it; without one, the builds still share among themselves.
    """
    from needle_export import pipeline

    first: dict[BuildOptions, Outcome] = {}
    with _shared(jobs, cache) as kept:
        for number, job in enumerate(jobs, 1):
            options = job.options
            if isinstance(options, NeedleExportError):
                yield Outcome(job, "failed", error=options)
                continue
            if job.refusals:
                yield Outcome(job, "refused")
                continue
            what = _decisive(options)
            earlier = first.get(what)
            if earlier is not None and earlier.error is not None:
                yield Outcome(job, "failed", same_as=earlier.job.name, error=earlier.error)
                continue
            try:
                with progress.stage(f"build {number} of {len(jobs)}, {job.name}"):
                    report = pipeline.build(options, progress, job.plan, kept, job.device)
            except Exception as error:  # of any kind: the others don't depend on it
                log.debug("%s failed", job.name, exc_info=True)
                outcome = Outcome(job, "failed", error=error)
            else:
                taken = was_taken(report)
                same = earlier.job.name if earlier is not None and taken else ""
                outcome = Outcome(job, "same" if same else "from the cache" if taken else "built", report, same)
            first.setdefault(what, outcome)
            yield outcome


def _decisive(options: BuildOptions) -> BuildOptions:
    """Options without those that decide nothing of the artifact."""
    return replace(options, out=Path(), threads=1, bench=True)


@contextlib.contextmanager
def _shared(jobs: Sequence[Job], cache: Cache | None) -> Iterator[Cache | None]:
    """A cache for these builds: the user's, or else one that goes with them where they have something to share."""
    wanted = [j.options for j in jobs if not j.refusals and not isinstance(j.options, NeedleExportError)]
    common = len({_decisive(o) for o in wanted}) < len(wanted) or sum(o.rounding != "nearest" for o in wanted) > 1
    if cache is not None or not common:
        yield cache
        return
    with tempfile.TemporaryDirectory(prefix="needle-export-") as folder:
        yield Cache(Path(folder), sys.maxsize)
