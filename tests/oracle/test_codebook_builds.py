"""A container's codes arrive in finished artifacts as they are: dequantised from the files, the numbers are those that
the package's own reader returns, bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from needle.model import export, quantize

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import make_sample
from needle_export.config.rules import Rules
from needle_export.targets import find_target
from tests.oracle.test_checkpoint_container import BOOKS, expected_tensors, write_export
from tests.support.coded_builds import compiled
from tests.support.containers import TERNARY, container_bytes

pytest.importorskip("onnxruntime")
pytest.importorskip("coremltools")

#: Every row is whole groups of 128, as the published model's are.
GEOMETRY = dataclasses.replace(
    SMALL, d_model=512, engram_sub_dim=128, engram_slots=32, num_layers=2, global_layers=(1,), heads=()
)
WIDTHS = {"q_proj": TERNARY, "k_proj": 3, "v_proj": 1, "gate_proj": 2, "out_proj": 2, "key_proj": 4, "value_proj": 3}


def _mixed(slot):
    """Every width of the format somewhere; tables of two bits, lanes of one to four."""
    if slot.tensor.endswith("/embedding"):
        return 2 if slot.tensor.startswith("engrams") else 3
    return WIDTHS.get(slot.tensor.rpartition("/")[0].rpartition("/")[2], 4 if slot.tensor.endswith("phi_res") else 2)


@pytest.fixture(scope="module", params=["upstream", "mixed"])
def container(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "model.cact"
    # Factors of lanes go into an op or into norms; of one they leave the norms alone.
    tensors = {n: np.ones_like(a) if "/mhc_a_" in n else a for n, a in make_sample(GEOMETRY, 6).items()}
    if request.param == "upstream":
        write_export(path, GEOMETRY, tensors)
    else:
        path.write_bytes(container_bytes(GEOMETRY, tensors, bits=_mixed, group=128, books=BOOKS))
    return path


def matrix_of(expected, tensor, layer):
    """A tensor of the tree as rows of outputs [O, I]."""
    whole = expected[tensor.replace("engrams/", "engrams_0/")]
    if tensor.endswith("/embedding"):
        return whole.reshape(-1, whole.shape[-1])
    return (whole if layer < 0 else whole[layer]).T


@pytest.mark.parametrize("target", ["onnx", "coreml"])
def test_the_matrices_of_an_artifact_are_those_of_the_packages_reader(container, target, tmp_path):
    expected = expected_tensors(GEOMETRY, container)
    folder, reference, _ = compiled(read_checkpoint(container), tmp_path / "out", target, Rules("codebook"))
    turn = quantize._cq_hadamard_np(128)
    seen = set()
    for read in find_target(target).read_matrices(folder):
        if not read.form.startswith("codes"):
            continue
        assert not read.fault and read.form == "codesx128" and read.scales is not None
        units = read.values.reshape(len(read.values), -1, 128) * read.scales[:, :, None]
        numbers = (units @ turn).reshape(read.values.shape)
        at = 0
        for parameter in read.claim.parameters:
            wanted = reference[parameter, read.claim.site]
            right = matrix_of(expected, wanted.tensor, wanted.layer)
            assert numbers[at : at + wanted.rows].tobytes() == np.ascontiguousarray(right).tobytes(), wanted.tensor
            at += wanted.rows
            seen.add((wanted.tensor, wanted.layer))
        assert at == len(numbers)
    header, _ = export.read_export(container)
    assert header is not None
    # Of each block five projections and three of lanes, but for the last one's mixing; tables and the engram's two.
    assert len(seen) == 8 * GEOMETRY.num_layers - 1 + 4
