"""A throw-away tokenizer, and the text that it is trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import sentencepiece
from needle.model.tokenizer import BOS_ID, CHAT_MARKERS, EOS_ID, PAD_ID, UNK_ID, SANTokenizer

SENTENCES = (
    "turn on off the kitchen lights set an alarm for seven tomorrow what is weather in Lagos Paris call mum",
    "play some jazz music louder remind me to buy milk and bread find cheapest flight from Berlin next Friday",
    "send a message Alice about dinner translate good morning into French start timer ten minutes",
)
WORDS = [word for sentence in SENTENCES for word in sentence.split()]
NAMES = ("get_weather", "set_alarm", "play_music", "send_message", "turn_on_lights", "find_flight")


def tools_json(rng: random.Random) -> str:
    tools = [{"name": name, "description": " ".join(rng.choices(WORDS, k=4)),
              "parameters": {rng.choice(WORDS): {"type": "string"}}}
             for name in rng.sample(NAMES, rng.randint(1, 3))]
    return json.dumps(tools, separators=(",", ":"), ensure_ascii=False)


def train_tokenizer(folder: Path) -> SANTokenizer:
    """A throw-away byte-pair tokenizer with the package's markers at the package's ids."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) for _ in range(1500)]
    lines += [tools_json(rng) for _ in range(300)]
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, model_type="bpe", vocab_size=700,
            pad_id=PAD_ID, eos_id=EOS_ID, bos_id=BOS_ID, unk_id=UNK_ID, user_defined_symbols=CHAT_MARKERS,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            hard_vocab_limit=False, num_threads=1, minloglevel=2)
    return SANTokenizer(str(folder / "tokenizer.model"))
