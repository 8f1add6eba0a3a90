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
from needle_export.errors import BadInput
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

_FORMAT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class FileFacts:
    """The file itself; ``format`` is "safetensors", "cact" or "adapter"."""

    path_name: str
    bytes: int
    sha256: str
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
    """A file's facts; one of ``model`` and ``adapter`` is None."""

    file: FileFacts
    model: ModelFacts | None
    adapter: AdapterFacts | None


def inspect(spec: str, *, bits: float = 4.0, heads: Sequence[tuple[int, int]] = (), context: int = 1024,
            progress: Progress | None = None) -> Inspection:
    """Reads a checkpoint, a container or an adapter and says what is in it.

    Args:
        spec: a path or ``hf:<owner>/<repo>[/<file>]``.
        bits: a width to compute sizes for, besides 16.
        heads: head widths (qk, v) to compute the cost of.
        context: tokens for the size of the caches.
        progress: told about the stages.

    Raises:
        BadInput: when the file is none of the three, or damaged.
        UsageError: when a width or the context can't be.
        Unsupported: when an ``hf:`` file can't be fetched.
    """
    progress = progress or NullProgress()
    with progress.stage("find the file"):
        path = resolve(spec)
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


def _is_adapter(path: Path) -> bool:
    """Whether the file is a LoRA adapter; damaged files are left for the readers to explain."""
    try:
        data = map_file(path)
        return not is_container(data) and any(n.startswith("lora/") for n in parse_header(data).records)
    except BadInput:
        return False
