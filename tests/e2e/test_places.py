"""Runners of targets with fixed lengths go back to an earlier place of a sequence, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from needle_export.generate.prefix import Saves
from needle_export.targets.coreml.target import CoremlTarget
from needle_export.targets.tflite.target import TfliteTarget
from tests.support.coreml_builds import CONTEXT as COREML_CONTEXT
from tests.support.coreml_builds import GEOMETRY
from tests.support.tflite_builds import CONTEXT as TFLITE_CONTEXT


def goes_back(runner: Any, context: int) -> None:
    assert isinstance(runner, Saves)
    ids = np.random.default_rng(2).integers(1, GEOMETRY.vocab_size, context)
    for length in (1, context // 2):
        runner.reset()
        runner.feed(ids[:length])
        saved = runner.save()
        rest = [ids[length:-2], ids[-2:-1], ids[-1:]]
        first = [runner.feed(piece) for piece in rest]
        state = {name: value.copy() for name, value in runner.state().items()}
        runner.reset()
        runner.feed(ids[::-1])
        runner.restore(saved)
        assert all(np.array_equal(runner.feed(piece), logits) for piece, logits in zip(rest, first, strict=True))
        assert all(np.array_equal(runner.state()[name], value) for name, value in state.items())


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_tflite(weights: str, builds: Any) -> None:
    goes_back(TfliteTarget().open(builds[weights][0]), TFLITE_CONTEXT)


@pytest.mark.parametrize(("weights", "system"), [("fp16", "ios18"), ("fp16", "ios17")])
def test_coreml(weights: str, system: str, packages: Any) -> None:
    out, _ = packages.get(weights, os=system)
    goes_back(CoremlTarget().open(out), COREML_CONTEXT)
