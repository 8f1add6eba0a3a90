"""A SentencePiece BPE model as one table, and the dump of it that a container carries.

Layout (the public cactus-needle package, ``needle.model.export``): u32 number of pieces, u32 pad, eos, bos
and unk ids, u8 add_dummy_prefix, u8 byte_fallback, u16 padding; then for each piece f32 score, u8 type,
u16 length and that many bytes of UTF-8. Little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from needle_export.errors import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = range(5)

#: What SentencePiece writes for an unknown token unless a model says otherwise.
UNKNOWN_TEXT = " \u2047 "

_HEADER = struct.Struct("<IIIIIBBH")
_PIECE = struct.Struct("<fBH")
_FIX = "fetch the file again, it is damaged or cut off"


@dataclass(frozen=True)
class TokenizerTable:
    """Pieces by token id, their merge scores and kinds, and the ids with a meaning of their own.

    ``types`` holds NORMAL, UNKNOWN, CONTROL, USER_DEFINED or BYTE for each piece. A dump has no room for the last two
    fields; what it leaves out is SentencePiece's default for the text of an unknown token, and no removal of spaces.
    """

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    pad_id: int
    eos_id: int
    bos_id: int
    unk_id: int
    add_dummy_prefix: bool
    byte_fallback: bool
    remove_extra_whitespaces: bool = False
    unknown_text: str = UNKNOWN_TEXT


def parse_tokenizer(blob: bytes) -> TokenizerTable:
    """The table in a container's raw record.

    Raises:
        BadInput: naming the field or the piece, when a length leaves the blob, an id leaves the table, or
            a value has no meaning.
    """
    if len(blob) < _HEADER.size:
        raise _error(f"it ends inside its header, after {len(blob)} bytes")
    count, pad, eos, bos, unk, dummy, fallback, _ = _HEADER.unpack_from(blob)
    if not 1 <= count <= (len(blob) - _HEADER.size) // _PIECE.size:
        raise _error(f"n_pieces is {count}, which {len(blob)} bytes can't hold")
    for name, value in (("pad_id", pad), ("eos_id", eos), ("bos_id", bos), ("unk_id", unk)):
        if value >= count:
            raise _error(f"{name} is {value}, outside its {count} pieces")
    for name, value in (("add_dummy_prefix", dummy), ("byte_fallback", fallback)):
        if value > 1:
            raise _error(f"{name} is {value}, neither 0 nor 1")
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    position = _HEADER.size
    for index in range(count):
        if position + _PIECE.size > len(blob):
            raise _error(f"piece {index} lies past its end")
        score, kind, length = _PIECE.unpack_from(blob, position)
        position += _PIECE.size
        surface = blob[position:position + length]
        if len(surface) != length:
            raise _error(f"piece {index} has length {length}, past its end")
        position += length
        pieces.append(_surface(index, kind, surface))
        if not math.isfinite(score):
            raise _error(f"piece {index} has score {score}")
        scores.append(score)
        types.append(kind)
    if position != len(blob):
        raise _error(f"{len(blob) - position} bytes follow its last piece")
    return TokenizerTable(tuple(pieces), tuple(scores), tuple(types), pad, eos, bos, unk, bool(dummy),
                          bool(fallback))


def is_dump(data: bytes) -> bool:
    """Whether bytes begin like a dump: a number of pieces that they could hold, ids among them, two switches."""
    if len(data) < _HEADER.size:
        return False
    count, *ids, dummy, fallback, _ = _HEADER.unpack_from(data)
    fits = 1 <= count <= (len(data) - _HEADER.size) // _PIECE.size
    return fits and all(i < count for i in ids) and dummy <= 1 and fallback <= 1


def _surface(index: int, kind: int, surface: bytes) -> str:
    if kind > BYTE:
        raise _error(f"piece {index} has type {kind}, which is none of 0 to {BYTE}")
    try:
        text = surface.decode("utf-8")
    except UnicodeDecodeError:
        raise _error(f"piece {index} isn't UTF-8") from None
    if kind == BYTE and not _is_byte_piece(text):
        raise _error(f"piece {index} is a byte piece, but reads {text[:20]!r} instead of <0xNN>")
    return text


def _is_byte_piece(text: str) -> bool:
    digits = text.removeprefix("<0x").removesuffix(">")
    return len(text) == 6 and len(digits) == 2 and all(c in "0123456789abcdefABCDEF" for c in digits)


def _error(what: str) -> BadInput:
    return BadInput(what, where="tokenizer", fix=_FIX)
