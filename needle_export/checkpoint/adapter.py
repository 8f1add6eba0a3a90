"""LoRA adapters: small files of matrix pairs that change a checkpoint's linear kernels.

A file holds ``lora/<tensor>/A`` [..., in, r] and ``lora/<tensor>/B`` [..., r, out] for stacked kernels
[..., in, out] and, in its metadata, scale, rank and base as JSON. Merging is ``W + scale * A @ B``.
Layout and formula: the public cactus-needle package, ``needle.model.checkpoints`` and ``.finetune``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.files import map_file, naming, sha256_of
from needle_export.checkpoint.loaded import Checkpoint
from needle_export.checkpoint.safetensors_file import float_entry, parse_header
from needle_export.checkpoint.store import Array, Entry
from needle_export.errors import BadInput

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A checked adapter file.

    Attributes:
        pairs: (A, B) by tensor name, float32 [..., in, r] and [..., r, out].
        scale: factor on A @ B.
        rank: r, the same for all pairs.
        base: the checkpoint it was tuned on, as its writer named it; informative only.
        path_name: the file's name, without its folder.
        sha256: of the file, hex.
    """

    pairs: Mapping[str, Pair]
    scale: float
    rank: int
    base: str | None
    path_name: str
    sha256: str


def read_adapter(path: str | PathLike[str]) -> Adapter:
    """Reads and checks an adapter file.

    Raises:
        BadInput: for a damaged file, a pair that is incomplete or misshapen, a missing scale, a Whistle
            adapter, or new embedding rows, which a Needle 3 merge has no use for.
    """
    file = Path(path)
    data = map_file(file)
    with naming(file.name):
        header = parse_header(data)
        meta = {key: _json(header.metadata, key) for key in ("scale", "rank", "base", "pieces", "languages")}
        if meta["languages"] is not None or meta["pieces"]:
            raise BadInput("this is a Whistle (audio) adapter: it has languages or vocabulary pieces",
                           where="metadata", fix="give an adapter tuned on Needle 3")
        if "rows" in header.records:
            raise BadInput("it adds embedding rows, as Whistle adapters do, and a Needle 3 merge would "
                           "leave them out", where="rows", fix="give an adapter tuned on Needle 3")
        entries = {name: float_entry(data, name, record) for name, record in header.records.items()}
        halves: dict[str, dict[str, NDArray[np.float32]]] = {}
        for name, entry in entries.items():
            target, half = _target(name)
            halves.setdefault(target, {})[half] = np.asarray(entry.make(), np.float32)
        if not halves:
            raise BadInput("it holds no lora/ tensors", fix="give an adapter written by needle finetune")
        pairs = {target: _pair(target, found) for target, found in halves.items()}
        rank = _rank(pairs, meta["rank"])
        scale, base = meta["scale"], meta["base"]
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise BadInput(f"scale is {str(scale)[:40]}, not a finite number", where="metadata scale")
        return Adapter(pairs=pairs, scale=float(scale), rank=rank,
                       base=base if isinstance(base, str) else None, path_name=file.name,
                       sha256=sha256_of(data))


def merge_lora(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The checkpoint with the adapter added to its kernels.

    The product is taken in float32 and rounded to the number format of the kernel before the sum, which
    is rounded to that format too (bfloat16 kernels are then float32 arrays again, exactly). Quantised
    matrices that change leave ``packed``: their codes no longer say what the tensor is.

    Raises:
        BadInput: when a target isn't a tensor of this checkpoint, isn't a kernel, or has another shape; and,
            when the merged tensor is made, if a value has no finite form.
    """
    store = checkpoint.store
    changes: dict[str, Entry | None] = {}
    for name, (a, b) in adapter.pairs.items():
        where = f"{adapter.path_name}: {name}"
        if name not in store:
            raise BadInput("the adapter changes a tensor that this checkpoint doesn't have", where=where,
                           fix="give the checkpoint it was tuned on")
        if not name.endswith("/kernel"):
            raise BadInput("the adapter changes a tensor that isn't a linear kernel", where=where,
                           fix="give an adapter written by needle finetune")
        entry = store.entry(name)
        made = (*a.shape[:-1], b.shape[-1])
        if made != entry.shape:
            raise BadInput(f"the adapter makes {list(made)}, but the checkpoint's tensor is "
                           f"{list(entry.shape)}", where=where, fix="give the checkpoint it was tuned on")
        changes[name] = _merged(checkpoint, name, (a, b), adapter.scale, adapter.path_name)
    packed = {key: value for key, value in checkpoint.packed.items()
              if key.partition("#")[0] not in changes}
    return dataclasses.replace(checkpoint, tensors=store.replaced(changes), packed=packed,
                               adapters=(*checkpoint.adapters, adapter.path_name))


def _merged(checkpoint: Checkpoint, name: str, pair: Pair, scale: float, adapter_name: str) -> Entry:
    entry = checkpoint.entry(name)
    stored = entry.stored if entry.stored in ("float16", "bfloat16") else "float32"

    def make() -> Array:
        weights = checkpoint.tensors[name]
        target = weights.dtype
        if stored == "bfloat16":
            import ml_dtypes  # only such checkpoints need it

            target = np.dtype(ml_dtypes.bfloat16)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = np.float32(scale) * np.matmul(*pair)
            merged: Array = (weights.astype(target) + delta.astype(target)).astype(entry.dtype)
        if not np.isfinite(merged).all():
            raise BadInput(f"merging {adapter_name} leaves values without a finite form in {stored}",
                           where=name, fix="check the adapter and its scale")
        return merged

    return Entry(entry.shape, entry.dtype, stored, make)


def _json(metadata: Mapping[str, str], key: str) -> Any:
    text = metadata.get(key, "")
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput("the text isn't valid JSON", where=f"metadata {key}") from None


def _target(name: str) -> tuple[str, str]:
    prefix, _, rest = name.partition("/")
    target, _, half = rest.rpartition("/")
    if prefix != "lora" or not target or half not in ("A", "B"):
        raise BadInput("this tensor has no place in an adapter", where=name,
                       fix="give an adapter written by needle finetune")
    return target, half


def _pair(target: str, halves: Mapping[str, NDArray[np.float32]]) -> Pair:
    for half in ("A", "B"):
        if half not in halves:
            raise BadInput(f"its {half} matrix is missing", where=f"lora/{target}")
    a, b = halves["A"], halves["B"]
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise BadInput(f"A {list(a.shape)} and B {list(b.shape)} can't be multiplied", where=f"lora/{target}")
    return a, b


def _rank(pairs: Mapping[str, Pair], declared: object) -> int:
    ranks = sorted({int(a.shape[-1]) for a, _ in pairs.values()})
    if len(ranks) != 1 or ranks[0] < 1:
        raise BadInput(f"its pairs have ranks {ranks}, not one", where="metadata rank")
    if declared is not None and declared != ranks[0]:
        raise BadInput(f"rank is {str(declared)[:40]}, but the matrices have {ranks[0]}",
                       where="metadata rank")
    return ranks[0]
