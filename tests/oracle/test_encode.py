"""Text to tokens against the model authors' own reference encoder and SentencePiece."""

from __future__ import annotations

import dataclasses
import random

import pytest
from needle.model import export
from needle.model.tokenizer import CHAT_MARKERS, SANTokenizer

from needle_export.checkpoint.encode import Encoder
from needle_export.checkpoint.tokenizer import TokenizerTable, parse_tokenizer
from tests.support.tokenizers import NAMES, WORDS, tools_json, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SANTokenizer:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def texts() -> list[str]:
    rng = random.Random(3)
    found = ["", " ", "  a  b ", "\n\t", "caffè ☕ 東京", "aaaaaaaaaaaaaaaaaaaaaaa", "\u2581", "\x00"]
    found += [*NAMES, *CHAT_MARKERS]
    found += [" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(60)]
    found += [tools_json(rng) for _ in range(20)]
    alphabet = [*"abcdefgh \n{}\":", *CHAT_MARKERS, "☕", *WORDS]
    found += ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(200)]
    return found


def test_every_text_is_encoded_as_the_package_does(tokenizer: SANTokenizer) -> None:
    blob = export._tokenizer_blob(tokenizer)
    reference, ours = export.RefTokenizer(export.parse_tokenizer_blob(blob)), Encoder(parse_tokenizer(blob))
    for text in texts():
        assert ours.encode(text) == reference.encode(text), text
    plain = [text for text in texts() if text.isascii() and text.strip() and "\x00" not in text]
    assert len(plain) > 200
    for text in plain:
        assert ours.encode(text) == tokenizer.sp.Encode(text, out_type=int), text


@pytest.mark.parametrize("change", [{"add_dummy_prefix": False}, {"add_dummy_prefix": True}])
def test_either_setting(change: dict[str, bool], tokenizer: SANTokenizer) -> None:
    blob = export._tokenizer_blob(tokenizer)
    meta = export.parse_tokenizer_blob(blob) | change
    table: TokenizerTable = dataclasses.replace(parse_tokenizer(blob), **change)  # type: ignore[arg-type]  # two booleans
    reference, ours = export.RefTokenizer(meta), Encoder(table)
    for text in texts():
        assert ours.encode(text) == reference.encode(text), text
