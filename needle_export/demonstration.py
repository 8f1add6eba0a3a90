"""The demonstration: the model that comes along, built for every target that is here, each asked the same request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from needle_export import answering, batch, demo
from needle_export.bundle.cache import Cache
from needle_export.checkpoint.resolve import SURELY_DEMO
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.errors import Unsupported
from needle_export.generate.prompt import compact

#: Tokens that the caches hold: the tools are most of a prompt.
CONTEXT = 1024

QUERY = "turn on the kitchen lights"


@dataclass(frozen=True)
class Row:
    """What became of one target.

    Attributes:
        weights: the scheme.
        status: how far the build was verified; empty where there is none.
        bytes: of all its files, or None.
        session: where it ran and what it answered, or None.
        error: that ended it, or None.
    """

    target: str
    weights: str
    status: str = ""
    bytes: int | None = None
    session: answering.Session | None = None
    error: Exception | None = None

    @property
    def absent(self) -> bool:
        """Whether it ended for want of a runtime on this machine."""
        return isinstance(self.error, (Unsupported, ModuleNotFoundError))

    @property
    def answer(self) -> str:
        """The calls in a line, or why there are none; empty where it wasn't asked."""
        if self.session is None:
            return ""
        (found,) = self.session.answers
        if not found.valid:
            return f"no valid calls: {found.problem}"
        return "; ".join(f"{call.name} {compact(call.arguments)}" for call in found.calls) or "calls nothing"


def run(
    targets: Sequence[str], query: str, weights: str, out: Path, progress: Progress, cache: Cache | None
) -> Iterator[Row]:
    """Build for one target after another, and ask each; whatever becomes of one, the others don't depend on it.

    Args:
        out: the builds' folders are put into it, by their targets' names.
        cache: as :func:`pipeline.build` takes it.

    Raises:
        BadInput: the model didn't come along.
        UsageError: a target has no such scheme.
    """
    tools = demo.files().tools
    asked: dict[str, Any] = {"weights": weights, "context": CONTEXT, "bench": False}
    jobs = [batch.Job(target, BuildOptions(SURELY_DEMO, out / target, target, **asked)) for target in targets]
    for outcome in batch.run(jobs, progress, cache):
        target = outcome.job.name
        if outcome.report is None:
            yield Row(target, weights, error=outcome.error)
            continue
        (artifact,) = outcome.report.artifacts
        built = Row(target, weights, artifact.status, artifact.size.total_bytes)
        try:
            session = answering.answer(out / target, [query], tools, progress=progress)
        except Exception as error:  # of any kind: the other targets are asked all the same
            yield replace(built, error=error)
        else:
            yield replace(built, session=session)
