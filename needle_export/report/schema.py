"""The report: everything a build knows about what it made, as frozen values and as JSON.

docs/report.md describes every field for readers of the JSON; a test keeps the two in step. The values
are pure: no stage of the pipeline is imported here, so a report can be read without any of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from needle_export.errors import BadInput
from needle_export.report.codec import decode, parse_json, read_file, to_json
from needle_export.report.elsewhere import ImportedLatency, LatencyEstimate
from needle_export.report.evaluation import Evaluation
from needle_export.report.measured import Latency, Memory
from needle_export.report.sizes import Size, check_naturals

SCHEMA = 5
"""The version of the schema that this package writes and reads."""

TOOL = "needle-export"
"""The name of the program that reports are of."""

REPORT_NAME = "report.json"
"""The report's file name inside a published folder."""

Status = Literal["verified-on-runtime", "verified-by-evaluator", "converted-only"]
"""How far an artifact was proven: in the runtime it is for, in our own evaluator, or not at all."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Tool:
    """The program that made the report."""

    name: str
    version: str


@dataclass(frozen=True)
class AdapterInfo:
    """A LoRA file that was merged in: file name without folder, SHA-256 in hex."""

    path_name: str
    sha256: str

    def __post_init__(self) -> None:
        _check_sha256(self.sha256)


@dataclass(frozen=True)
class CheckpointInfo:
    """What the build started from, after slicing and merging.

    ``layers`` and ``geometry`` are those of the model in the artifacts, ``parent_layers`` is the depth
    of the file. ``random`` weights mean nothing and every view says so.
    """

    path_name: str
    sha256: str
    format: str
    random: bool
    geometry: dict[str, Any]
    layers: int
    parent_layers: int
    parameters: int
    lora: tuple[AdapterInfo, ...] = ()
    dropped_heads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_sha256(self.sha256)
        check_naturals({"layers": self.layers, "parent_layers": self.parent_layers,
                         "parameters": self.parameters})


@dataclass(frozen=True)
class FileInfo:
    """One file of an artifact; ``name`` is relative to the report's folder, with forward slashes."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        # Verification opens these, so a report must not be able to point out of its own folder.
        if not self.name or "\\" in self.name or "\0" in self.name or path.is_absolute() \
                or ".." in path.parts or str(path) != self.name or self.name == REPORT_NAME:
            raise ValueError(f"{self.name[:80]!r} isn't the name of a file inside the report's folder")
        check_naturals({"bytes": self.bytes})
        _check_sha256(self.sha256)


@dataclass(frozen=True)
class LeftUnfused:
    """A place that a fusion looked at and left; ``layer`` is None outside the stack."""

    layer: int | None
    node: str
    reason: str


@dataclass(frozen=True)
class Fusion:
    """How often one fused op was expected, how often it was made, and the places that were left."""

    expected: int
    fused: int
    left: tuple[LeftUnfused, ...] = ()

    def __post_init__(self) -> None:
        check_naturals({"expected": self.expected, "fused": self.fused})


@dataclass(frozen=True)
class Nodes:
    """Graph nodes of each phase; ``by_op`` splits decode by operator. None: there is no such graph."""

    prefill: int | None
    decode: int
    by_op: dict[str, int]

    def __post_init__(self) -> None:
        check_naturals(self.by_op)
        check_naturals({"prefill": self.prefill or 0, "decode": self.decode})
        if self.by_op and sum(self.by_op.values()) != self.decode:
            raise ValueError(f"by_op makes {sum(self.by_op.values())} nodes, but decode has {self.decode}")


@dataclass(frozen=True)
class StateBytes:
    """What a decoding session keeps between steps at the built context, by part."""

    total_bytes: int
    by_part: dict[str, int]

    def __post_init__(self) -> None:
        check_naturals(self.by_part)
        if sum(self.by_part.values()) != self.total_bytes:
            raise ValueError(f"the parts make {sum(self.by_part.values())} bytes, not {self.total_bytes}")


@dataclass(frozen=True)
class KeptFloat:
    """A weight that the scheme left in floating point, and why."""

    name: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class LeftToRuntime:
    """Ops of one kind that a delegate left to the runtime's own kernels; ``splits`` of them cut the graph."""

    op: str
    count: int
    splits: int

    def __post_init__(self) -> None:
        check_naturals({"count": self.count, "splits": self.splits})


@dataclass(frozen=True)
class Signature:
    """One entry of a file with several: its ops, and the partitions that a delegate makes of them."""

    ops: int
    delegate: str
    partitions: int
    delegated: int
    left: tuple[LeftToRuntime, ...]

    def __post_init__(self) -> None:
        check_naturals({"ops": self.ops, "partitions": self.partitions, "delegated": self.delegated})


@dataclass(frozen=True)
class RuntimeCheck:
    """What became of an artifact in one runtime.

    Attributes:
        runtime, version: which.
        loaded: whether it opened the artifact; None where that wasn't tried.
        reproduced: whether it gave the reference's results; None where it couldn't run.
        max_abs: largest logit deviation there, None where it couldn't run.
        reason: why it was not tried, doesn't load or deviates; empty where all is well.
    """

    runtime: str
    version: str
    loaded: bool | None
    reproduced: bool | None
    max_abs: float | None
    reason: str


