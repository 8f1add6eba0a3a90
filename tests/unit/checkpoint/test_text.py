"""Which files are tokenizers: what is refused, and in which words."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from needle_export.checkpoint.text import load_tokenizer
from needle_export.errors import BadInput

IDS = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
PLAIN: dict[str, Any] = {"model_type": "bpe", "normalization_rule_name": "identity", **IDS}


def train(**changed: Any) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["turn on the lights", "set an alarm"] * 20), model_writer=written, vocab_size=50,
        hard_vocab_limit=False, num_threads=1, minloglevel=2, **{**PLAIN, **changed})
    return written.getvalue()


@pytest.mark.parametrize(("changed", "words"), [
    ({"model_type": "unigram", "vocab_size": 30}, "it is a unigram model, not byte-pair encoding"),
    ({"model_type": "word", "vocab_size": 10}, "it is a word model"),
    ({"normalization_rule_name": "nmt_nfkc"}, "it normalises text by a map of characters"),
    ({"treat_whitespace_as_suffix": True}, "it puts the space behind a word"),
    ({"pad_id": -1, "unk_id": 0}, "its ids of padding, end, beginning and unknown are -1, 1, 2, 0"),
])
def test_models_that_no_table_stands_for(changed: dict[str, Any], words: str) -> None:
    options = {"vocab_size": 50, **changed}
    vocab = options.pop("vocab_size")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["turn on the lights", "set an alarm"] * 20), model_writer=written, vocab_size=vocab,
        hard_vocab_limit=False, num_threads=1, minloglevel=2, **{**PLAIN, **options})
    with pytest.raises(BadInput, match=words):
        load_tokenizer(written.getvalue())


@pytest.mark.parametrize("cut", [0, 1, 30, 200])
def test_what_is_no_tokenizer(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"no model at all, but a text that is long enough"[:cut] if cut < 200 else train()[:cut])
    with pytest.raises(BadInput, match=r"tokenizer\.model"):
        load_tokenizer(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path / "tokenizer.model")


def test_ids_and_texts_that_are_none() -> None:
    tokenizer = load_tokenizer(train())
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(BadInput, match=f"token {token} isn't one of"):
            tokenizer.decode([token])
    with pytest.raises(BadInput, match="surrogate"):
        tokenizer.encode("a\ud800")
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
