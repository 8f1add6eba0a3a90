"""The ``.cact`` container: header words, codebooks, directory, and every check on them.

All little-endian: 49 header words (the last a float32), the codebooks, a directory of 44-byte records,
then 64-byte aligned blobs in a fixed order. Format: the public cactus-needle package,
``needle.model.export``. Nothing in a file is believed before it is compared with the file's size and
with what the geometry implies; dequantised arrays are made on access only.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.cq import MAX_GROUP, MIN_GROUP, PackedTensor, has_invalid_crumbs, row_bytes
from needle_export.checkpoint.dimensions import ENGRAM_CONV_TAPS, Geometry, HeadGeometry
from needle_export.checkpoint.loaded import Checkpoint, Permutations, Source, standard_permutations
from needle_export.checkpoint.tokenizer import parse_tokenizer
from needle_export.checkpoint.walk import (
    HEAD_CODES,
    MANIFEST,
    PERMUTATIONS,
    Content,
    Form,
    Slot,
    assemble,
    body_slots,
    content_name,
    head_slots,
)
from needle_export.errors import BadInput
from needle_export.weights.cq import TERNARY, padded
from needle_export.weights.cq import codebook as analytic_codebook

TAG = 0x05E12A84
NEEDLE2_TAG = 0x05E12A83
FP16, FP32, CQ, RAW = 1, 2, 3, 4
ALIGNMENT = 64

HEADER_FIELDS = (
    "tag", "num_tensors", "codebook_len", "kv_window", "kv_bits", "vocab_size", "out_vocab", "d_model",
    "num_heads", "num_kv_heads", "num_layers", "qk_head_dim", "v_head_dim", "max_seq_len", "hada_n",
    "mhc_lanes", "sliding_window", "global_mask_lo", "global_mask_hi", "qkv_conv_taps", "engram_slots",
    "engram_sub_dim", "num_engram_tables", "engram_conv_taps", "engram_conv_dilation",
    "engram_seed_heads", "num_engram_orders", *(f"engram_orders[{i}]" for i in range(4)),
    "num_engram_sites", *(f"engram_sites[{i}]" for i in range(16)), "rope_theta",
)
"""Names of the header words in file order, as error messages use them."""

RECORD_FIELDS = ("dtype", "ndim", "pad", "shape[0]", "shape[1]", "shape[2]", "shape[3]", "offset", "nbytes",
                 "group_size", "bits")
"""Names of a directory record's fields in file order."""

HEADER_FORMAT = "<48If"
RECORD_FORMAT = "<BBHIIIIQQII"
HEADER_BYTES = struct.calcsize(HEADER_FORMAT)
RECORD_BYTES = struct.calcsize(RECORD_FORMAT)
CODEBOOK_WIDTHS = (2, 3, 4)
CODEBOOK_LEN = sum(1 << bits for bits in CODEBOOK_WIDTHS)

_MAX_LAYERS, _MAX_ORDERS, _MAX_SITES = 64, 4, 16
# Several times what 64 layers need; bounds the time a hostile directory can take.
_MAX_RECORDS = 1 << 13
_WHISTLE_MAGIC = 3246.0
_FETCH_AGAIN = "fetch the file again, it is damaged or cut off"
Header = Mapping[str, int]


@dataclass(frozen=True)
class Record:
    """One directory record; its blob lies inside the file and has the size its fields imply."""

    index: int
    dtype: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    group: int
    bits: int

    def refuse(self, field: str, what: str) -> BadInput:
        """The error that names this record and one of its fields."""
        return BadInput(f"{field} {what}", where=f"record {self.index} field {field}", fix=_FETCH_AGAIN)


def is_container(data: NDArray[np.uint8]) -> bool:
    """Whether the bytes begin with this format's tag, of any generation."""
    return len(data) >= 4 and int.from_bytes(data[:4].tobytes(), "little") >> 8 == TAG >> 8


def read_container(data: NDArray[np.uint8]) -> Checkpoint:
    """A checkpoint from the bytes of a container; the source's name and hash are left to the caller.

    Raises:
        BadInput: naming the header word or the record's field that can't be right; also for Needle 2 and
            Whistle files.
    """
    header, theta = _header(data)
    geometry = _geometry(header, theta)
    codebooks = _codebooks(data)
    records = _directory(data, header["num_tensors"])
    body = body_slots(geometry)
    if len(records) < len(body):
        raise _header_error("num_tensors", f"is {len(records)}, but this geometry has {len(body)} or more")
    model, tokenizer = _split_tokenizer(data, records, geometry)
    heads, extra = _heads(data, geometry, model[len(body):])
    slots = body + extra
    if len(model) != len(slots):
        raise _header_error("num_tensors", f"is {len(records)}, but this geometry has {len(slots)} records "
                            "beside the tokenizer")
    _require_one_group(model)
    contents = {slot: _content(data, record, slot, codebooks)
                for slot, record in zip(slots, model, strict=True)}
    permutations = _permutations(contents, geometry.hada_n)
    _require_no_embedding_bias(contents)
    geometry = dataclasses.replace(geometry, heads=heads,
                                   split_permutations=_is_split(permutations, geometry.hada_n))
    geometry.validate()
    tensors, packed = assemble(geometry, contents)
    source = Source(path_name="", sha256="", format="cact", file_bytes=len(data), random=False, step=None,
                    run={})
    return Checkpoint(geometry=geometry, tensors=tensors, permutations=permutations, packed=packed,
                      tokenizer=tokenizer, source=source, adapters=(), parent_layers=geometry.num_layers)


