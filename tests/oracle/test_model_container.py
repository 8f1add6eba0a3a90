"""A container and the float checkpoint it was written from, through our readers and model, against the oracle.

The oracle's weights come from the package's own reading of the container (and its own fake quantisation),
never from our reader.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from needle.model import export, quantize

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample
from needle_export.model.network import Needle
from tests.oracle.test_checkpoint_container import expected_tensors
from tests.support import models, oracle
from tests.support.geometries import ALL_HEADS
from tests.support.models import Answers, Oracle

LOGITS = 5e-6
HEADS = 1e-5
EVERY_HEAD = ("embedding", "confidence", "router")
GEOMETRY = models.changed(SMALL, d_model=160, num_layers=4, engram_layers=(0, 3), heads=ALL_HEADS)
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Written:
    """One model in both formats, and the compiled oracle of its geometry."""

    floats: Path
    container: Path
    tensors: Tensors
    oracle: Oracle
    tokens: np.ndarray


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    tensors = make_sample(GEOMETRY, 0)
    config = oracle.oracle_config(GEOMETRY)
    paths = folder / "needle3.safetensors", folder / "needle3.cact"
    write_checkpoint(paths[0], GEOMETRY, tensors, dtype="float16")
    export.write_export(oracle.to_tree(tensors), config, paths[1], kv_window=GEOMETRY.kv_window)
    return Written(*paths, tensors, models.compile_oracle(config, EVERY_HEAD),
                   models.tokens_for(GEOMETRY, 80, batch=2))


def ours(path: Path, tokens: np.ndarray) -> Answers:
    checkpoint = read_checkpoint(path)
    net = Needle(checkpoint.geometry, checkpoint.tensors, checkpoint.permutations)
    return models.answers(net, tokens, EVERY_HEAD)


def theirs_from_the_container(written: Written) -> Tensors:
    """The package's reading; what a container leaves out only serves a training loss."""
    tensors = expected_tensors(GEOMETRY, written.container)
    for name in ("hada_p1", "hada_p2", "embedding_head/proj/bias"):
        tensors.pop(name)
    return tensors | {name: written.tensors[name] for name in ("embedding_head/log_temp", "embedding_head/bias")}


def assert_equal(theirs: Answers, found: Answers) -> None:
    difference = models.differences(theirs, found)
    assert difference.pop("logits") <= LOGITS
    assert {head: value for head, value in difference.items() if value > HEADS} == {}
    np.testing.assert_array_equal(theirs["logits"].argmax(-1), found["logits"].argmax(-1))


def test_a_container(written: Written) -> None:
    theirs = written.oracle(oracle.to_tree(theirs_from_the_container(written)), written.tokens)
    models.assert_lively(theirs["logits"], written.tokens)
    assert_equal(theirs, ours(written.container, written.tokens))


def test_its_float_checkpoint(written: Written) -> None:
    theirs = written.oracle(oracle.to_tree(written.tensors), written.tokens)
    models.assert_lively(theirs["logits"], written.tokens)
    assert_equal(theirs, ours(written.floats, written.tokens))


def test_the_two_differ_by_what_four_bits_cost(written: Written) -> None:
    floats, packed = ours(written.floats, written.tokens), ours(written.container, written.tokens)
    assert np.abs(floats["logits"] - packed["logits"]).max() > 1000 * LOGITS
    # Not another model: logits of the same position still point the same way.
    cosine = np.sum(floats["logits"] * packed["logits"], -1) / (
        np.linalg.norm(floats["logits"], axis=-1) * np.linalg.norm(packed["logits"], axis=-1))
    assert cosine.mean() > 0.8


def test_the_package_s_fake_quantisation_gives_the_container(written: Written) -> None:
    # No file in between: the package quantises the float weights as it does while training.
    tree = quantize.cq_quantize_params(oracle.to_tree(written.tensors), quantize.WEIGHT_BITS)
    theirs = written.oracle(tree, written.tokens)["logits"]
    found = ours(written.container, written.tokens)["logits"]
    assert np.abs(theirs - found).max() <= LOGITS
