"""The safetensors format, checked before it is believed, and the checkpoint layout inside it.

A file is an 8-byte little-endian header length, a JSON header, then the tensors' bytes. Every number
in the header is compared with the file's size before anything is made from it, and tensors are views
on the mapped file. Format: the safetensors project's description; metadata keys: the public
cactus-needle package, ``needle.model.checkpoints``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.config import geometry_from_config
from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.files import atomic_write
from needle_export.checkpoint.layout import check_tensors, is_ignored
from needle_export.checkpoint.loaded import Checkpoint, Source, standard_permutations
from needle_export.checkpoint.store import Array, Entry, TensorStore
from needle_export.errors import BadInput, UsageError

FORMAT_VERSION = 2

# A checkpoint needs about 10 kB of header at any size. Parsed JSON can take 24 times its text, so the cap
# keeps what a hostile header costs below the size of its file (beyond the first 64 kB).
_FREE_HEADER, _HEADER_SHARE, _MAX_HEADER = 1 << 16, 32, 4 << 20
_MAX_NAME = 256
_MAX_RANK = 8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
               "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_FLOATS = {"F16": ("float16", "float16"), "F32": ("float32", "float32"), "BF16": ("float32", "bfloat16")}
_CODES = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Record:
    """One header entry: dtype code, shape, and the byte range [start, stop) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A checked header: free-form metadata and the tensors in file order of their names."""

    metadata: dict[str, str]
    records: dict[str, Record]


def parse_header(data: NDArray[np.uint8]) -> Header:
    """The header of a safetensors file, every entry checked against the file's size.

    Args:
        data: the whole file, uint8 [file_bytes].

    Raises:
        BadInput: naming the entry, for anything the format doesn't allow, including gaps and overlaps.
    """
    if len(data) < 8:
        raise BadInput("this is neither a safetensors file nor a .cact container",
                       fix="give a Needle 3 checkpoint")
    length = int.from_bytes(data[:8].tobytes(), "little")
    begins_like_json = data[8:9].tobytes() == b"{"
    if length > len(data) - 8:
        if begins_like_json:
            raise BadInput(f"the header length is {length} bytes, but the file has {len(data) - 8} after it",
                           where="header", fix="fetch the file again, it looks cut off")
        raise BadInput("this is neither a safetensors file nor a .cact container",
                       fix="give a Needle 3 checkpoint")
    if not begins_like_json:
        raise BadInput("the header isn't a JSON object", where="header", fix="give a Needle 3 checkpoint")
    limit = min(_FREE_HEADER + len(data) // _HEADER_SHARE, _MAX_HEADER)
    if length > limit:
        raise BadInput(f"the header length is {length} bytes, more than the {limit} that so large a file can "
                       "need", where="header")
    raw = _json_object(data[8:8 + length].tobytes(), "header")
    metadata = _metadata(raw.pop("__metadata__", {}))
    body = 8 + length
    records = {name: _record(name, entry, body, len(data)) for name, entry in raw.items()}
    _check_cover(records, body, len(data))
    return Header(metadata, records)


def float_entry(data: NDArray[np.uint8], name: str, record: Record) -> Entry:
    """A store entry for a floating-point tensor: float16 and float32 as views, bfloat16 as float32.

    Raises:
        BadInput: for any other number format.
    """
    if record.dtype not in _FLOATS:
        raise BadInput(f"the number format is {record.dtype}, not F16, BF16 or F32", where=name)
    dtype, stored = _FLOATS[record.dtype]

    def make() -> Array:
        raw = data[record.start:record.stop]
        if record.dtype == "BF16":
            # A bfloat16 is the upper half of a float32.
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(record.shape)
        array = raw.view("<f2" if record.dtype == "F16" else "<f4").reshape(record.shape)
        return array if array.flags.aligned else array.copy()

    return Entry(record.shape, dtype, stored, make)


def read_safetensors(data: NDArray[np.uint8]) -> Checkpoint:
    """A checkpoint from the bytes of a safetensors file; the source's name and hash are left to the caller.

    Raises:
        BadInput: for a damaged header, another format version, generation or model, or a tensor that is
            missing, misshapen, unknown or not floating-point.
    """
    header = parse_header(data)
    if any(name.startswith("lora/") for name in header.records):
        raise BadInput("this is a LoRA adapter, not a checkpoint", fix="give it beside its checkpoint")
    meta = header.metadata
    version = _optional_int(meta, "format_version")
    if version != FORMAT_VERSION:
        found = "no format_version" if version is None else f"format_version {version}"
        raise BadInput(f"the file has {found}, but a Needle 3 checkpoint has {FORMAT_VERSION}",
                       where="format_version", fix="give a Needle 3 checkpoint")
    shapes = {name: record.shape for name, record in header.records.items()}
    geometry = geometry_from_config(_optional_object(meta, "config"), shapes)
    check_tensors(geometry, shapes)
    entries = {name: float_entry(data, name, record) for name, record in header.records.items()
               if not is_ignored(name)}
    run = _optional_object(meta, "run")
    source = Source(path_name="", sha256="", format="safetensors", file_bytes=len(data),
                    random=run.get("random") is True, step=_optional_int(meta, "step"), run=run)
    return Checkpoint(geometry=geometry, tensors=TensorStore(entries),
                      permutations=standard_permutations(geometry.hada_n, geometry.split_permutations),
                      packed={}, tokenizer=None, source=source, adapters=(),
                      parent_layers=geometry.num_layers)


def write_checkpoint(path: str | PathLike[str], geometry: Geometry, tensors: Mapping[str, Array], *,
                     step: int | None = None, run: Mapping[str, Any] | None = None,
                     dtype: str = "float16", metadata: Mapping[str, str] | None = None) -> None:
    """Writes a checkpoint that every reader of the format accepts; whole or not at all.

    The same input gives the same bytes. ``dtype`` is the number format of all tensors: "float16",
    "float32" or "bfloat16". ``metadata`` adds keys beside the format's own.

    Raises:
        BadInput: when the tensors don't fit the geometry, or a value has no finite form in ``dtype``.
        UsageError: for an unknown ``dtype``, or when the place can't be written.
    """
    if dtype not in _CODES:
        raise UsageError(f"{dtype!r} isn't one of {', '.join(_CODES)}", where="dtype")
    geometry.validate()
    check_tensors(geometry, {name: array.shape for name, array in tensors.items()})
    meta = dict(metadata or {})
    meta.update(format_version=str(FORMAT_VERSION), config=json.dumps(geometry.to_config(), sort_keys=True),
                step="" if step is None else str(step), run=json.dumps(dict(run or {}), sort_keys=True))
    write_tensors(path, tensors, meta, dtype=dtype)


def write_tensors(path: str | PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str], *,
                  dtype: str) -> None:
    """Writes any named tensors in one number format, ordered by name; see ``write_checkpoint``."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    cast = _caster(dtype)
    position = 0
    for name in sorted(tensors):
        size = math.prod(tensors[name].shape) * _ITEM_BYTES[_CODES[dtype]]
        header[name] = {"dtype": _CODES[dtype], "shape": list(tensors[name].shape),
                        "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(Path(path)) as handle:
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(text)
        for name in sorted(tensors):
            handle.write(cast(name, tensors[name]).tobytes())


def _caster(dtype: str) -> Callable[[str, Array], Array]:
    if dtype == "bfloat16":
        import ml_dtypes  # only this format needs it

        target = np.dtype(ml_dtypes.bfloat16)
    else:
        target = np.dtype(dtype).newbyteorder("<")

    def cast(name: str, array: Array) -> Array:
        with np.errstate(over="ignore"):
            out = np.ascontiguousarray(array).astype(target)
        if not np.isfinite(out.astype(np.float32)).all():
            raise BadInput(f"a value has no finite form in {dtype}", where=name)
        return out

    return cast


def _metadata(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise BadInput("__metadata__ isn't an object", where="header")
    for key, value in raw.items():
        if not isinstance(value, str):
            raise BadInput(f"__metadata__ {key[:40]!r} isn't text", where="header")
    return raw


def _record(name: str, raw: object, body: int, file_bytes: int) -> Record:
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise BadInput(f"a tensor has the impossible name {name[:40]!r}", where="header")
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise BadInput("the header entry needs exactly dtype, shape and data_offsets", where=name)
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise BadInput(f"dtype is {str(dtype)[:40]!r}, which is no number format", where=name)
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise BadInput("shape isn't a list of at most 8 whole numbers", where=name)
    if not _naturals(offsets) or len(offsets) != 2:
        raise BadInput("data_offsets isn't a pair of whole numbers", where=name)
    start, stop = body + offsets[0], body + offsets[1]
    if stop > file_bytes or start > stop:
        raise BadInput(f"data_offsets {offsets[0]} to {offsets[1]} lie outside the {file_bytes - body} bytes "
                       "of data", where=name, fix="fetch the file again, it may be cut off")
    size = math.prod(shape) * _ITEM_BYTES[dtype]
    if size != stop - start:
        raise BadInput(f"data_offsets span {stop - start} bytes, but shape and dtype need {size}"
                       if size < 1 << 63 else "shape is impossibly large", where=name)
    return Record(dtype, tuple(shape), start, stop)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(records: Mapping[str, Record], body: int, file_bytes: int) -> None:
    position = body
    for name, record in sorted(records.items(), key=lambda item: (item[1].start, item[1].stop)):
        if record.start < position:
            raise BadInput("data_offsets overlap another tensor's", where=name)
        if record.start > position:
            raise BadInput(f"data_offsets leave a gap of {record.start - position} bytes before it",
                           where=name)
        position = record.stop
    if position != file_bytes:
        raise BadInput(f"{file_bytes - position} bytes follow the last tensor", where="header",
                       fix="fetch the file again")


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add returns None, so the test is "seen before"
            raise BadInput(f"{twice[:40]!r} appears twice", where=where)
        return out

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise BadInput("the text isn't UTF-8", where=where) from None
    except RecursionError:
        raise BadInput("the JSON is nested too deeply", where=where) from None
    except ValueError:
        raise BadInput("the text isn't valid JSON", where=where) from None
    if not isinstance(value, dict):
        raise BadInput("the JSON isn't an object", where=where)
    return value


def _optional_object(meta: Mapping[str, str], key: str) -> dict[str, Any]:
    text = meta.get(key, "")
    return _json_object(text.encode("utf-8", "surrogatepass"), key) if text else {}


def _optional_int(meta: Mapping[str, str], key: str) -> int | None:
    text = meta.get(key, "")
    if not text:
        return None
    # Eighteen digits hold any count that fits 64 bits and keep parsing cheap.
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise BadInput(f"{key} is {text[:40]!r}, not a whole number", where=key)
    return int(text)