def _header(data: NDArray[np.uint8]) -> tuple[Header, float]:
    tag = int.from_bytes(data[:4].tobytes(), "little")
    if tag == NEEDLE2_TAG:
        raise BadInput("this is a Needle 2 container", where="header field tag",
                       fix="give a Needle 3 container")
    if tag != TAG:
        raise BadInput(f"tag is {tag:#010x}, which is no known generation", where="header field tag",
                       fix="give a Needle 3 container")
    if len(data) < HEADER_BYTES + 4 * CODEBOOK_LEN:
        raise BadInput(f"the file ends inside the header, after {len(data)} bytes", where="header",
                       fix=_FETCH_AGAIN)
    *words, theta = struct.unpack(HEADER_FORMAT, data[:HEADER_BYTES].tobytes())
    header = dict(zip(HEADER_FIELDS, words, strict=False))
    if header["codebook_len"] != CODEBOOK_LEN:
        raise _header_error("codebook_len", f"is {header['codebook_len']} instead of {CODEBOOK_LEN}")
    count = header["num_tensors"]
    if count > _MAX_RECORDS or _directory_end(count) > len(data):
        raise _header_error("num_tensors", f"is {count}, more than the file can hold")
    return header, theta


def _geometry(header: Header, theta: float) -> Geometry:
    for field, high in (("num_layers", _MAX_LAYERS), ("num_engram_orders", _MAX_ORDERS),
                        ("num_engram_sites", _MAX_SITES)):
        if header[field] > high:
            raise _header_error(field, f"is {header[field]}, more than {high}")
    for field in ("num_layers", "num_engram_orders"):
        if not header[field]:
            raise _header_error(field, "is 0")
    orders = tuple(header[f"engram_orders[{i}]"] for i in range(header["num_engram_orders"]))
    tables = header["num_engram_tables"]
    if not tables or tables % len(orders):
        raise _header_error("num_engram_tables", f"is {tables}, no multiple of {len(orders)} orders")
    mask = header["global_mask_lo"] | header["global_mask_hi"] << 32
    names = ("vocab_size", "out_vocab", "d_model", "num_heads", "num_kv_heads", "num_layers", "qk_head_dim",
             "v_head_dim", "max_seq_len", "mhc_lanes", "sliding_window", "qkv_conv_taps", "engram_slots",
             "engram_sub_dim", "engram_seed_heads", "kv_window", "kv_bits")
    geometry = Geometry(
        rope_theta=float(theta), engram_orders=orders, engram_heads=tables // len(orders),
        global_layers=tuple(i for i in range(header["num_layers"]) if mask >> i & 1),
        engram_layers=tuple(header[f"engram_sites[{i}]"] for i in range(header["num_engram_sites"])),
        ladder_order=(), split_permutations=False, pad_token_id=0, heads=(),
        **{name: header[name] for name in names})
    try:
        geometry.validate()
    except BadInput as error:
        raise BadInput(error.what, where=f"header field {error.where}", fix=_FETCH_AGAIN) from None
    for field, expected in (("hada_n", geometry.hada_n), ("engram_conv_taps", ENGRAM_CONV_TAPS),
                            ("engram_conv_dilation", geometry.engram_dilation)):
        if header[field] != expected:
            raise _header_error(field, f"is {header[field]}, but the other fields make it {expected}")
    return geometry


def _header_error(field: str, what: str) -> BadInput:
    return BadInput(f"{field} {what}", where=f"header field {field}", fix=_FETCH_AGAIN)


def _directory_end(records: int) -> int:
    return HEADER_BYTES + 4 * CODEBOOK_LEN + records * RECORD_BYTES


def _codebooks(data: NDArray[np.uint8]) -> dict[int, NDArray[np.float32]]:
    levels = data[HEADER_BYTES:HEADER_BYTES + 4 * CODEBOOK_LEN].view("<f4").copy()
    levels.flags.writeable = False
    books: dict[int, NDArray[np.float32]] = {}
    start = 0
    for bits in CODEBOOK_WIDTHS:
        books[bits] = levels[start:start + (1 << bits)]
        start += 1 << bits
        # Levels are coordinates of unit vectors, in rising order.
        if not (np.all(np.abs(books[bits]) <= 1) and np.all(books[bits][1:] > books[bits][:-1])):
            raise BadInput(f"the {bits}-bit codebook isn't a rising list of numbers between -1 and 1",
                           where="codebooks", fix=_FETCH_AGAIN)
    return books


