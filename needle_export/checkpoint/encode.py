"""Text to tokens by one table of pieces: byte-pair merges by score, as SentencePiece makes them.

Spaces become U+2581, one of which is put in front where the table says so; user-defined pieces are cut out first, the
longest that fits; what lies between is merged, always the pair of neighbours whose piece has the greatest score, the
leftmost of equals. What is no piece in the end becomes its UTF-8 bytes' pieces, or the unknown one.

The public cactus-needle package has a reference encoder for the dumps of containers too (``needle.model.export``,
``RefTokenizer``). Where the two differ, this follows SentencePiece, which the model was trained with:

- a dump has no room for the removal of extra spaces, so the package's encoder keeps spaces that SentencePiece removes;
- SentencePiece never merges letters into a control piece or a byte's, such as ``</s>`` or ``<0x41>``; the package's
  encoder does where the pieces on the way there exist;
- without byte fallback SentencePiece gives one unknown token for neighbours that are no pieces, the package's encoder
  one for each. The package's exporter writes dumps with fallback only.
"""

from __future__ import annotations

import heapq
import re

from needle_export.checkpoint.tokenizer import BYTE, NORMAL, USER_DEFINED, TokenizerTable
from needle_export.errors import BadInput

SPACE = "\u2581"


class Encoder:
    """Encodes text by one table."""

    def __init__(self, table: TokenizerTable) -> None:
        self._table = table
        # Of pieces that occur twice the last counts, as in the package.
        self._ids = {piece: i for i, piece in enumerate(table.pieces)}
        kinds = list(zip(table.pieces, table.types, strict=True))
        self._mergeable = {piece: i for i, (piece, kind) in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)}
        self._bytes = {int(piece[3:5], 16): i for i, (piece, kind) in enumerate(kinds) if kind == BYTE}
        markers = sorted((p for p, kind in kinds if kind == USER_DEFINED and p), key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(re.escape(m) for m in markers) + ")") if markers else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; none of an empty one. Markers of beginning and end aren't added.

        Raises:
            BadInput: the text has a lone surrogate, or the tokenizer no piece for a byte that it would fall back to.
        """
        _require_text(text)
        escaped = self._escaped(text)
        # Every other part is a marker.
        parts = self._markers.split(escaped) if self._markers is not None else [escaped]
        ids: list[int] = []
        unknown = False
        for i, part in enumerate(parts):
            for symbol in [part] if i % 2 else self._merged(part):
                found = self._ids.get(symbol, self._table.unk_id)
                if found != self._table.unk_id:
                    ids.append(found)
                elif self._table.byte_fallback:
                    ids += self._fallback(symbol)
                elif not unknown:
                    ids.append(found)
                unknown = found == self._table.unk_id and not self._table.byte_fallback
        return ids

    def _escaped(self, text: str) -> str:
        """The text with U+2581 for spaces: the one in front added, extra ones removed, as the table says.

        Extra are spaces at both ends and all but the first of a run. As in SentencePiece, U+2581 itself counts as
        a space at the end of a text, and nowhere else.
        """
        if self._table.remove_extra_whitespaces:
            text = re.sub(" +", " ", text.lstrip(" "))
        escaped = text and (SPACE if self._table.add_dummy_prefix else "") + text.replace(" ", SPACE)
        return escaped.rstrip(SPACE) if self._table.remove_extra_whitespaces else escaped

    def _merged(self, text: str) -> list[str]:
        """Symbols of a text once no two neighbours make a piece."""
        symbols: list[str | None] = list(text)
        after, before = list(range(1, len(text) + 1)), list(range(-1, len(text) - 1))
        waiting: list[tuple[float, int, str]] = []

        def consider(left: int) -> None:
            right = after[left] if left >= 0 else len(text)
            if left >= 0 and right < len(text):
                pair = f"{symbols[left]}{symbols[right]}"
                found = self._mergeable.get(pair)
                if found is not None:
                    heapq.heappush(waiting, (-self._table.scores[found], left, pair))

        for left in range(len(text)):
            consider(left)
        while waiting:
            _, left, pair = heapq.heappop(waiting)
            right = after[left]
            # One of the two may have been merged with another since.
            if symbols[left] is None or right >= len(text) or f"{symbols[left]}{symbols[right]}" != pair:
                continue
            symbols[left], symbols[right] = pair, None
            after[left] = after[right]
            if after[left] < len(text):
                before[after[left]] = left
            consider(before[left])
            consider(left)
        return [s for s in symbols if s is not None]

    def _fallback(self, symbol: str) -> list[int]:
        try:
            return [self._bytes[byte] for byte in symbol.encode("utf-8")]
        except KeyError as missing:
            raise BadInput(f"the checkpoint's tokenizer has no piece for the byte {missing.args[0]:#04x}",
                           where=f"{symbol!a}", fix="give tokens instead of text") from None


def _require_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as lone:
        raise BadInput("a lone surrogate is no text", where=f"{text[lone.start:lone.end]!a}",
                       fix="write the character itself") from None
