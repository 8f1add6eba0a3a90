"""A finished package's matrices are the checkpoint's, bit for bit, or a comparison says which row isn't."""

from __future__ import annotations

import pytest

from needle_export import pipeline
from needle_export.errors import VerificationFailed
from needle_export.measure.weights import compare
from needle_export.targets.coreml.target import CoremlTarget
from tests.support.coreml_builds import GEOMETRY, QUIET
from tests.support.coreml_tamper import Spoiled

pytest.importorskip("coremltools")

SCHEMES = ("fp16", "int8", "int4", "palette4")
OUT_PROJ = "stack/layers/block/self_attn/out_proj/kernel"

_REFERENCES = {}


def matrices(packages, weights):
    """The reference's, made from the report of a build."""
    if weights not in _REFERENCES:
        report = packages.get(weights, os="ios18")[1]
        compiler = pipeline._recompiler(report, report.artifacts[0], str(packages.checkpoint), QUIET)
        _REFERENCES[weights] = compiler.matrices()
    return _REFERENCES[weights]


@pytest.fixture
def fault(packages, tmp_path):
    def run(weights, how):
        copy = Spoiled(packages.copy(tmp_path / "copy", weights, os="ios18"))
        how(copy)
        return str(compare(CoremlTarget().read_matrices(copy.folder), matrices(packages, weights)).fault())

    return run


@pytest.mark.parametrize("weights", SCHEMES)
def test_a_build_says_how_much_was_compared(weights, packages):
    out, report = packages.get(weights, os="ios18")
    compared = compare(CoremlTarget().read_matrices(out), matrices(packages, weights))
    assert compared.fault() is None and compared.table() == report.artifacts[0].parity["weights"]
    # Of attention five, of lanes three (two in the last block), three taps and six factors; the embedding, the
    # tables, the site's two projections and its taps.
    assert len(compared.covered) == GEOMETRY.num_layers * (5 + 3 + 3 + 6) - 1 + 5
    # The MLP's two, each once.
    assert compared.folded == 2 * GEOMETRY.num_layers


@pytest.mark.parametrize(
    ("weights", "parameter", "kind", "at", "column"),
    [("fp16", None, "u2", 7 * 256 + 31, 31), ("int8", "data", "u1", 7 * 256 + 31, 31),
     ("int4", "data", "u1", (7 * 256 + 30) // 2, 30), ("palette4", "indices", "u1", (7 * 256 + 30) // 2, 30)],
)
def test_one_bit(weights, parameter, kind, at, column, fault):
    said = fault(weights, lambda copy: copy.change_one(1, parameter, kind, at))
    assert said.startswith(f"{OUT_PROJ} of block 1 (content): 1 of 96 rows differ, row 7 first, where 1 of 256 values")
    assert f"(at {column}: " in said


@pytest.mark.parametrize(
    ("weights", "parameter", "at", "said"),
    [("int8", "scale", 7, "1 of 96 rows differ, row 7 first, whose scale is "),
     ("int4", "scale", 7 * 8 + 3, "1 of 96 rows differ, row 7 first, whose scale of columns 96 and on is "),
     ("palette4", "lut", 2 * 16 + 5, "16 of 96 rows differ, row 32 first, whose level 5 is ")],
)
def test_the_last_bit_of_a_scale_or_level(weights, parameter, at, said, fault):
    found = fault(weights, lambda copy: copy.change_one(2, parameter, "u2", at))
    assert found.startswith(f"{OUT_PROJ} of block 2 (content): {said}")


def test_two_blocks_matrices_exchanged(fault):
    said = fault("fp16", Spoiled.swap_constants)
    where = f"{OUT_PROJ} of block"
    assert said.startswith(f"{where} 0 (content): 96 of 96 rows differ, row 0 first, which holds row 0 of {where} 2")
    assert said.endswith("(and 1 more)")


def test_with_the_checkpoint_verify_names_the_row(packages, tmp_path, monkeypatch):
    copy = Spoiled(packages.copy(tmp_path / "copy", "int4", os="ios18"))
    copy.change_one(1, "data", "u1", 7 * 128)
    monkeypatch.setattr(pipeline, "check_files", lambda *arguments: None)
    monkeypatch.setattr(pipeline, "check_app_files", lambda *arguments: None)
    said = r"out_proj/kernel of block 1 \(content\): 1 of 96 rows .* row 7 first"
    with pytest.raises(VerificationFailed, match=said):
        pipeline.verify(copy.folder, checkpoint=str(packages.checkpoint), progress=QUIET)
