"""A SentencePiece ``tokenizer.model`` as a table, and a table as such a file.

SentencePiece itself reads the file and tells the pieces, their scores and ids. Which pieces are user-defined, and how
the model normalises, its Python interface doesn't tell; these few fields are looked up in the message that it writes
back. Field numbers: sentencepiece's public ``sentencepiece_model.proto``.

The model authors' exporter (the public cactus-needle package, ``needle.model.export``) makes its dump from the same
facts, with two shortcuts: of user-defined pieces it marks the chat markers alone, and it always writes byte fallback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from needle_export.checkpoint.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNKNOWN_TEXT,
    USER_DEFINED,
    TokenizerTable,
)
from needle_export.errors import BadInput

#: The ids that the model was trained with (cactus-needle, ``needle.model.tokenizer``), whatever a file may say.
PAD_ID, EOS_ID, BOS_ID, UNK_ID = range(4)

_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_PIECE_TYPE = 3
_MODEL_TYPE, _SPACE_BEHIND, _BYTE_FALLBACK, _UNKNOWN_TEXT = 3, 24, 35, 44
_CHARACTER_MAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_MODEL_TYPES = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}
_BPE = 2
_UNUSED = 5
_TYPES = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 6: BYTE}
_FIX = "give the tokenizer.model that the checkpoint was trained with"

_Fields = dict[int, Any]


def read_model(data: bytes) -> TokenizerTable:
    """The table of a ``tokenizer.model``.

    Raises:
        BadInput: SentencePiece can't read it, or it does what a table can't stand for: it isn't byte-pair encoding,
            maps characters to others, puts the space behind a word or doesn't escape it, has unused pieces, or other
            ids than the model's for padding, end, beginning and unknown.
    """
    import sentencepiece

    reader = sentencepiece.SentencePieceProcessor()
    try:
        reader.LoadFromSerializedProto(data)
        count = reader.GetPieceSize()
        pieces = [reader.IdToPiece(i) for i in range(count)]
        scores = [reader.GetScore(i) for i in range(count)]
    except (RuntimeError, OSError, ValueError):
        raise BadInput("SentencePiece can't read it as a model", where="tokenizer", fix=_FIX) from None
    types, trainer, normalizer = _settings(reader.serialized_model_proto())
    _require_plain(trainer, normalizer)
    unused = next((pieces[i] for i, kind in enumerate(types) if kind == _UNUSED), None)
    if unused is not None:
        raise _refusal(f"its piece {unused[:20]!r} is marked as unused")
    ids = reader.pad_id(), reader.eos_id(), reader.bos_id(), reader.unk_id()
    if ids != (PAD_ID, EOS_ID, BOS_ID, UNK_ID):
        raise _refusal(f"its ids of padding, end, beginning and unknown are {', '.join(map(str, ids))} instead of "
                       f"{PAD_ID}, {EOS_ID}, {BOS_ID}, {UNK_ID}")
    return TokenizerTable(
        tuple(pieces), tuple(scores), tuple(_TYPES[kind] for kind in types), *ids,
        add_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, True)),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, False)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_SPACES, True)),
        unknown_text=trainer[_UNKNOWN_TEXT].decode("utf-8") if _UNKNOWN_TEXT in trainer else UNKNOWN_TEXT,
    )


def write_model(table: TokenizerTable) -> bytes:
    """The ``tokenizer.model`` of a table, so that what reads such files reads a container's tokenizer as well.

    Raises:
        BadInput: SentencePiece makes something else of it, as a table may be nothing that it could have written.
    """
    from sentencepiece import sentencepiece_model_pb2 as messages

    kinds = {kind: number for number, kind in _TYPES.items()}
    model: Any = messages.ModelProto()  # type: ignore[attr-defined]  # made when the module is loaded
    for piece, score, kind in zip(table.pieces, table.scores, table.types, strict=True):
        model.pieces.add(piece=piece, score=score, type=kinds[kind])
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = _BPE, len(table.pieces)
    trainer.byte_fallback, trainer.unk_surface = table.byte_fallback, table.unknown_text
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = PAD_ID, EOS_ID, BOS_ID, UNK_ID
    for name, index in (("pad_piece", PAD_ID), ("eos_piece", EOS_ID), ("bos_piece", BOS_ID), ("unk_piece", UNK_ID)):
        setattr(trainer, name, table.pieces[index] if index < len(table.pieces) else "")
    normalizer.name, normalizer.precompiled_charsmap = "identity", b""
    normalizer.add_dummy_prefix = table.add_dummy_prefix
    normalizer.remove_extra_whitespaces = table.remove_extra_whitespaces
    normalizer.escape_whitespaces = True
    data: bytes = model.SerializeToString(deterministic=True)
    if read_model(data) != table:
        raise _refusal("SentencePiece reads another table than was written")
    return data


def _settings(message: bytes) -> tuple[list[int], _Fields, _Fields]:
    """Types of the pieces, and the fields of trainer and normaliser; a denormaliser counts as a normaliser's map."""
    types: list[int] = []
    specs: dict[int, _Fields] = {_TRAINER: {}, _NORMALIZER: {}, _DENORMALIZER: {}}
    for number, value in _fields(message):
        if number == _PIECES:
            types.append(dict(_fields(value)).get(_PIECE_TYPE, 1))
        elif number in specs:
            specs[number].update(_fields(value))
    if specs[_DENORMALIZER].get(_CHARACTER_MAP):
        specs[_NORMALIZER][_CHARACTER_MAP] = specs[_DENORMALIZER][_CHARACTER_MAP]
    return types, specs[_TRAINER], specs[_NORMALIZER]


def _require_plain(trainer: _Fields, normalizer: _Fields) -> None:
    kind = trainer.get(_MODEL_TYPE, 1)
    if kind != _BPE:
        raise _refusal(f"it is a {_MODEL_TYPES.get(kind, kind)} model, not byte-pair encoding")
    if normalizer.get(_CHARACTER_MAP):
        raise _refusal("it normalises text by a map of characters")
    if not normalizer.get(_ESCAPE_SPACES, True):
        raise _refusal("it doesn't escape spaces")
    if trainer.get(_SPACE_BEHIND, False):
        raise _refusal("it puts the space behind a word")


def _refusal(what: str) -> BadInput:
    return BadInput(f"{what}, which no Needle 3 tokenizer does", where="tokenizer", fix=_FIX)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message that SentencePiece has written: whole numbers, and bytes for all others."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7)
        size = varint() if size is None else size
        yield tag >> 3, message[position:position + size]
        position += size
