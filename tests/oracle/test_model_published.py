"""The reference model against the oracle at the published geometry and its ladder rungs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needle.model.architecture import TransformerConfig, ladder_config, ladder_slice

from needle_export.checkpoint.checkpoint import Checkpoint, read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample
from needle_export.model.network import Needle
from tests.support import models, oracle

pytestmark = pytest.mark.published

#: The largest difference of a logit seen is 1.1e-5, where logits spread by 0.56 and reach 3.
LOGITS = 5e-5
HEADS = 1e-5
LENGTH = 96
RUNGS = (2, 3, 8, 19, 20)


@dataclasses.dataclass(frozen=True)
class Parent:
    """The whole ladder, as each side holds it."""

    ours: Checkpoint
    config: TransformerConfig
    tree: oracle.Tree


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Parent:
    path = tmp_path_factory.mktemp("published") / "needle3.safetensors"
    tensors = make_sample(PUBLISHED, 0)
    write_checkpoint(path, PUBLISHED, tensors, dtype="float16")
    tree = jax.tree.map(jnp.asarray, oracle.to_tree(tensors))
    return Parent(read_checkpoint(path), oracle.oracle_config(PUBLISHED), tree)


@pytest.mark.parametrize("depth", RUNGS)
def test_rung(depth: int, parent: Parent) -> None:
    config, tree = parent.config, parent.tree
    if depth < PUBLISHED.num_layers:
        config, tree = ladder_config(config, depth), ladder_slice(tree, config, depth)
    tokens = models.tokens_for(PUBLISHED, LENGTH, batch=2, seed=6)
    theirs = models.compile_oracle(config, ("confidence",))(tree, tokens)
    rung = slice_ladder(parent.ours, depth)
    assert rung.geometry.num_layers == depth
    net = Needle(rung.geometry, rung.tensors, rung.permutations)
    ours = models.answers(net, tokens, ("confidence",))
    models.assert_lively(theirs["logits"], tokens)
    assert np.ptp(theirs["confidence"]) > 100 * HEADS
    found = models.differences(theirs, ours)
    assert found["logits"] <= LOGITS
    assert found["confidence"] <= HEADS
    np.testing.assert_array_equal(theirs["logits"].argmax(-1), ours["logits"].argmax(-1))
