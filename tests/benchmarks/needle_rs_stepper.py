"""A process that holds a container in needle-rs and times its tokens whenever it is asked to.

    python -m tests.benchmarks.needle_rs_stepper CONTAINER ROWS STEPS

Each line on standard input is answered by milliseconds a token: what STEPS further tokens of an answer take.
"""

from __future__ import annotations

import sys
import time

import needle_rs

from tests.benchmarks.needle_rs import prompt_of

#: Of the shorter answer.
FIRST = 2
TOOLS = '[{"name":"lights","description":"turn lights on","parameters":{"room":{"type":"string"}}}]'


def timed(engine: needle_rs.V3Engine, query: str, tokens: int) -> tuple[float, int]:
    """Milliseconds that an answer of so many tokens takes, and the positions that it ends at."""
    start = time.perf_counter()
    found = engine.generate(query, TOOLS, max_new_tokens=tokens, temperature=0.0)
    return (time.perf_counter() - start) * 1e3, int(found["positions"])


def main() -> None:
    """Load the container, find a prompt that fills the rows, then answer each line."""
    path, rows, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = needle_rs.V3Engine.load(path)
    words = 1
    while timed(engine, prompt_of(words), FIRST)[1] + steps < rows:
        words += max(1, words // 4)
    query = prompt_of(words)
    for _ in sys.stdin:
        short, before = timed(engine, query, FIRST)
        long, after = timed(engine, query, FIRST + steps)
        if after - before != steps:
            raise SystemExit(f"the answer ended after {after - before + FIRST} tokens")
        print((long - short) / steps, flush=True)


if __name__ == "__main__":
    main()