def _directory(data: NDArray[np.uint8], count: int) -> list[Record]:
    start, end = _directory_end(0), _directory_end(count)
    raw = data[start:end].tobytes()
    records = [_record(index, fields, end, len(data))
               for index, fields in enumerate(struct.iter_unpack(RECORD_FORMAT, raw))]
    position = end
    for record in sorted(records, key=lambda item: item.offset):
        if record.offset < position:
            raise record.refuse("offset", f"is {record.offset}, inside another tensor")
        if record.offset - position >= ALIGNMENT:
            raise record.refuse("offset", f"is {record.offset}, but the data before it end at {position}")
        position = record.offset + record.nbytes
    if len(data) - position >= ALIGNMENT:
        raise _header_error("num_tensors", f"is {count}, but {len(data) - position} bytes follow its last")
    return records


def _record(index: int, fields: tuple[int, ...], first: int, file_bytes: int) -> Record:
    dtype, ndim, _, *sizes, offset, nbytes, group, bits = fields
    record = Record(index, dtype, tuple(sizes[:ndim]), offset, nbytes, group, bits)
    if dtype not in (FP16, FP32, CQ, RAW):
        raise record.refuse("dtype", f"is {dtype}, which is none of 1 to 4")
    if ndim > 4 or (dtype == CQ and ndim != 2) or (dtype == RAW and ndim):
        raise record.refuse("ndim", f"is {ndim}, impossible for dtype {dtype}")
    for axis, size in enumerate(sizes[ndim:], start=ndim):
        if size:
            raise record.refuse(f"shape[{axis}]", f"is {size}, past the {ndim} axes in use")
    if offset % ALIGNMENT or not first <= offset <= file_bytes:
        raise record.refuse("offset", f"is {offset}, no multiple of {ALIGNMENT} between {first} and the end "
                            f"at {file_bytes}")
    if nbytes > file_bytes - offset:
        raise record.refuse("nbytes", f"is {nbytes}, past the end of the file at {file_bytes}")
    needed = nbytes if dtype == RAW else _blob_bytes(record)
    if nbytes != needed:
        raise record.refuse("nbytes", f"is {nbytes}, but the shape {list(record.shape)} takes {needed}")
    return record


