"""Text to tokens by a container's tokenizer dump: byte-pair merges by score, as SentencePiece makes them.

The public cactus-needle package specifies it by a reference encoder (``needle.model.export``, ``RefTokenizer``): spaces
become U+2581, one of which is put in front where the dump says so; markers are cut out first, the longest that fits;
what lies between is merged, always the pair of neighbours whose piece has the greatest score, the leftmost of equals.
What is no piece in the end becomes its UTF-8 bytes' pieces, or the unknown one.
"""

from __future__ import annotations

import heapq
import re

from needle_export.checkpoint.tokenizer import BYTE, USER_DEFINED, TokenizerTable
from needle_export.errors import BadInput

_SPACE = "\u2581"


class Encoder:
    """Encodes text by one table."""

    def __init__(self, table: TokenizerTable) -> None:
        self._table = table
        # Of pieces that occur twice the last counts, as in the package.
        self._ids = {piece: i for i, piece in enumerate(table.pieces)}
        kinds = list(zip(table.pieces, table.types, strict=True))
        self._bytes = {int(piece[3:5], 16): i for i, (piece, kind) in enumerate(kinds) if kind == BYTE}
        markers = sorted((p for p, kind in kinds if kind == USER_DEFINED and p), key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(re.escape(m) for m in markers) + ")") if markers else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; none of an empty one. Markers of beginning and end aren't added.

        Raises:
            BadInput: the tokenizer has no piece for a byte that it would fall back to.
        """
        if not text:
            return []
        escaped = (_SPACE if self._table.add_dummy_prefix else "") + text.replace(" ", _SPACE)
        # Every other part is a marker.
        parts = self._markers.split(escaped) if self._markers is not None else [escaped]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._ids[part])
            else:
                for symbol in self._merged(part):
                    ids += self._symbol(symbol)
        return ids

    def _merged(self, text: str) -> list[str]:
        """Symbols of a text once no two neighbours make a piece."""
        symbols: list[str | None] = list(text)
        after, before = list(range(1, len(text) + 1)), list(range(-1, len(text) - 1))
        waiting: list[tuple[float, int, str]] = []

        def consider(left: int) -> None:
            right = after[left] if left >= 0 else len(text)
            if left >= 0 and right < len(text):
                pair = f"{symbols[left]}{symbols[right]}"
                found = self._ids.get(pair)
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

    def _symbol(self, symbol: str) -> list[int]:
        found = self._ids.get(symbol)
        if found is not None:
            return [found]
        if not self._table.byte_fallback:
            return [self._table.unk_id]
        try:
            return [self._bytes[byte] for byte in symbol.encode("utf-8")]
        except UnicodeEncodeError:
            raise BadInput("a lone surrogate is no text", where=f"{symbol!a}",
                           fix="write the character itself") from None
        except KeyError as missing:
            raise BadInput(f"the checkpoint's tokenizer has no piece for the byte {missing.args[0]:#04x}",
                           where=f"{symbol!a}", fix="give tokens instead of text") from None
