"""A published report with something added to it later; the artifact beside it stays as it is."""

from __future__ import annotations

from pathlib import Path

from needle_export.bundle.swap import locked
from needle_export.checkpoint.files import atomic_write
from needle_export.report.schema import REPORT_NAME, Report, dump_report


def rewrite_report(dist: Path, report: Report) -> None:
    """Put a report in the place of a published one, in one step.

    Args:
        dist: the folder, or the report in it.

    Raises:
        UsageError: the place can't be written.
    """
    file = dist / REPORT_NAME if dist.is_dir() else dist
    data = dump_report(report)
    # A build that publishes into the folder meanwhile would otherwise be given another build's report.
    with locked(file.resolve().parent.parent), atomic_write(file) as handle:
        handle.write(data)
