"""What a file is and where its bytes go, without exporting anything.

``inspect`` is to the inspect command what the pipeline is to build: it calls the stages in order and
hands their answers on as one value, which report/inspection_text.py shows to people.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needle_export.checkpoint.adapter import Adapter, read_adapter
from needle_export.checkpoint.checkpoint import Checkpoint, read_checkpoint
from needle_export.checkpoint.container import is_container
from needle_export.checkpoint.files import map_file
from needle_export.checkpoint.layout import ROLES, parameter_count, role_of
from needle_export.checkpoint.resolve import resolve
from needle_export.checkpoint.safetensors_file import parse_header
from needle_export.config.progress import NullProgress, Progress
from needle_export.errors import BadInput, UsageError
from needle_export.measure.ledger import (
    FULL_BITS,
    HeadShape,
    Part,
    Rung,
    byte_ledger,
    head_shapes_table,
    kv_cache_bytes,
    ledger_from_parts,
    rung_sizes,
)

PACKAGE_SUFFIX = ".mlpackage"
"""What names of Core ML packages end in."""

_FORMAT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class FileFacts:
    """The file itself; ``format`` is "safetensors", "cact", "adapter" or "mlpackage", a folder, which has no hash."""

    path_name: str
    bytes: int
    sha256: str | None
    format: str
    random: bool


@dataclass(frozen=True)
class ModelFacts:
    """What a checkpoint or a container holds.

    Attributes:
        geometry: every number of the model.
        layers: depth.
        parameters: trained ones.
        heads: names of the probe heads.
        stored: bytes of this file by role, and ``overhead`` for the rest; sums to the file's bytes.
        bits: the width that ``ledger``, ``rungs`` and ``head_shapes`` are computed for.
        ledger: bytes by role at that width.
        ledger_16: bytes by role at 16 bits.
        rungs: every depth of the ladder at that width.
        rungs_16: the same at 16 bits.
        context: tokens that the key/value caches are computed for.
        kv_cache_bytes: their size with 16-bit elements.
        head_shapes: what other head widths would cost; empty when none were asked for.
    """

    geometry: dict[str, Any]
    layers: int
    parameters: int
    heads: tuple[str, ...]
    stored: dict[str, int]
    bits: float
    ledger: dict[str, int]
    ledger_16: dict[str, int]
    rungs: tuple[Rung, ...]
    rungs_16: tuple[Rung, ...]
    context: int
    kv_cache_bytes: int
    head_shapes: tuple[HeadShape, ...]


@dataclass(frozen=True)
class AdapterFacts:
    """What a LoRA adapter holds; ``parameters`` are those of its matrices, by role of what they change."""

    rank: int
    scale: float
    base: str | None
    targets: tuple[str, ...]
    parameters: int
    parameters_by_role: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """A file's facts; one of ``model``, ``adapter`` and ``package`` is there.

    Attributes:
        package: of a Core ML package, as ``targets.coreml.evaluate.describe`` gives it; docs/report.md has its keys.
    """

    file: FileFacts
    model: ModelFacts | None
    adapter: AdapterFacts | None
    package: dict[str, Any] | None = None


def inspect(spec: str, *, bits: float = 4.0, heads: Sequence[tuple[int, int]] = (), context: int = 1024,
            progress: Progress | None = None) -> Inspection:
    """Reads a checkpoint, a container, an adapter or a Core ML package and says what is in it.

    Args:
        spec: a path, also of a folder that holds one Core ML package, ``demo`` or ``hf:<owner>/<repo>[/<file>]``.
        bits: a width to compute sizes for, besides 16.
        heads: head widths (qk, v) to compute the cost of.
        context: tokens for the size of the caches.
        progress: told about the stages.

    Raises:
        BadInput: when the file is none of these, or damaged.
        UsageError: when a width or the context can't be, or a folder holds several packages.
        Unsupported: when an ``hf:`` file can't be fetched, or a package holds no ML program.
    """
    progress = progress or NullProgress()
    with progress.stage("find the file"):
        path = resolve(spec)
    package = _package_at(path)
    if package is not None:
        with progress.stage("read the package"):
            return _inspect_package(package)
    if _is_adapter(path):
        adapter = read_adapter(path)
        facts = FileFacts(adapter.path_name, path.stat().st_size, adapter.sha256, "adapter", random=False)
        return Inspection(facts, None, _adapter_facts(adapter))
    with progress.stage("read the file", path.stat().st_size if path.is_file() else None) as task:
        done = 0

        def advance(position: int, _: int) -> None:
            nonlocal done
            task.advance(position - done)
            done = position

        checkpoint = read_checkpoint(path, progress=advance)
    source = checkpoint.source
    facts = FileFacts(source.path_name, source.file_bytes, source.sha256, source.format, source.random)
    return Inspection(facts, _model_facts(checkpoint, bits, heads, context), None)


def stored_ledger(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of the checkpoint's own file by role; ``overhead`` is what is no weight: headers, padding,
    codebooks, permutations, a tokenizer."""
    by_role, overhead = ledger_from_parts(_stored_parts(checkpoint), checkpoint.source.file_bytes)
    return {**by_role, "overhead": overhead}


