"""A process that holds one model and times a round of decode steps, or a prompt, whenever it is asked to.

    python -m tests.benchmarks.tflite_stepper ours|plain FOLDER ROWS THREADS STEPS VOCAB

Each line on standard input is answered by a number: ``decode`` by the round's median in milliseconds, ``prefill``
by the median milliseconds that 64 tokens took from an empty state. A process of its own keeps one model's memory, and
the page sizes it happened to get, out of the other's times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from needle_export.targets import find_target
from needle_export.targets.base import Runner

WARM_UP = 4
#: Rows that a round of our artifact leaves free: the untimed steps, and a few.
SPARE = WARM_UP + 4
PROMPT, PROMPT_RUNS = 64, 3

Array = NDArray[Any]


class PlainModel:
    """The plain model with its state in the interpreter's own input tensors.

    What a step changed is copied from the output tensors to the input tensors: the small states whole, of a cache
    the one row that was written, as the rest of it is the same on both sides.

    Args:
        folder: with the model and its facts.
        threads: of the interpreter.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        facts = json.loads((folder / "facts.json").read_text())
        self.interpreter = Interpreter(str(folder / "decode.tflite"), num_threads=threads)
        self.interpreter.allocate_tensors()
        runner = self.interpreter.get_signature_runner()
        self.inputs = {name: detail["index"] for name, detail in runner.get_input_details().items()}
        self.outputs = {name: detail["index"] for name, detail in runner.get_output_details().items()}
        self.caches = set(facts["caches"])
        self.states = [name for name in self.inputs if f"{name}_next" in self.outputs]
        self._pairs = [(name in self.caches, self.inputs[name], self.outputs[f"{name}_next"]) for name in self.states]

    def view(self, index: int) -> Array:
        """A tensor's memory. The interpreter doesn't run as long as somebody holds one."""
        array: Array = self.interpreter.tensor(index)()
        return array

    def fill(self) -> None:
        """Real values in real pages: untouched zeros share one page, and reading them would cost no traffic."""
        rng = np.random.default_rng(0)
        for name in self.states:
            array = self.view(self.inputs[name])
            array[...] = rng.standard_normal(array.shape, np.float32)

    def clear(self) -> None:
        """The state of an empty sequence."""
        for name in self.states:
            self.view(self.inputs[name])[...] = 0

    def step(self, token: int, position: int, hashed: Array | None, valid: Array | None) -> None:
        """One step, its state fed back; the n-gram rows are left as they are where there are none given."""
        self.view(self.inputs["tokens"])[0] = token
        self.view(self.inputs["position"])[0] = position
        if hashed is not None and valid is not None:
            self.view(self.inputs["hashed"])[...] = hashed
            self.view(self.inputs["valid"])[...] = valid
        self.interpreter.invoke()
        tensor = self.interpreter.tensor
        for cache, into, out in self._pairs:
            if cache:
                old, new = tensor(into)(), tensor(out)()
                row = position % len(old)
                old[row] = new[row]
            else:
                np.copyto(tensor(into)(), tensor(out)())

    def logits(self) -> NDArray[np.float32]:
        """Of the last step, [1, V]."""
        return self.view(self.outputs["logits"]).copy()

    def state(self) -> dict[str, Array]:
        """As the next step will read it, by name."""
        return {name: self.view(self.inputs[name]).copy() for name in self.states}


class Plain:
    """The plain model at the last position, step after step; it has no prefill."""

    def __init__(self, folder: Path, rows: int, threads: int, _steps: int, vocab: int) -> None:
        self.model = PlainModel(folder, threads)
        self.model.fill()
        self.vocab, self.position = vocab, rows - 1
        if "hashed" in self.model.inputs:
            self.model.view(self.model.inputs["hashed"])[...] = 7
            self.model.view(self.model.inputs["valid"])[...] = 1

    def prepare(self) -> None:
        """Nothing: a step leaves the position where it is."""

    def step(self) -> None:
        """One decode step."""
        self.model.step(5, self.position, None, None)


class Ours:
    """Our artifact: rounds that end at the last positions, and prompts from nothing."""

    def __init__(self, folder: Path, rows: int, threads: int, steps: int, vocab: int) -> None:
        self.runner = open_ours(folder, threads)
        self.tokens = np.random.default_rng(0).integers(1, vocab, rows, dtype=np.int64)
        self.before = rows - steps - SPARE

    def prepare(self) -> None:
        """A sequence that leaves room for one round."""
        self.runner.reset()
        self.runner.feed(self.tokens[: self.before])

    def step(self) -> None:
        """One decode step."""
        self.runner.feed(self.tokens[:1])

    def prefill_ms(self) -> float:
        """What a prompt takes from an empty state."""
        self.runner.reset()
        return timed(lambda: self.runner.feed(self.tokens[:PROMPT]))


def open_ours(folder: Path, threads: int) -> Runner:
    """Our artifact's session."""
    return find_target("tflite").open(folder, threads=threads)


def timed(what: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    start = time.perf_counter()
    what()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Load the model, then answer each line."""
    kind, folder, rows, threads, steps, vocab = sys.argv[1:]
    make: type[Plain] | type[Ours] = {"ours": Ours, "plain": Plain}[kind]
    model = make(Path(folder), int(rows), int(threads), int(steps), int(vocab))
    for line in sys.stdin:
        if line.strip() == "prefill":
            assert isinstance(model, Ours)
            times = [model.prefill_ms() for _ in range(PROMPT_RUNS + 1)][1:]
        else:
            model.prepare()
            times = [timed(model.step) for _ in range(int(steps) + WARM_UP)][WARM_UP:]
        print(float(np.median(times)), flush=True)


if __name__ == "__main__":
    main()
