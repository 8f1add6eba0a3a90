"""Published folders with changed files, whose report and manifest say so: nothing but the content can tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from needle_export.assemble import file_info
from needle_export.report.manifest import MANIFEST_NAME, dump_manifest, load_manifest
from needle_export.report.schema import REPORT_NAME, Report, dump_report, load_report


def redescribe(dist: Path) -> Report:
    """Write report and manifest anew with the hashes of the artifact's files as they are now; the report."""
    report, manifest = load_report(dist), load_manifest(dist)
    artifacts = tuple(replace(a, files=tuple(file_info(dist, f.name) for f in a.files)) for a in report.artifacts)
    now = {f.name: f for a in artifacts for f in a.files}
    assert any(f != now[f.name] for a in report.artifacts for f in a.files), "nothing was changed"
    listed = tuple(replace(f, bytes=now[f.name].bytes, sha256=now[f.name].sha256) if f.name in now else f
                   for f in manifest.files)  # fmt: skip
    (dist / MANIFEST_NAME).write_bytes(dump_manifest(replace(manifest, files=listed)))
    forged = replace(report, artifacts=artifacts)
    (dist / REPORT_NAME).write_bytes(dump_report(forged))
    return forged
