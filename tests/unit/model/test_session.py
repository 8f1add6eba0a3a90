"""The reference as a session says what the whole sequence says, and goes back where it was asked to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import make_sample
from needle_export.errors import UsageError
from needle_export.generate.prefix import ForeseeingRunner, PrefixRunner, Saves
from needle_export.model.network import Needle
from needle_export.model.session import ReferenceSession
from tests.support.models import build

TOKENS = np.random.default_rng(3).integers(1, SMALL.vocab_size, 60)


@pytest.fixture(scope="module")
def net() -> Needle:
    return build(SMALL, make_sample(SMALL, 0))


@pytest.mark.parametrize("cuts", [(60,), (37, 38, 39, 60), (1, 2, 3, 60)])
def test_it_says_what_the_whole_sequence_says(net: Needle, cuts: tuple[int, ...]) -> None:
    with torch.inference_mode():
        expected = net(torch.from_numpy(TOKENS).unsqueeze(0))[0].numpy()
    session = ReferenceSession(net, 60)
    for _ in range(2):
        session.reset()
        got = np.concatenate([session.feed(p) for p in np.split(TOKENS, cuts[:-1])])
        assert np.abs(got - expected).max() < 1e-5
    assert session.max_chunk == SMALL.sliding_window < 60


def test_it_goes_back_exactly(net: Needle) -> None:
    session = ReferenceSession(net, 60)
    assert isinstance(session, Saves)
    session.feed(TOKENS[:30])
    saved = session.save()
    first = session.feed(TOKENS[30:])
    session.restore(saved)
    assert np.array_equal(session.feed(TOKENS[30:]), first)


def test_what_does_not_fit_is_refused(net: Needle) -> None:
    with pytest.raises(UsageError, match="61 tokens don't fit in a context of 60"):
        ReferenceSession(net, 60).feed(np.zeros(61, np.int64))


def test_threads_are_its_own_affair(net: Needle) -> None:
    before = torch.get_num_threads()
    ReferenceSession(net, 60, threads=before + 1).feed(TOKENS[:2])
    assert torch.get_num_threads() == before


def test_sparing_work_changes_no_answer(net: Needle) -> None:
    """The greedy answer, whatever is known or foreseen."""

    def answer(runner: object, prompt: np.ndarray) -> list[int]:
        runner.reset()  # type: ignore[attr-defined]
        rows, out = runner.feed(prompt), []  # type: ignore[attr-defined]
        for _ in range(10):
            out.append(int(rows[-1].argmax()))
            rows = runner.feed(np.array(out[-1:]))  # type: ignore[attr-defined]
        return out

    plain = ReferenceSession(net, 60)
    inner = ReferenceSession(net, 60)
    spared = ForeseeingRunner(PrefixRunner(inner, inner.max_chunk))
    for end in (40, 41, 45):
        prompt = np.concatenate([TOKENS[:36], TOKENS[end - 4 : end]])
        expected = answer(plain, prompt)
        spared.foresee((*expected[:6], 1, 2))
        assert answer(spared, prompt) == expected
