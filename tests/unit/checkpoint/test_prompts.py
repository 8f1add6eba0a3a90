"""Files of prompts: read, encoded, and refused by line."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.prompts import read_prompts
from needle_export.errors import BadInput


def blob(*pieces: tuple[str, int], dummy: bool = False, fallback: bool = True) -> bytes:
    """A tokenizer dump: pieces and kinds, whose scores fall."""
    out = struct.pack("<IIIIIBBH", len(pieces), 0, 0, 0, 0, dummy, fallback, 0)
    for index, (piece, kind) in enumerate(pieces):
        raw = piece.encode()
        out += struct.pack("<fBH", -float(index), kind, len(raw)) + raw
    return out


PIECES = (("<unk>", 1), ("<|m|>", 3), ("ab", 0), ("bc", 0), ("abc", 0), ("a", 0), ("b", 0), ("c", 0), ("<0x41>", 4))


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_tokens_and_text(tmp_path: Path) -> None:
    lines = ['\ufeff{"tokens": [1, 2, 255]}\r', "", '{"text": "abcb<|m|>Abcc"}', "  ", '{"tokens": [0]}']
    prompts = read_prompts(write(tmp_path, "\n".join(lines)), SMALL, blob(*PIECES))
    # "ab" goes before "bc", and "abc" comes of it; "A" is a byte.
    assert [p.tolist() for p in prompts] == [[1, 2, 255], [4, 6, 1, 8, 3, 7], [0]]
    assert all(p.dtype == np.int64 for p in prompts)


def test_text_without_bytes_to_fall_back_to(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a X"}')
    assert read_prompts(path, SMALL, blob(*PIECES, fallback=False))[0].tolist() == [5, 0]
    table = blob(*PIECES, ("\u2581a", 0), dummy=True, fallback=False)
    assert read_prompts(path, SMALL, table)[0].tolist() == [9, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "prompts.jsonl: the file is empty"),
        (" \n\n", "prompts.jsonl: it holds no prompt"),
        ('{"tokens": [1]}\n{"tokens": [1]', "prompts.jsonl: line 2: it isn't JSON"),
        ('{"tokens": [1]}\n\n[1]', "line 3: it isn't a JSON object"),
        ("[" * 100_000, "line 1: it isn't JSON"),
        (b'{"tokens": [1]}\n{"text": "\xff"}', "line 2: it isn't UTF-8"),
        ("{}", "line 1: it has nothing instead of either"),
        ('{"token": [1]}', "line 1: it has 'token' instead of either"),
        ('{"tokens": [1], "text": "a"}', "line 1: it has 'text', 'tokens' instead of either"),
        ('{"tokens": 5}', "line 1: tokens isn't a list of whole numbers"),
        ('{"tokens": [1.0]}', "line 1: tokens isn't a list of whole numbers"),
        ('{"tokens": [true]}', "line 1: tokens isn't a list of whole numbers"),
        ('{"tokens": []}', "line 1: it holds no token"),
        ('{"tokens": [256]}', "line 1: token 256 isn't one of the model's 256"),
        ('{"tokens": [3, -1]}', "line 1: token -1 isn't one of"),
        ('{"tokens": [' + "9" * 300 + "]}", "line 1: token 99999999999999999999 isn't one of"),
        ('{"tokens": [' + "1, " * 512 + "1]}", "line 1: 513 tokens are more than the 512 that the model can take"),
        ('{"text": 5}', "line 1: text isn't a string"),
        ('{"text": ""}', "line 1: it holds no token"),
        ('{"text": "\\ud800"}', r"line 1: '\ud800': a lone surrogate is no text"),
        ('{"text": "B"}', "line 1: 'B': the checkpoint's tokenizer has no piece for the byte 0x42"),
    ],
)
def test_what_is_refused(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read_prompts(write(tmp_path, text), SMALL, blob(*PIECES))
    assert words in caught.value.sentence and "\n" not in caught.value.sentence


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"line 2: it has text, but the checkpoint has no tokenizer; give tokens"):
        read_prompts(write(tmp_path, '{"tokens": [1]}\n{"text": "hello"}'), SMALL, None)
    with pytest.raises(BadInput, match="there is no such file"):
        read_prompts(tmp_path / "absent", SMALL, None)
