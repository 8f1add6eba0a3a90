"""What the grammar costs: compiling it, meeting a state for the first time, meeting it again, and a token of an answer.

    python -m tests.benchmarks.masks [--rounds N] [--tools FILE] [--json]

Two vocabularies: the demo's own, and one of the published model's size, which is trained here on this repository's
pages and sources. For each: milliseconds to compile the tools into an automaton and to set up masks over it; the
microseconds of a state's mask when it is first asked for and afterwards; and of a token of an answer, all that the
constraint does for it: of the first answer after a start, and of later ones that meet the same states. The answers are
the right ones to the first held-out requests. Medians of all rounds; the states are all there are, or a thousand drawn
from a fixed seed. It ends within seconds.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from needle_export import demo
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.companions import load_tools
from needle_export.generate import masks
from needle_export.generate.automaton import Automaton
from needle_export.generate.constraint import Constraint, Grammar
from needle_export.generate.examples import read_examples
from needle_export.generate.grammar import compile_grammar
from needle_export.generate.prompt import CALLS_END, CALLS_START, MARKERS, compact
from needle_export.measure.latency import host

ROOT = Path(__file__).parents[2]

#: Pieces of the published model's tokenizer.
PUBLISHED_PIECES = 8192

STATES, ANSWERS = 1000, 40

#: Rows of the table: a name, what it is counted in.
ROWS = {
    "pieces": "", "states": "", "compile": "ms", "set up": "ms", "mask, first time": "us", "mask, again": "us",
    "token, first answer": "us", "token, later answers": "us",
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tools", type=Path, default=None, help="the demo's if left out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools = options.tools or demo.files().tools
    result = {
        "host": host(), "rounds": options.rounds, "tools": tools.name,
        "command": f"python -m tests.benchmarks.masks {' '.join(sys.argv[1:])}".strip(),
        "vocabularies": {name: measured(tokenizer, tools, options.rounds) for name, tokenizer in tokenizers()},
    }
    print(json.dumps(result, indent=1) if options.json else table(result))


def tokenizers() -> Iterator[tuple[str, Tokenizer]]:
    """The demo's, and one as large as the published model's."""
    yield "demo", load_tokenizer(demo.files().tokenizer)
    yield "published size", load_tokenizer(trained(PUBLISHED_PIECES))


def trained(pieces: int) -> bytes:
    """A tokenizer with the markers at their ids and a piece for each byte."""
    import sentencepiece

    paths = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "needle_export").rglob("*.py"))]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type="bpe", vocab_size=pieces, byte_fallback=True,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, user_defined_symbols=list(MARKERS), num_threads=1, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentencepiece_length=24,
    )  # fmt: skip
    return out.getvalue()


def measured(tokenizer: Tokenizer, tools: Path, rounds: int) -> dict[str, float]:
    """Every row for one vocabulary: medians, milliseconds and microseconds as ROWS has them."""
    known = load_tools(tools)
    automaton = compile_grammar(known)
    times: dict[str, list[float]] = {name: [] for name, unit in ROWS.items() if unit}
    answers = right_answers(tokenizer)
    for _ in range(rounds):
        times["compile"].append(1e3 * seconds(lambda: compile_grammar(known)))
        masks._trie.cache_clear()
        times["set up"].append(1e3 * seconds(lambda: Grammar(automaton, tokenizer)))
        admitted = Grammar(automaton, tokenizer).masks.admitted
        for name in ("mask, first time", "mask, again"):
            times[name] += [1e6 * seconds(partial(admitted, state)) for state in sampled(automaton)]
        first = later = 0.0
        for answer in answers:
            grammar = Grammar(automaton, tokenizer)
            first += followed(grammar, answer)
            later += followed(grammar, answer)
        for name, spent in (("token, first answer", first), ("token, later answers", later)):
            times[name].append(1e6 * spent / sum(map(len, answers)))
    return {"pieces": tokenizer.vocab_size, "states": len(automaton.edges),
            **{name: statistics.median(found) for name, found in times.items()}}


def right_answers(tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of right answers to held-out requests."""
    examples = read_examples(demo.files().heldout.read_bytes(), load_tools(demo.files().tools))[:ANSWERS]
    calls = [[{"name": call.name, "arguments": call.arguments} for call in example.answers] for example in examples]
    return [tokenizer.encode(f"{CALLS_START}{compact(answer)}{CALLS_END}") for answer in calls]


def sampled(automaton: Automaton) -> list[int]:
    """States, each once."""
    every = range(len(automaton.edges))
    return list(every) if len(every) <= STATES else Random(0).sample(every, STATES)


def followed(grammar: Grammar, answer: list[int]) -> float:
    """Seconds that the constraint takes for an answer."""
    begin = time.perf_counter()
    constraint = Constraint(grammar)
    for token in answer:
        assert constraint.admitted()[token]
        constraint.push(token)
    took = time.perf_counter() - begin
    assert constraint.done
    return took


def seconds(work: Callable[[], Any]) -> float:
    """How long something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def table(result: dict[str, Any]) -> str:
    """The result for people, as a table in Markdown."""
    found = result["vocabularies"]
    lines = [f"grammar of {result['tools']}, {result['rounds']} rounds, {result['host']}",
             f"command: {result['command']}", "", f"| | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for name, unit in ROWS.items():
        values = [vocabulary[name] for vocabulary in found.values()]
        cells = [f"{value:,.0f}" if not unit or value >= 10 else f"{value:.1f}" for value in values]
        lines.append(f"| {name}{f', {unit}' if unit else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
