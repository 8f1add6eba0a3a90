"""A runner that answers what is written down for a query, and a tokenizer of bytes to do it with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tools>", "</tools>", "<tool_call>", "</tool_call>")
_FIRST = 4
_BYTES = _FIRST + len(MARKERS)

END = "<|im_end|>"


class ByteTokenizer:
    """Markers are tokens, and so is every byte."""

    pad_id, eos_id, bos_id, unk_id = 0, 1, 2, 3
    vocab_size = _BYTES + 256

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        while text:
            found = next((i for i, marker in enumerate(MARKERS) if text.startswith(marker)), None)
            if found is None:
                out += [_BYTES + byte for byte in text[0].encode()]
                text = text[1:]
            else:
                out.append(_FIRST + found)
                text = text[len(MARKERS[found]) :]
        return out

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        if token < _FIRST:
            return b""
        return MARKERS[token - _FIRST].encode() if token < _BYTES else bytes([token - _BYTES])

    def marker(self, text: str) -> int | None:
        return _FIRST + MARKERS.index(text) if text in MARKERS else None


def answer_of(*calls: tuple[str, dict[str, Any]]) -> str:
    """What a model says that makes these calls."""
    made = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"<tool_call>{json.dumps(made, separators=(',', ':'), ensure_ascii=False)}</tool_call>{END}"


class ScriptedRunner:
    """Finds the query in the prompt, and says the text that is written down for it, token by token.

    Args:
        script: texts by query; of others, nothing is called.
        context: at most so many tokens.
    """

    max_chunk = 128

    def __init__(self, script: Mapping[str, str], context: int = 2048) -> None:
        self.script, self.context = script, context
        self.tokenizer = ByteTokenizer()
        self.asked = 0
        self.reset()

    def reset(self) -> None:
        self.tokens: list[int] = []

    def save(self) -> list[int]:
        return list(self.tokens)

    def restore(self, saved: list[int]) -> None:
        self.tokens = list(saved)

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = []
        for token in tokens:
            self.tokens.append(int(token))
            row = np.zeros(self.tokenizer.vocab_size, np.float32)
            row[self._next()] = 1
            rows.append(row)
        assert len(self.tokens) <= self.context
        return np.array(rows)

    def _next(self) -> int:
        start = self.tokenizer.encode("<|im_start|>assistant\n")
        at = next((i for i in range(len(self.tokens), len(start) - 1, -1)
                   if self.tokens[i - len(start) : i] == start), None)
        if at is None:
            return 0
        if at == len(self.tokens):
            self.asked += 1
        query = self.tokenizer.decode(self.tokens[:at]).split("</tools>\n")[1].split(END)[0]
        said = self.tokenizer.encode(self.script.get(query, answer_of()))
        done = len(self.tokens) - at
        return said[done] if done < len(said) else self.tokenizer.eos_id