def _blob_bytes(record: Record) -> int:
    if record.dtype != CQ:
        return math.prod(record.shape) * (2 if record.dtype == FP16 else 4)
    if record.bits not in (1, 2, 3, 4, TERNARY):
        raise record.refuse("bits", f"is {record.bits}, which is none of 1 to 5")
    group = record.group
    if not MIN_GROUP <= group <= MAX_GROUP or group & (group - 1):
        raise record.refuse("group_size", f"is {group}, no power of two from {MIN_GROUP} to {MAX_GROUP}")
    out, in_dim = record.shape
    in_pad = padded(in_dim, group)
    return out * (row_bytes(in_pad, record.bits) + 2 * in_pad // group)


def _split_tokenizer(data: NDArray[np.uint8], records: Sequence[Record],
                     geometry: Geometry) -> tuple[Sequence[Record], bytes | None]:
    for record in records[:-1]:
        if record.dtype == RAW:
            raise record.refuse("dtype", "says raw bytes, which only the last record may be")
    last = records[-1]
    if last.dtype != RAW:
        return records, None
    blob = data[last.offset:last.offset + last.nbytes].tobytes()
    pieces = len(parse_tokenizer(blob).pieces)
    if pieces > geometry.vocab_size:
        raise BadInput(f"it has {pieces} pieces, more than vocab_size {geometry.vocab_size}",
                       where="tokenizer", fix=_FETCH_AGAIN)
    return records[:-1], blob


def _heads(data: NDArray[np.uint8], geometry: Geometry, records: Sequence[Record],
           ) -> tuple[tuple[HeadGeometry, ...], list[Slot]]:
    """The probe heads that the records after the final norm describe, and their places."""
    for record in records:
        if record.dtype == FP32 and record.shape == (13,) and _floats(data, record)[0] == _WHISTLE_MAGIC:
            raise BadInput("this is a Whistle (audio) container", where=f"record {record.index}",
                           fix="give a Needle 3 text container")
    if not records:
        return (), []
    manifest, rest = records[0], list(records[1:])
    if manifest.dtype not in (FP16, FP32):
        raise manifest.refuse("dtype", "isn't that of the list of probe heads")
    if len(manifest.shape) != 1 or not 1 <= manifest.shape[0] <= len(HEAD_CODES):
        raise manifest.refuse("shape[0]", f"makes {list(manifest.shape)} of the list of probe heads")
    codes = [float(code) for code in _floats(data, manifest)]
    if codes != sorted(set(codes)) or not set(codes) <= set(HEAD_CODES):
        raise BadInput(f"the list of probe heads is {codes}", where=f"record {manifest.index}",
                       fix=_FETCH_AGAIN)
    heads: list[HeadGeometry] = []
    slots = [Slot(MANIFEST, manifest.shape, Form.AUXILIARY)]
    for code in codes:
        name = HEAD_CODES[int(code)]
        if len(rest) < 6:
            raise _header_error("num_tensors", f"leaves {len(rest)} records for the {name} head")
        probes, gain, query, _, proj, _ = rest[:6]
        for record in (gain, query, proj):
            if len(record.shape) != 2:
                raise record.refuse("ndim", f"is {len(record.shape)} instead of 2")
        head = HeadGeometry(name, gain.shape[1], query.shape[0], proj.shape[0])
        head.validate()
        places = head_slots(geometry, head, stacked_probes=len(probes.shape) == 3)
        heads.append(head)
        slots += places
        rest = rest[len(places):]
    return tuple(heads), slots


def _require_one_group(records: Sequence[Record]) -> None:
    # The header's codebooks are scaled for one group size, so a second one has no codebook.
    quantized = [record for record in records if record.dtype == CQ]
    for record in quantized:
        if record.group != quantized[0].group:
            raise record.refuse("group_size", f"is {record.group}, but the file began with "
                                f"{quantized[0].group}")


def _content(data: NDArray[np.uint8], record: Record, slot: Slot,
             codebooks: Mapping[int, NDArray[np.float32]]) -> Content:
    if record.shape != slot.shape:
        differing = [i for i, (a, b) in enumerate(zip(record.shape, slot.shape, strict=False)) if a != b]
        field = f"shape[{differing[0]}]" if differing else "ndim"
        raise BadInput(f"{slot.label} has shape {list(record.shape)}, but the header makes it "
                       f"{list(slot.shape)}", where=f"record {record.index} field {field}", fix=_FETCH_AGAIN)
    if record.dtype != CQ:
        if slot.tensor in PERMUTATIONS and record.dtype != FP32:
            raise record.refuse("dtype", f"is {record.dtype}, but {slot.label} is float32")
        return _floats(data, record)
    if not slot.quantizable:
        raise record.refuse("dtype", f"says codebook weights, but {slot.label} is none")
    out, in_dim = record.shape
    row = row_bytes(padded(in_dim, record.group), record.bits)
    split = record.offset + out * row
    packed = data[record.offset:split].reshape(out, row)
    norms = data[split:record.offset + record.nbytes].view("<f2").reshape(out, -1)
    if record.bits == TERNARY and has_invalid_crumbs(packed):
        raise BadInput(f"{slot.label} holds a ternary code that names no level",
                       where=f"record {record.index}", fix=_FETCH_AGAIN)
    codebook = codebooks.get(record.bits)
    if codebook is None:
        codebook = analytic_codebook(record.bits, record.group)
    return PackedTensor(content_name(slot), (out, in_dim), record.bits, record.group, packed, norms, codebook)


def _floats(data: NDArray[np.uint8], record: Record) -> NDArray[np.floating]:
    blob = data[record.offset:record.offset + record.nbytes]
    values: NDArray[np.floating] = blob.view("<f2" if record.dtype == FP16 else "<f4").reshape(record.shape)
    return values


def _permutations(contents: Mapping[Slot, Content], n: int) -> Permutations:
    found: list[NDArray[np.int64]] = []
    for name in PERMUTATIONS:
        values = contents[Slot(name, (n,), Form.AUXILIARY)]
        assert isinstance(values, np.ndarray)
        if not np.array_equal(np.sort(values), np.arange(n, dtype=np.float32)):
            raise BadInput(f"it isn't a permutation of {n} channels", where=name, fix=_FETCH_AGAIN)
        found.append(values.astype(np.int64))
    return found[0], found[1]


def _require_no_embedding_bias(contents: Mapping[Slot, Content]) -> None:
    # The container has room for a bias that the head itself lacks; writers fill it with zeros.
    for slot, content in contents.items():
        if slot.tensor == "embedding_head/proj/bias" and np.any(np.asarray(content)):
            raise BadInput("it isn't zero, but the embedding head has no bias", where=slot.tensor,
                           fix=_FETCH_AGAIN)


def _is_split(permutations: Permutations, n: int) -> bool:
    def same(split: bool) -> bool:
        return all(np.array_equal(a, b)
                   for a, b in zip(permutations, standard_permutations(n, split), strict=True))

    return same(True) and not same(False)
