"""What is spared changes no answer: the same logits, from fewer tokens read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from needle_export.errors import UsageError
from needle_export.generate.prefix import CHUNK, ForeseeingRunner, PrefixRunner, Saves

VOCAB = 50


class Plain:
    """Logits of a token follow from all tokens up to it, and from how they were cut into calls."""

    def __init__(self, context: int = 400) -> None:
        self.context = context
        self.read: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.seen = 1

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        self.read.append(len(tokens))
        rows = []
        for token in tokens:
            self.seen = (self.seen * 31 + int(token) + 7) % 1_000_003
            rows.append(np.random.default_rng(self.seen).random(VOCAB, np.float32))
        self.seen = (self.seen * 3 + 1) % 1_000_003 if self.cuts_matter else self.seen
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    cuts_matter = True


class Saving(Plain):
    def save(self) -> Any:
        return self.seen

    def restore(self, saved: Any) -> None:
        self.seen = saved


def prompts() -> list[NDArray[np.int64]]:
    """Several with much in common, one with nothing, one that is all of it, and one that is another's beginning."""
    rng = np.random.default_rng(1)
    tools = rng.integers(0, VOCAB, 150)
    ends = [rng.integers(0, VOCAB, n) for n in (30, 1, 80, 7)]
    made = [np.concatenate([tools, end]) for end in ends]
    return [*made, rng.integers(0, VOCAB, 90), *made[::-1], tools, tools[:CHUNK], tools[:1], made[0], made[0]]


def ask(runner: Any, prompt: NDArray[np.int64], steps: int = 5) -> list[NDArray[np.float32]]:
    runner.reset()
    found = [runner.feed(prompt)]
    for _ in range(steps):
        found.append(runner.feed(found[-1][-1].argmax()[None]))
    return found


def test_the_same_logits_from_fewer_tokens() -> None:
    plain, saving = Plain(), Saving()
    anew, kept = PrefixRunner(plain, 128), PrefixRunner(saving, 128)
    for prompt in prompts():
        for a, b in zip(ask(anew, prompt), ask(kept, prompt), strict=True):
            assert np.array_equal(a, b)
    assert not isinstance(plain, Saves) and isinstance(saving, Saves)
    assert sum(plain.read) == sum(map(len, prompts())) + 5 * len(prompts())
    assert sum(saving.read) < 0.6 * sum(plain.read)
    assert max(saving.read) <= CHUNK and max(PrefixRunner(plain, 16).chunk, 1) == 16


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    runner = PrefixRunner(Saving(context=10), 128)
    runner.reset()
    with pytest.raises(UsageError, match="11 tokens don't fit in a context of 10"):
        runner.feed(np.zeros(11, np.int64))


class Steady(Saving):
    cuts_matter = False


def answer(runner: Any, prompt: NDArray[np.int64], steps: int) -> list[int]:
    logits = ask(runner, prompt, steps)
    return [int(rows[-1].argmax()) for rows in logits]


@pytest.mark.parametrize("wrong_from", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("length", [5, 20, 30])
def test_what_is_foreseen_decides_nothing(wrong_from: int, length: int) -> None:
    prompt, steps = prompts()[0], 20
    right = answer(Steady(), prompt, steps)
    guess = [token if at < wrong_from else (token + 1) % VOCAB for at, token in enumerate(right)]
    guess = (guess + [3] * 40)[:length]
    inner = Steady()
    runner = ForeseeingRunner(PrefixRunner(inner, 128))
    for _ in range(2):  # the beginning is known the second time
        runner.foresee(tuple(guess))
        assert answer(runner, prompt, steps) == right
    # And without anything foreseen, what was before means nothing.
    assert answer(runner, prompt, steps) == right


def test_an_answer_that_is_foreseen_is_read_in_one_call() -> None:
    prompt, inner = prompts()[0], Steady()
    right = answer(Steady(), prompt, 20)
    runner = ForeseeingRunner(inner)
    runner.foresee(tuple(right[:20]))
    assert answer(runner, prompt, 20) == right
    assert inner.read == [len(prompt), 20]


def test_no_more_is_foreseen_than_the_context_holds() -> None:
    inner = Steady(context=14)
    runner = ForeseeingRunner(inner)
    prompt = np.arange(10)
    right = answer(Steady(), prompt, 4)
    runner.foresee((*right, *right, *right))
    assert answer(runner, prompt, 4) == right
    assert inner.read[:2] == [10, 4]