def _stored_parts(checkpoint: Checkpoint) -> list[Part]:
    parts: list[Part] = []
    packed: dict[str, int] = {}
    for name, matrix in checkpoint.packed.items():
        base = name.partition("#")[0]
        packed[base] = packed.get(base, 0) + math.prod(matrix.shape)
        parts.append((matrix.nbytes, [(role_of(base), 1)]))
    for name, entry in checkpoint.store.shapes().items():
        # A stacked tensor may have some layers quantised and some not.
        rest = math.prod(entry) - packed.get(name, 0)
        if rest:
            width = _FORMAT_BYTES.get(checkpoint.entry(name).stored, _FORMAT_BYTES["float16"])
            parts.append((rest * width, [(role_of(name), 1)]))
    return parts


def _model_facts(checkpoint: Checkpoint, bits: float, heads: Sequence[tuple[int, int]],
                 context: int) -> ModelFacts:
    g = checkpoint.geometry
    return ModelFacts(
        geometry=g.as_dict(), layers=g.num_layers, parameters=parameter_count(g),
        heads=tuple(head.name for head in g.heads), stored=stored_ledger(checkpoint), bits=bits,
        ledger=byte_ledger(g, bits), ledger_16=byte_ledger(g), rungs=tuple(rung_sizes(g, bits)),
        rungs_16=tuple(rung_sizes(g, FULL_BITS)), context=context,
        kv_cache_bytes=kv_cache_bytes(g, context),
        head_shapes=tuple(head_shapes_table(g, heads, bits, context=context)))


def _adapter_facts(adapter: Adapter) -> AdapterFacts:
    by_role = dict.fromkeys(ROLES, 0)
    for name, (a, b) in adapter.pairs.items():
        try:
            by_role[role_of(name)] += a.size + b.size
        except KeyError:
            raise BadInput("the adapter changes a tensor that no Needle 3 model has", where=name,
                           fix="give an adapter tuned on Needle 3") from None
    return AdapterFacts(rank=adapter.rank, scale=adapter.scale, base=adapter.base,
                        targets=tuple(sorted(adapter.pairs)), parameters=sum(by_role.values()),
                        parameters_by_role={role: count for role, count in by_role.items() if count})


def _package_at(path: Path) -> Path | None:
    """The Core ML package that a path names: the folder itself, or the only one in it."""
    if not path.is_dir():
        return None
    if path.suffix == PACKAGE_SUFFIX or (path / "Manifest.json").is_file():
        return path
    found = sorted(p.name for p in path.glob(f"*{PACKAGE_SUFFIX}"))
    if len(found) > 1:
        raise UsageError(f"the folder holds {len(found)} packages", where=str(path),
                         fix=f"name one of them: {', '.join(found)}")
    return path / found[0] if found else None


def _inspect_package(path: Path) -> Inspection:
    from needle_export.targets.coreml.inspect import describe_package

    described = describe_package(path)
    stored = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    random = described["metadata"].get("needle.checkpoint.random") == "true"
    return Inspection(FileFacts(path.resolve().name, stored, None, "mlpackage", random), None, None, described)


def _is_adapter(path: Path) -> bool:
    """Whether the file is a LoRA adapter; damaged files are left for the readers to explain."""
    try:
        data = map_file(path)
        return not is_container(data) and any(n.startswith("lora/") for n in parse_header(data).records)
    except BadInput:
        return False
