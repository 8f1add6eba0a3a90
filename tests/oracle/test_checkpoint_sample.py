"""Random checkpoints are lively: every mechanism changes what the oracle predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from needle_export.checkpoint.geometry import PUBLISHED, SMALL, Geometry
from needle_export.checkpoint.sample import make_sample
from tests.support import oracle

GEOMETRIES = [pytest.param(SMALL, id="small"),
              pytest.param(PUBLISHED, id="published", marks=[pytest.mark.slow, pytest.mark.published])]
Tensors = dict[str, np.ndarray]


def tokens_for(geometry: Geometry) -> np.ndarray:
    return np.random.RandomState(5).randint(1, geometry.vocab_size, (1, 96))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_predictions_vary(geometry: Geometry, seed: int) -> None:
    tokens = tokens_for(geometry)
    logits = oracle.logits(geometry, make_sample(geometry, seed), tokens)
    predicted = logits[0].argmax(-1)
    assert np.isfinite(logits).all()
    assert len(set(predicted.tolist())) >= 20
    assert (predicted == tokens[0]).mean() < 0.25


def silenced(fragment: str, factor: float = 0.0) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {name: array * np.float16(factor) if fragment in name else array
                for name, array in tensors.items()}
    return change


def neutral_taps(tensors: Tensors) -> Tensors:
    out = dict(tensors)
    for name in out:
        if name.endswith(("q_taps", "k_taps", "v_taps")):
            out[name] = np.zeros_like(out[name])
            out[name][:, 0] = 1
    return out


MECHANISMS: dict[str, Callable[[Tensors], Tensors]] = {
    "engram": silenced("engrams_0/embedding"),
    "taps": neutral_taps,
    "attention": silenced("out_proj"),
    "gate": silenced("gate_proj"),
    "mlp": silenced("hadamard_mlp/d4"),
    "condition": silenced("cond_u"),
    "condition scores": silenced("cond_v"),
    "mlp bias": silenced("hadamard_mlp/b2"),
    "lanes in": silenced("mhc_b_pre"),
    "lanes out": silenced("mhc_b_post"),
    "lanes between": silenced("mhc_b_res", 0.5),
    "lane weights in": silenced("mhc_phi_pre"),
    "lane weights out": silenced("mhc_phi_post"),
    "lane weights between": silenced("mhc_phi_res"),
    "key norm": silenced("k_norm"),
    "last norm": silenced("final_norm"),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_no_mechanism_is_dead(geometry: Geometry) -> None:
    tokens, tensors = tokens_for(geometry), make_sample(geometry, 0)
    logits = oracle.logits(geometry, tensors, tokens)
    effects = {name: np.abs(oracle.logits(geometry, change(tensors), tokens) - logits).max()
               for name, change in MECHANISMS.items()}
    if geometry.sliding_window < tokens.shape[1]:
        wide = dataclasses.replace(geometry, sliding_window=0)
        effects["window"] = np.abs(oracle.logits(wide, tensors, tokens) - logits).max()
    assert {name: value for name, value in effects.items() if value < 1e-3} == {}


def test_the_confidence_head_discriminates() -> None:
    tokens = np.random.RandomState(1).randint(1, SMALL.vocab_size, (8, 40))
    answers = oracle.head(SMALL, make_sample(SMALL, 0), tokens, "confidence")
    assert answers.shape == (8,) and answers.std() > 1e-2
