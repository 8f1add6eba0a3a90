"""The tokenizer dump: parsed exactly, refused when damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from needle_export.checkpoint.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, parse_tokenizer
from needle_export.errors import BadInput
from tests.support.containers import tokenizer_blob


def test_parsing() -> None:
    table = parse_tokenizer(tokenizer_blob(8))
    assert table.pieces == ("<pad>", "</s>", "<s>", "<unk>", "<|im_start|>", "<0x41>", "\u2581w6", "\u2581w7")
    assert table.types == (CONTROL, CONTROL, CONTROL, UNKNOWN, USER_DEFINED, BYTE, NORMAL, NORMAL)
    assert table.scores == tuple(-float(i) for i in range(8))
    assert (table.pad_id, table.eos_id, table.bos_id, table.unk_id) == (0, 1, 2, 3)
    assert table.add_dummy_prefix and table.byte_fallback


def test_truncation_and_trailing_bytes() -> None:
    blob = tokenizer_blob()
    for length in range(len(blob)):
        with pytest.raises(BadInput, match="tokenizer"):
            parse_tokenizer(blob[:length])
    with pytest.raises(BadInput, match="1 bytes follow"):
        parse_tokenizer(blob + b"\0")


@pytest.mark.parametrize(("position", "raw", "words"), [
    (0, b"\0\0\0\0", "n_pieces is 0"), (0, b"\xff\xff\xff\xff", "n_pieces"), (0, b"\x13\0\0\0", "follow"),
    (4, struct.pack("<I", 20), "pad_id is 20"), (8, b"\xff\xff\xff\xff", "eos_id"),
    (12, struct.pack("<I", 99), "bos_id"), (16, struct.pack("<I", 20), "unk_id"), (20, b"\2", "add_dummy"),
    (21, b"\2", "byte_fallback"), (24, struct.pack("<f", float("nan")), "score"), (28, b"\5", "type 5"),
    (28, b"\4", "byte piece"), (29, b"\xff\xff", "length 65535"), (31, b"\xff", "UTF-8"),
])
def test_each_field(position: int, raw: bytes, words: str) -> None:
    blob = tokenizer_blob()
    with pytest.raises(BadInput, match=words) as caught:
        parse_tokenizer(blob[:position] + raw + blob[position + len(raw):])
    assert "\n" not in caught.value.sentence


def test_random_damage_never_escapes() -> None:
    rng = np.random.default_rng(0)
    blob = tokenizer_blob()
    refused = 0
    for _ in range(2000):
        data = bytearray(blob)
        data[rng.integers(0, len(data))] = rng.integers(0, 256)
        try:
            parse_tokenizer(bytes(data))
        except BadInput:
            refused += 1
    assert refused > 200