@dataclass(frozen=True)
class LintNote:
    """Something that public sources say a delegate won't take; read off the file, never run."""

    rule: str
    op: str
    count: int
    why: str
    source: str


@dataclass(frozen=True)
class Artifact:
    """One exported model and what is known about it.

    ``parity`` (numbers of the comparison with the reference), ``io`` (the contract of inputs and
    outputs) and ``versions`` (of every library that had a part) are described in docs/report.md.
    """

    target: str
    weights: str
    status: Status
    files: tuple[FileInfo, ...]
    size: Size
    fusion: dict[str, Fusion]
    nodes: Nodes
    parity: dict[str, Any]
    state_bytes: StateBytes
    latency: Latency | None
    memory: Memory | None
    kept_float: tuple[KeptFloat, ...]
    notes: tuple[str, ...]
    io: dict[str, Any]
    versions: dict[str, str]
    signatures: dict[str, Signature] = field(default_factory=dict)
    runtimes: tuple[RuntimeCheck, ...] = ()
    gpu_lint: tuple[LintNote, ...] = ()
    estimates: tuple[LatencyEstimate, ...] = ()
    imported: tuple[ImportedLatency, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is listed twice")
        stored = sum(file.bytes for file in self.files)
        if stored != self.size.total_bytes:
            raise ValueError(f"the files have {stored} bytes, but size says {self.size.total_bytes}")


@dataclass(frozen=True)
class PlanInfo:
    """The recipe and the device that a build's options come from, by id, and what both hold it to.

    ``budgets`` are entries as docs/budgets.md describes them.
    """

    recipe: str | None
    device: str | None
    budgets: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Report:
    """A build's report. It carries no time stamp: the same input gives the same artifacts."""

    schema: int
    tool: Tool
    checkpoint: CheckpointInfo
    options: dict[str, Any]
    plan: PlanInfo | None
    artifacts: tuple[Artifact, ...]

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema is {self.schema}, not {SCHEMA}")


def dump_report(report: Report) -> bytes:
    """The report as UTF-8 JSON, the same bytes for the same report.

    Raises:
        ValueError: naming the key path, for a value that JSON can't hold (an infinity, say).
    """
    return to_json(report).encode()


def load_report(path: str | PathLike[str]) -> Report:
    """Reads a report from its file, or from the published folder that holds it.

    Raises:
        BadInput: when there is none, or when it isn't a report of this schema; names the key path.
    """
    file = Path(path)
    if file.is_dir():
        file = file / REPORT_NAME
    return parse_report(read_file(file, "report"), str(file))


def listed_files(path: str | PathLike[str]) -> frozenset[str]:
    """Names of the files that a report of this tool lists, whatever its schema.

    Only what every schema has is read, so that a folder of another version is known for what it is.

    Raises:
        BadInput: when there is no report, or when it isn't one of this tool.
    """
    file = Path(path)
    if file.is_dir():
        file = file / REPORT_NAME
    raw = _raw(read_file(file, "report"), str(file))
    tool = raw.get("tool")
    if not isinstance(tool, dict) or tool.get("name") != TOOL:
        raise BadInput("this isn't a report of needle-export", where=str(file))
    artifacts = raw.get("artifacts")
    files = [f for a in artifacts if isinstance(a, dict) and isinstance(a.get("files"), list) for f in a["files"]] \
        if isinstance(artifacts, list) else []
    names = (f.get("name") for f in files if isinstance(f, dict))
    return frozenset(name for name in names if isinstance(name, str))


def _raw(data: bytes, where: str) -> dict[str, Any]:
    """A report's JSON object with a schema that is a whole number."""
    try:
        raw = parse_json(data.decode("utf-8"), where)
    except UnicodeDecodeError:
        raise BadInput("this isn't UTF-8 text", where=where) from None
    if not isinstance(raw, dict) or type(raw.get("schema")) is not int:
        raise BadInput("this isn't a report of needle-export", where=where)
    return raw


def parse_report(data: bytes, where: str = REPORT_NAME) -> Report:
    """A report from its JSON bytes; ``where`` stands before the key path in errors.

    Raises:
        BadInput: as ``load_report``.
    """
    raw = _raw(data, where)
    version = raw["schema"]
    if version != SCHEMA:
        raise BadInput(f"the report has schema {version}, and this version reads {SCHEMA}",
                       where=f"{where}: schema", fix="build again, or use the version of needle-export that wrote it")
    try:
        return decode(Report, raw)
    except BadInput as error:
        raise BadInput(error.what, where=f"{where}: {error.where}" if error.where else where,
                       fix=error.fix) from None


def _check_sha256(value: str) -> None:
    if not _SHA256.fullmatch(value):
        raise ValueError(f"{value[:80]!r} isn't a SHA-256 in hex")
