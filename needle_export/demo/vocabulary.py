"""The demo's tokenizer: a SentencePiece BPE model with upstream's markers at upstream's ids."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from random import Random

from needle_export.demo.prompts import answer_text, offered
from needle_export.demo.queries import draw
from needle_export.generate.prompt import AFTER_QUERY, MARKERS, compact
from needle_export.generate.schemas import Tool

SIZE = 1024

#: Where no piece may reach across, in what the tokenizer is trained on: it is part of no text.
_CUT = "\t"


def train(tools: Sequence[Tool], seed: int, sentences: int) -> bytes:
    """A model trained on requests and answers of the training split, and on the tools as prompts show them.

    The numbers of a text are cut into digits, so that 37 and 73 are made of the same pieces; pieces may join letters
    with punctuation, so that what JSON repeats is one piece. Markers have the ids from 4 on, those before them are
    padding, end, beginning and unknown, as in the public cactus-needle package.
    """
    import sentencepiece

    rng = Random(seed)
    lines: list[str] = []
    for index in range(sentences):
        example = draw(rng, "train")
        lines += [_words(example.query + AFTER_QUERY), _values(answer_text(example.answers))]
        if index % 4 == 0:
            lines += [_values(compact(tool.flat) + ",") for tool in offered(rng, tools)]
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
