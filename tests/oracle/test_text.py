"""Text to tokens and back against SentencePiece, and against the model authors' reference where the two agree."""

from __future__ import annotations

import io
import random
from functools import cache
from typing import Any

import pytest
import sentencepiece
from needle.model import export
from needle.model.tokenizer import CHAT_MARKERS

from needle_export import demo
from needle_export.checkpoint.sentencepiece_file import write_model
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.checkpoint.tokenizer import TokenizerTable
from tests.support.tokenizers import WORDS, tools_json

#: By name: what is trained otherwise than the model's own tokenizer.
MODELS: dict[str, dict[str, Any]] = {
    "as the model's": {},
    "the demo's": {},
    "small": {"vocab_size": 320, "character_coverage": 0.98},
    "no space in front": {"add_dummy_prefix": False, "vocab_size": 1024},
    "no bytes": {"byte_fallback": False},
    "no bytes, no space in front": {"byte_fallback": False, "add_dummy_prefix": False, "unk_surface": "<?>"},
    "extra spaces removed": {"remove_extra_whitespaces": True},
    "extra spaces removed, none in front": {"remove_extra_whitespaces": True, "add_dummy_prefix": False},
    "more pieces of the user's": {"user_defined_symbols": [*CHAT_MARKERS, "tchen", "e", "\n", "\u2581x", "a b", " q"]},
}
#: Spaces of every kind, markers whole and cut, the names of control and byte pieces, composed and decomposed letters,
#: a lone accent, both directions of writing, joined emoji, controls, and the last character of all.
ALPHABET = [
    *"abcdefghij \n\t{}\":,<>/", "  ", "    ", "\u2581", "\u2581\u2581", *CHAT_MARKERS, "<s>", "</s>",
    "<unk>", "<0x41>",
    "<tool", "_call>", "☕", "é", "e\u0301", "\u0301", "שלום", "مرحبا", "東京", "한국", "한",
    "\x00", "\x7f", "\u0085", "\u00a0",
    "\u200d", "\u3000", "👩\u200d👩\u200d👧", "\ufeff",
    "\ufffd", "\u2047", "\U0010ffff", *WORDS, *(f" {w}" for w in WORDS),
]


@cache
def model(name: str) -> bytes:
    if name == "the demo's":
        return demo.files().tokenizer.read_bytes()
    rng = random.Random(0)
    lines = [" ".join(rng.choices([*WORDS, "café", "東京"], k=rng.randint(4, 14))) for _ in range(400)]
    lines += [tools_json(rng) for _ in range(80)]
    written = io.BytesIO()
    options = {"vocab_size": 600, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "byte_fallback": True,
               "user_defined_symbols": CHAT_MARKERS, "normalization_rule_name": "identity",
               "remove_extra_whitespaces": False, **MODELS[name]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, model_type="bpe", hard_vocab_limit=False, num_threads=1,
        minloglevel=2, **options)
    return written.getvalue()


@cache
def texts() -> list[str]:
    rng = random.Random(3)
    found = ["", " ", "    ", "a" * 2000, "kitchen" * 300, "\u0301" * 9, *ALPHABET]
    return found + ["".join(rng.choices(ALPHABET, k=rng.randint(1, 40))) for _ in range(1200)]


def dump(table: TokenizerTable) -> dict[str, Any]:
    return {"pieces": table.pieces, "scores": table.scores, "types": table.types, "unk_id": table.unk_id,
            "add_dummy_prefix": table.add_dummy_prefix, "byte_fallback": table.byte_fallback}


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_says_the_same(name: str) -> None:
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model(name)), load_tokenizer(model(name))
    assert ours.vocab_size == theirs.GetPieceSize()
    for text in texts():
        ids = theirs.Encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.Decode(ids), text


@pytest.mark.parametrize("name", MODELS)
def test_any_tokens_are_decoded_alike(name: str) -> None:
    """Half characters, bytes that are none, control pieces between them, spaces in front from wherever."""
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model(name)), load_tokenizer(model(name))
    every = range(theirs.GetPieceSize())
    kinds = [[i for i in every if theirs.IsByte(i)], [i for i in every if theirs.IdToPiece(i)[0] in "\u2581 "],
             [0, 1, 2, 3], list(every)]
    kinds = [kind for kind in kinds if kind]
    rng = random.Random(4)
    for _ in range(3000):
        ids = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(0, 14))]
        assert ours.decode(ids) == theirs.Decode(ids), ids


def test_the_reference_says_the_same_where_it_follows_sentencepiece() -> None:
    compared = 0
    for name in ("as the model's", "the demo's", "small", "no space in front", "more pieces of the user's"):
        ours = load_tokenizer(model(name))
        reference = export.RefTokenizer(dump(ours.table))
        for text in texts():
            ids = reference.encode(text)
            assert ours.encode(text) == ids, text
            # A character of the text may be U+2581, or a space in front that is no piece's; see checkpoint/text.py.
            if "\u2581" not in text and not text.startswith(" "):
                assert ours.decode(ids) == reference.decode(ids), text
                compared += 1
    assert compared > 2500


def test_where_the_reference_departs() -> None:
    """Each of the differences that the docstrings tell of, so that they are told for a reason."""
    removing, plain = load_tokenizer(model("extra spaces removed")), load_tokenizer(model("as the model's"))
    theirs = export.RefTokenizer(dump(removing.table)).encode("a  b ")
    assert theirs != removing.encode("a  b ") == removing.encode("a b")
    reference = export.RefTokenizer(dump(plain.table))
    e2, space = plain.table.pieces.index("<0xE2>"), plain.table.pieces.index("<0x20>")
    for ids in ([e2, e2 - 0xE2 + 0x82], [plain.unk_id], [space]):
        assert reference.decode(ids) != plain.decode(ids)
    bare = load_tokenizer(model("no bytes"))
    assert len(export.RefTokenizer(dump(bare.table)).encode("☕☕☕")) > len(bare.encode("☕☕☕"))


def test_a_containers_dump_of_a_model_is_the_same_tokenizer(tmp_path: Any) -> None:
    from needle.model.tokenizer import SANTokenizer

    path = tmp_path / "tokenizer.model"
    path.write_bytes(model("as the model's"))
    assert load_tokenizer(export._tokenizer_blob(SANTokenizer(str(path)))).table == load_tokenizer(path).table


@pytest.mark.parametrize("name", MODELS)
def test_a_model_written_from_a_table_is_the_same_tokenizer(name: str) -> None:
    """What a build from a container puts beside it, which other SentencePiece libraries read."""
    ours = load_tokenizer(model(name))
    written = sentencepiece.SentencePieceProcessor(model_proto=write_model(ours.table))
    for text in texts():
        ids = ours.encode(text)
        assert written.encode(text) == ids, text
        assert written.decode(ids) == ours.decode(ids), text


def test_what_a_token_adds_and_which_are_markers() -> None:
    tokenizer = load_tokenizer(model("as the model's"))
    for text in texts():
        added = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert added == (" " + text.replace("\u2581", " ") if text else "").encode()
    assert [tokenizer.marker(m) for m in CHAT_MARKERS] == list(range(4, 4 + len(CHAT_MARKERS)))
    assert tokenizer.marker("<s>") is None and tokenizer.marker("the") is None
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert isinstance(tokenizer, Tokenizer)
