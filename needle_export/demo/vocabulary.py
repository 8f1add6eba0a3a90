"""The demo's tokenizer: a SentencePiece BPE model with upstream's markers at upstream's ids."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from random import Random
from typing import Any

from needle_export.demo.prompts import answer_text, compact, offered, tail_text
from needle_export.demo.queries import draw

SIZE = 1024

#: Ids from 4 on, in this order; the first four are padding, end, beginning and unknown. From the public cactus-needle
#: package, ``needle.model.tokenizer``.
MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tools>", "</tools>", "<tool_call>", "</tool_call>",
           "<tool_result>", "</tool_result>", "<context>", "</context>", "<extract>", "</extract>", "<schema>",
           "</schema>")


#: Where no piece may reach across, in what the tokenizer is trained on: it is part of no text.
_CUT = "\t"


class Pieces:
    """Encodes and decodes with a SentencePiece model, given as bytes."""

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.bos_id, self.eos_id = self._model.bos_id(), self._model.eos_id()
        self.end_id = self._model.piece_to_id("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._model.encode(text, out_type=int)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._model.decode(list(ids))
        return text


def train(tools: Sequence[dict[str, Any]], seed: int, sentences: int) -> bytes:
    """A model trained on requests and answers of the training split, and on the tools as prompts show them.

    The numbers of a text are cut into digits, so that 37 and 73 are made of the same pieces; pieces may join letters
    with punctuation, so that what JSON repeats is one piece.
    """
    import sentencepiece

    rng = Random(seed)
    lines: list[str] = []
    for index in range(sentences):
        example = draw(rng, "train")
        lines += [_words(tail_text(example.query)), _values(answer_text(example.answers))]
        if index % 4 == 0:
            lines += [_values(compact(tool) + ",") for tool in offered(rng, tools)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type="bpe", vocab_size=SIZE, byte_fallback=True,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, user_defined_symbols=list(MARKERS), split_digits=True,
        split_by_unicode_script=False, split_by_whitespace=True, add_dummy_prefix=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentencepiece_length=24,
        pretokenization_delimiter=_CUT, character_coverage=1.0, num_threads=1, minloglevel=2,
    )
    return out.getvalue()


def _values(text: str) -> str:
    """JSON with cuts around its values, so that a value is made of the same pieces wherever it stands."""
    text = re.sub(r':"([^"]*)"', rf':"{_CUT}\1{_CUT}"', text)
    return re.sub(r'(?<=[\[,])"([^"{}:\[\]\t]+)"(?=[,\]])', rf'"{_CUT}\1{_CUT}"', text)


def _words(text: str) -> str:
    """A sentence with cuts before its punctuation."""
    return re.sub(r"(?=[,.!?:%°])", _CUT, text)
