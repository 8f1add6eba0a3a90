"""What a build tells about an artifact, put together for its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from needle_export.checkpoint.files import file_sha256
from needle_export.config.options import BuildOptions
from needle_export.errors import VerificationFailed
from needle_export.measure.ledger import bytes_by_tensor, ledger_from_parts
from needle_export.report.schema import (
    Artifact,
    FileInfo,
    KeptFloat,
    LeftToRuntime,
    LintNote,
    Nodes,
    RuntimeCheck,
    Signature,
    StateBytes,
)
from needle_export.report.sizes import Size, TensorBytes
from needle_export.targets.base import Compiled, Target


def describe_artifact(
    target: Target,
    options: BuildOptions,
    folder: Path,
    compiler: Any,
    compiled: Compiled,
    packed: int,
    table: dict[str, Any],
    runtimes: tuple[RuntimeCheck, ...],
    dropped: tuple[str, ...],
    build_versions: dict[str, str],
) -> Artifact:
    """An artifact as the report has it: what compiling, verifying and reading its files told.

    Args:
        compiler: of the build; answers for rewrites and state.
        packed: bytes of the files in a zip archive.
        table: the comparison with the reference.
        build_versions: of what every build uses.
        dropped: heads that the merged adapter didn't train.
    """
    files = tuple(file_info(folder, name) for name in compiled.files)
    total = sum(f.bytes for f in files)
    by_role, overhead = ledger_from_parts(
        ((w.bytes, [(s.role, s.elements) for s in w.shares]) for w in compiled.weights if w.shares), total
    )
    tensors = bytes_by_tensor(
        ((w.bytes, w.shares) for w in compiled.weights if w.shares), compiler.checkpoint.geometry.num_layers
    )
    notes = list(compiled.notes) + compiler.notes()
    heads = [h.name for h in compiler.checkpoint.geometry.heads if h.name not in options.heads]
    if heads:
        notes.append(f"probe heads are not part of this artifact: {', '.join(heads)}")
    if dropped:
        notes.append(f"dropped after merging the adapter, which doesn't train it: {', '.join(dropped)} head")
    decode = compiled.nodes["decode"]
    prefills = [sum(ops.values()) for name, ops in compiled.nodes.items() if name.startswith("prefill")]
    facts = target.examine(folder)
    return Artifact(
        target=options.target,
        weights=str(options.schemes),
        status=target.status,
        files=files,
        size=Size(
            total,
            packed,
            by_role,
            overhead,
            tuple(TensorBytes(name, role, count, tuple(layers)) for name, role, count, layers in tensors),
        ),
        fusion=compiler.fusions(),
        nodes=Nodes(max(prefills, default=None), sum(decode.values()), decode),
        parity=table,
        state_bytes=StateBytes(*compiler.state_bytes()),
        latency=None,
        memory=None,
        kept_float=tuple(KeptFloat(w.name, w.bytes, w.kept_float) for w in compiled.weights if w.kept_float),
        notes=tuple(notes),
        io=compiled.io,
        versions={**compiled.versions, **build_versions},
        signatures={
            name: Signature(
                s.ops, s.delegate, s.partitions, s.delegated, tuple(LeftToRuntime(**asdict(x)) for x in s.left)
            )
            for name, s in facts.signatures.items()
        },
        runtimes=runtimes,
        gpu_lint=tuple(LintNote(**asdict(found)) for found in facts.lint),
    )


def file_info(folder: Path, name: str) -> FileInfo:
    """A file of a folder with its size and hash."""
    path = folder / name
    return FileInfo(name, path.stat().st_size, file_sha256(path))


def check_files(dist: Path, artifact: Artifact) -> None:
    """Whether a folder holds the files that its report describes.

    Raises:
        VerificationFailed: one is missing or isn't the same.
    """
    for file in artifact.files:
        check_file(dist, file, "report")


def check_file(dist: Path, file: FileInfo, listing: str) -> None:
    """Whether a folder holds a file as a listing of it says.

    Args:
        listing: what it is called: report or manifest.

    Raises:
        VerificationFailed: it is missing or isn't the same.
    """
    path = dist / file.name
    if not path.is_file():
        raise VerificationFailed(f"a file that the {listing} describes is missing", where=str(path),
                                 fix="build it again")
    if path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
        raise VerificationFailed(f"this is not the file that the {listing} describes", where=str(path),
                                 fix="build it again or copy it again")
