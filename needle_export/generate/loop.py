"""Asks this model for calls: prompt, prefill, greedy decoding.

    python loop.py --tools tools.json "turn on the kitchen lights"

Needs numpy, sentencepiece and the model's runtime, and no other package. What is particular to the model is in
``manifest.json`` beside this file, how its files are run in ``decoder.py``. The most likely token is taken at every
step: nothing here keeps an answer to the tools' schemas, as a grammar would.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Model:
    """A build, its tokenizer, and how it is asked.

    Args:
        folder: of the build.
        threads: of the runtime.

    Raises:
        ValueError: there is no tokenizer beside the build that SentencePiece reads.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        from sentencepiece import SentencePieceProcessor

        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        tokenizer = self.manifest["tokenizer"]
        if tokenizer is None or tokenizer["format"] != "sentencepiece":
            raise ValueError("no SentencePiece model lies beside this build; build it with --tokenizer FILE")
        self.tokenizer: Any = SentencePieceProcessor(model_file=str(folder / tokenizer["file"]))
        self.decoder: Any = _beside(folder, "decoder").open_decoder(folder, self.manifest, threads)

    def prompt(self, query: str, tools: Sequence[Mapping[str, Any]], system: str = "") -> list[int]:
        """Tokens of a request.

        Args:
            query: what is asked.
            tools: flat schemas, each with ``name``, ``description`` and ``parameters``.
            system: instructions in front, or empty.
        """
        asked = self.manifest["prompt"]
        values = {
            "system": system.strip(),
            "tools": json.dumps(list(tools), separators=(",", ":"), ensure_ascii=False),
            "query": query,
        }
        parts = (asked["system"] if values["system"] else []) + asked["request"]
        text = "".join(values[part["insert"]] if part["text"] is None else part["text"] for part in parts)
        return [*asked["begin"], *self.tokenizer.encode(text)]

    def decode(self, prompt: Sequence[int]) -> Iterator[int]:
        """The tokens of an answer, one by one as they are known.

        Raises:
            ValueError: the prompt leaves no room in the context.
        """
        generation, decoder = self.manifest["generation"], self.decoder
        if len(prompt) >= decoder.context:
            raise ValueError(f"the prompt has {len(prompt)} tokens, and the context holds {decoder.context}")
        decoder.reset()
        logits = decoder.feed(np.array(prompt, np.int64))[-1]
        # The last token is known without a place of its own in the context.
        for left in range(min(generation["max_new_tokens"], decoder.context - len(prompt) + 1), 0, -1):
            token = int(logits.argmax())
            if token in generation["stop"]:
                return
            yield token
            if left > 1:
                logits = decoder.feed(np.array([token], np.int64))[-1]

    def answer(self, query: str, tools: Sequence[Mapping[str, Any]], system: str = "") -> str:
        """The text of the answer to a request, markers included."""
        tokens = self.decode(self.prompt(query, tools, system))
        # The model may have logits for more tokens than the tokenizer has pieces; these are no text.
        pieces = self.manifest["tokenizer"]["pieces"]
        text: str = self.tokenizer.decode([token for token in tokens if token < pieces])
        return text

    def calls(self, answer: str) -> list[dict[str, Any]] | None:
        """The calls in an answer, or None where it holds none: ``{"name": .., "arguments": {..}}`` each."""
        front, behind = self.manifest["prompt"]["calls_front"], self.manifest["prompt"]["calls_behind"]
        _, found, rest = answer.partition(front)
        try:
            calls, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:
            return None
        return calls if found and rest[end:].startswith(behind) and isinstance(calls, list) else None


def flat(schemas: Any) -> list[dict[str, Any]]:
    """Tools as the prompt shows them: what ``function`` holds of OpenAI's form, and others as they are."""
    schemas = [schemas] if isinstance(schemas, dict) else schemas
    return [tool["function"] if "function" in tool and "name" not in tool else tool for tool in schemas]


def _beside(folder: Path, name: str) -> Any:
    """A module of the build's folder, which may import others that lie there."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Asks the model in this folder for calls.")
    parser.add_argument("query", help="the request")
    parser.add_argument("--tools", type=Path, required=True, help="a JSON file of schemas, flat or OpenAI-style")
    parser.add_argument("--system", default="", help="instructions in front of the request")
    parser.add_argument("--threads", type=int, default=1, help="threads of the runtime")
    given = parser.parse_args()
    try:
        model = Model(Path(__file__).resolve().parent, given.threads)
        answer = model.answer(given.query, flat(json.loads(given.tools.read_text("utf-8"))), given.system)
    except (OSError, ValueError, ImportError) as fault:
        parser.exit(1, f"{fault}\n")
    sys.stdout.write(f"{answer}\n")
    for call in model.calls(answer) or ():
        sys.stdout.write(f"{call}\n")


if __name__ == "__main__":
    main()
