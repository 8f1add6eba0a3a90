"""Training goes on where it stopped, and what it makes is whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from needle_export import demo
from needle_export.checkpoint.geometry import SMALL
from needle_export.config.progress import NullProgress
from needle_export.demo import confidence
from needle_export.demo import make as making
from needle_export.demo.confidence import Judged, _area, train_head
from needle_export.demo.make import Confidence, Made, make
from needle_export.demo.training import Schedule, Training
from needle_export.errors import BadInput

GEOMETRY = dataclasses.replace(SMALL, vocab_size=1024, sliding_window=128)
QUICK = Schedule(steps=4, requests=3, warmup=2)


def tiny(schedule: Schedule = QUICK, seed: int = 3) -> Training:
    class Bytes:
        bos_id, eos_id = 2, 1

        def encode(self, text: str) -> list[int]:
            return [4 + b for b in text.encode()][-40:]

    return Training(making.demo_tools(), Bytes(), seed, schedule, GEOMETRY)


def run(training: Training, told: Any = lambda *_: None) -> Training:
    training.run(told, lambda: None)
    return training


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run(tiny())
    broken = tiny()

    def stop(step: int, loss: float, depth: int) -> None:
        if step == 2:
            broken.save(tmp_path / "state.pt")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(broken, stop)
    again = tiny()
    again.load(tmp_path / "state.pt")
    assert again.step == 2
    run(again)
    for name, weight in whole.weights.items():
        assert torch.equal(weight, again.weights[name]), name


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    tiny().save(tmp_path / "state.pt")
    for other in (tiny(seed=4), tiny(dataclasses.replace(QUICK, steps=5))):
        with pytest.raises(BadInput, match="another seed or schedule"):
            other.load(tmp_path / "state.pt")


def test_losses_fall_and_several_depths_are_trained() -> None:
    losses, depths = [], set()

    def told(step: int, loss: float, depth: int) -> None:
        losses.append(loss)
        depths.add(depth)

    run(tiny(Schedule(steps=25, requests=3, warmup=3)), told)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert depths == {2, 3}


def test_rates_rise_and_fall() -> None:
    shares = [Schedule(steps=100, warmup=10).share_at(step) for step in range(100)]
    assert shares[0] == 0.1 and shares[9] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert 0.01 <= shares[-1] < 0.02


def test_making_leaves_what_the_package_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing that is learnt in four steps ends its answers.
    monkeypatch.setattr(confidence, "LONGEST", 3)

    def made() -> Made:
        return make(tmp_path, 1, QUICK, NullProgress(), Confidence(2, 3, 1), GEOMETRY, 6, sentences=4000)

    first = made()
    assert set(first.files) == {demo.CHECKPOINT, demo.TOKENIZER, demo.TOOLS, demo.HELDOUT, demo.CARD}
    assert set(first.accuracy) == {2, 3}
    assert sum(count for _, count in first.kinds.values()) == 6
    text = (tmp_path / demo.CARD).read_text()
    assert f"| 3 | {100 * first.accuracy[3]:.1f} % |" in text and "not Needle 3" in text
    lines = (tmp_path / demo.HELDOUT).read_text().splitlines()
    assert len(lines) == 6 and all(set(json.loads(line)) == {"query", "answers"} for line in lines)
    # The same command goes on, here from the end: nothing is trained again.
    again = made()
    assert (again.accuracy, again.seconds) == (first.accuracy, first.seconds)
    (tmp_path / "training-seconds.json").unlink()
    with pytest.raises(BadInput, match="how long training has taken"):
        made()


def test_the_confidence_head_learns_what_can_be_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(GEOMETRY.d_model, generator=generator)

    def example(right: bool) -> Judged:
        cells = torch.randn(12, GEOMETRY.num_layers + 1, GEOMETRY.d_model, generator=generator)
        cells[-1] += direction * (2 if right else -2)
        return Judged(cells.half(), right)

    examples = [example(Random(k).random() < 0.5) for k in range(160)]
    weights, area = train_head(GEOMETRY, examples, 0.9, 0, 6, lambda: None)
    assert area > 0.9
    assert all(name.startswith("confidence_head/") for name in weights)


def test_the_area_counts_pairs() -> None:
    assert _area([(2.0, True), (1.0, False), (0.5, True), (0.5, False)]) == 2.5 / 4
