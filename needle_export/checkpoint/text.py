"""Text to tokens and back, by a ``tokenizer.model`` or by the dump that a container carries.

Both become one table, and both ways follow SentencePiece exactly. What the model authors' reference does otherwise when
it encodes is told in ``encode``. It also decodes otherwise (``needle.model.export``, ``RefTokenizer``): unknown tokens
become nothing instead of SentencePiece's text for them; bytes that are no UTF-8 become one U+FFFD for a cut-off
character instead of one for each byte; of spaces in front one is dropped whatever it came from, where SentencePiece
drops that of the first piece only, and where extra spaces are removed, those of all pieces before the first other text.
"""

from __future__ import annotations

from pathlib import Path

from needle_export.checkpoint.encode import SPACE, Encoder
from needle_export.checkpoint.files import map_file, naming
from needle_export.checkpoint.sentencepiece_file import read_model
from needle_export.checkpoint.tokenizer import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    TokenizerTable,
    is_dump,
    parse_tokenizer,
)
from needle_export.errors import BadInput


def load_tokenizer(source: Path | bytes, most: int | None = None) -> Tokenizer:
    """The tokenizer in a file or in its bytes: a SentencePiece model, or a container's dump.

    Args:
        most: tokens that the model knows, or None for any number.

    Raises:
        BadInput: it is neither, is damaged, does what no Needle 3 tokenizer does, or has more pieces than that.
    """
    if isinstance(source, Path):
        data = map_file(source).tobytes()
        with naming(str(source)):
            return load_tokenizer(data, most)
    found = Tokenizer(parse_tokenizer(source) if is_dump(source) else read_model(source))
    if most is not None and found.vocab_size > most:
        raise BadInput(f"the tokenizer has {found.vocab_size} pieces, and the model knows {most} tokens",
                       fix="give the one that the model was trained with: --tokenizer FILE")
    return found


class Tokenizer:
    """Encodes and decodes by one table.

    Attributes:
        table: pieces, scores, kinds and settings.
        vocab_size: number of pieces; ids run from 0 to below it.
        bos_id, eos_id, pad_id, unk_id: of the beginning and the end of a sequence, padding, and what is unknown.
    """

    def __init__(self, table: TokenizerTable) -> None:
        self.table = table
        self.vocab_size = len(table.pieces)
        self.bos_id, self.eos_id = table.bos_id, table.eos_id
        self.pad_id, self.unk_id = table.pad_id, table.unk_id
        self._encoder = Encoder(table)
        self._bytes = [self._of_piece(i) for i in range(self.vocab_size)]
        self._markers = {p: i for i, p in enumerate(table.pieces) if table.types[i] == USER_DEFINED}
        self._drops = table.add_dummy_prefix or table.remove_extra_whitespaces

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any for its beginning or end; none of an empty text.

        Raises:
            BadInput: the text has a lone surrogate, or the tokenizer no piece for a byte that it would fall back to.
        """
        return self._encoder.encode(text)

    def decode(self, ids: list[int]) -> str:
        """The text of tokens. Those of beginning, end and padding have none.

        Raises:
            BadInput: an id is none of the tokenizer's.
        """
        text: list[str] = []
        run = bytearray()
        # Whether a space in front of the next piece is the one that encoding put there.
        first, dropped = self._drops, False
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BadInput(f"token {token} isn't one of the tokenizer's {self.vocab_size}", where="tokenizer",
                               fix="check that the tokenizer is the model's")
            if self.table.types[token] == BYTE:
                run += self._bytes[token]
                continue
            if run:
                text.append(_characters(run))
                run = bytearray()
            first = first and not dropped and not any(text)
            piece = self._bytes[token].decode("utf-8")
            dropped = False
            if first and self.table.types[token] not in (CONTROL, UNKNOWN) and self.table.pieces[token][:1] == SPACE:
                piece = piece[1:]
                dropped = not self.table.remove_extra_whitespaces
            text.append(piece)
        return "".join(text) + _characters(run)

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, UTF-8 or a part of it; nothing for control pieces.

        A space in front is there even where ``decode`` drops the first one of a text. An unknown token adds what
        SentencePiece writes for one, a user-defined piece its own letters.
        """
        return self._bytes[token]

    def marker(self, text: str) -> int | None:
        """The id of the user-defined piece of these letters, such as ``<tool_call>``; None where there is none."""
        return self._markers.get(text)

    def _of_piece(self, token: int) -> bytes:
        piece, kind = self.table.pieces[token], self.table.types[token]
        if kind == BYTE:
            return bytes([int(piece[3:5], 16)])
        if kind == CONTROL:
            return b""
        return (self.table.unknown_text if kind == UNKNOWN else piece.replace(SPACE, " ")).encode("utf-8")


def _characters(run: bytes | bytearray) -> str:
    """Bytes of neighbouring byte pieces as text: each byte that begins no whole character is U+FFFD by itself."""
    text: list[str] = []
    position = 0
    while position < len(run):
        lead = run[position]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        try:
            text.append(bytes(run[position:position + size]).decode("utf-8"))
            position += size
        except UnicodeDecodeError:
            text.append("\ufffd")
            position += 1
    return "".join(text)
