"""Writes ``.cact`` containers for tests: any width for any matrix, both layouts of the probe heads.

Independent of the reader's unpacking: indices are quantised by nearest level and packed bit by bit.
A test against the oracle holds this writer to the bytes of the package's own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import numpy as np

from needle_export.checkpoint.checkpoint import standard_permutations
from needle_export.checkpoint.geometry import Geometry
from needle_export.checkpoint.walk import HEAD_CODES, Form, Slot, body_slots, head_slots

TERNARY = 5
HEADER_FORMAT, RECORD_FORMAT = "<48If", "<BBHIIIIQQII"
Books = Mapping[int, np.ndarray]

# Levels of a unit normal, near the Lloyd-Max ones; the container's are divided by sqrt(group).
_LEVELS = {
    2: [-1.51, -0.4528, 0.4528, 1.51],
    3: [-2.152, -1.344, -0.756, -0.2451, 0.2451, 0.756, 1.344, 2.152],
    4: [-2.733, -2.069, -1.618, -1.256, -0.9424, -0.6568, -0.3881, -0.1284,
        0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


def rough_books(group: int) -> dict[int, np.ndarray]:
    """Codebooks of the header, float32, by width."""
    return {bits: (np.array(levels) / np.sqrt(group)).astype(np.float32) for bits, levels in _LEVELS.items()}


def quantize(matrix: np.ndarray, bits: int, group: int, books: Books) -> bytes:
    """Packed indices, then norms, of a [out, in] matrix."""
    if bits == 1:
        level = np.sqrt(2 / np.pi)
        book = (np.array([-level, level]) / np.sqrt(group)).astype(np.float32)
    elif bits == TERNARY:
        book = (np.array([-1.2240064, 0, 1.2240064]) / np.sqrt(group)).astype(np.float32)
    else:
        book = books[bits]
    out, in_dim = matrix.shape
    padded = np.pad(matrix.astype(np.float32), ((0, 0), (0, -in_dim % group)))
    groups = padded.reshape(out, -1, group)
    hadamard = np.array([[1.0]], np.float32)
    while len(hadamard) < group:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    rotated = groups @ (hadamard / np.sqrt(group)).astype(np.float32)
    norms = np.sqrt((rotated ** 2).sum(-1, keepdims=True))
    unit = rotated / np.maximum(norms, 1e-12)
    index = np.abs(unit[..., None] - book).argmin(-1).astype(np.uint8).reshape(out, -1)
    if bits == TERNARY:
        index = np.array([3, 0, 1], np.uint8)[index]
    width = 2 if bits == TERNARY else bits
    stream = np.unpackbits(index[..., None], axis=-1, count=width, bitorder="little").reshape(out, -1)
    return np.packbits(stream, axis=-1, bitorder="little").tobytes() + norms.astype(np.float16).tobytes()


def container_bytes(geometry: Geometry, tensors: Mapping[str, np.ndarray], *,
                    bits: int | Callable[[Slot], int] = 4, group: int = 128, books: Books | None = None,
                    tokenizer: bytes | None = None, float_heads: bool = False,
                    tail: tuple[tuple[int, tuple[int, ...], bytes], ...] = ()) -> bytes:
    """A whole container.

    ``bits`` is a width, or chooses one for each matrix (0 stores float16); probe heads are 4-bit, or all
    float16 with ``float_heads``. ``tail`` adds records (dtype, shape, blob) after the model's.
    """
    books = books or rough_books(group)
    width_of = bits if callable(bits) else lambda _: bits
    records: list[tuple[int, tuple[int, ...], bytes, int, int]] = []
    for slot in body_slots(geometry):
        records.append(_record(slot, _array(geometry, slot, tensors), width_of(slot), group, books))
    if geometry.heads:
        codes = {name: code for code, name in HEAD_CODES.items()}
        manifest = np.array([codes[head.name] for head in geometry.heads], np.float16)
        records.append((1, manifest.shape, manifest.tobytes(), 0, 0))
    for head in geometry.heads:
        for slot in head_slots(geometry, head, stacked_probes=float_heads):
            array = _array(geometry, slot, tensors)
            records.append(_record(slot, array, 0 if float_heads else 4, group, books))
    records += [(dtype, shape, blob, 0, 0) for dtype, shape, blob in tail]
    if tokenizer is not None:
        records.append((4, (), tokenizer, 0, 0))
    return _pack(geometry, records, books)


def _array(geometry: Geometry, slot: Slot, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    if slot.tensor.startswith("hada_p"):
        pair = standard_permutations(geometry.hada_n, geometry.split_permutations)
        return pair[slot.tensor == "hada_p2"].astype(np.float32)
    if slot.tensor == "embedding_head/proj/bias":
        return np.zeros(slot.shape, np.float16)
    array = tensors[slot.tensor]
    if slot.layer is not None:
        array = array[slot.layer]
    if slot.form is Form.KERNEL:
        return array.T
    if slot.form is Form.LANES:
        array = array.transpose(0, 2, 1)
    return array.reshape(slot.shape)


def _record(slot: Slot, array: np.ndarray, bits: int, group: int,
            books: Books) -> tuple[int, tuple[int, ...], bytes, int, int]:
    if slot.tensor.startswith("hada_p"):
        return 2, slot.shape, array.tobytes(), 0, 0
    if bits and slot.quantizable:
        return 3, slot.shape, quantize(array, bits, group, books), group, bits
    return 1, slot.shape, array.astype(np.float16).tobytes(), 0, 0


def _pack(g: Geometry, records: list[tuple[int, tuple[int, ...], bytes, int, int]], books: Books) -> bytes:
    mask = sum(1 << layer for layer in g.global_layers)
    orders = (*g.engram_orders, 0, 0, 0, 0)[:4]
    sites = (*g.engram_layers, *[0] * 16)[:16]
    header = struct.pack(
        HEADER_FORMAT, 0x05E12A84, len(records), 28, g.kv_window, g.kv_bits, g.vocab_size, g.out_vocab,
        g.d_model, g.num_heads, g.num_kv_heads, g.num_layers, g.qk_head_dim, g.v_head_dim, g.max_seq_len,
        g.hada_n, g.mhc_lanes, g.sliding_window, mask & 0xFFFFFFFF, mask >> 32, g.qkv_conv_taps,
        g.engram_slots, g.engram_sub_dim, g.engram_tables, 4, max(g.engram_orders), g.engram_seed_heads,
        len(g.engram_orders), *orders, len(g.engram_layers), *sites, g.rope_theta)
    header += b"".join(books[bits].astype("<f4").tobytes() for bits in (2, 3, 4))
    position = len(header) + struct.calcsize(RECORD_FORMAT) * len(records)
    directory, body = b"", b""
    start = position
    for dtype, shape, blob, group, bits in records:
        body += bytes(-(start + len(body)) % 64)
        directory += struct.pack(RECORD_FORMAT, dtype, len(shape), 0, *(*shape, 0, 0, 0, 0)[:4],
                                 start + len(body), len(blob), group, bits)
        body += blob
    return header + directory + body


def tokenizer_blob(pieces: int = 20, a_byte: bool = True) -> bytes:
    """A small valid tokenizer dump: control pieces, one of each kind, then words.

    Args:
        a_byte: one of the pieces is a byte; SentencePiece knows all bytes or none.
    """
    rows = [("<pad>", 2), ("</s>", 2), ("<s>", 2), ("<unk>", 1), ("<|im_start|>", 3)] + [("<0x41>", 4)] * a_byte
    rows += [(f"\u2581w{index}", 0) for index in range(len(rows), pieces)]
    out = struct.pack("<IIIIIBBH", len(rows), 0, 1, 2, 3, 1, a_byte, 0)
    for index, (piece, kind) in enumerate(rows):
        raw = piece.encode()
        out += struct.pack("<fBH", -float(index), kind, len(raw)) + raw
    return out
