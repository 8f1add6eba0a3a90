"""A finished file's matrices are the checkpoint's, bit for bit, or the build says which row isn't."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL, HeadGeometry
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import VerificationFailed
from needle_export.report.text import render_text
from needle_export.targets.tflite.store import WeightStore
from tests.support.forged import redescribe
from tests.support.tflite_builds import GEOMETRY, QUIET, options, scale_wrongly
from tests.support.tflite_tamper import QKV, Spoiled, exchange, spoil_finished

pytest.importorskip("litert_torch")
pytest.importorskip("ai_edge_litert")

OUT_PROJ = "stack/layers/block/self_attn/out_proj/kernel"


@pytest.fixture
def refused(builds, tmp_path, monkeypatch):
    """A build of a spoiled file, which must be refused: what it says."""

    def run(how=None, **changes):
        if how is not None:
            spoil_finished(monkeypatch, how)
        asked = options(builds.checkpoint, tmp_path / "dist", **{"weights": "int8", "buckets": (16,), **changes})
        with pytest.raises(VerificationFailed) as failure:
            pipeline.build(asked, QUIET)
        assert failure.value.exit_code == 4 and list(tmp_path.iterdir()) == []
        assert (failure.value.where, failure.value.fix) == ("tflite", "nothing was published")
        return failure.value.what

    return run


# Good builds


def stored_bytes(width, scale, layers=GEOMETRY.num_layers):
    """Of the matrices that are stored in less than float32: the checkpoint's tensors, by their own shapes."""
    g = GEOMETRY
    outputs = g.num_heads * (g.qk_head_dim + g.v_head_dim) + g.num_kv_heads * (g.qk_head_dim + g.v_head_dim)
    matrices = [(g.vocab_size, g.d_model), (len(g.engram_layers) * g.engram_tables * g.engram_slots, g.engram_sub_dim)]
    matrices += [(outputs, g.d_model), (g.d_model, g.num_heads * g.v_head_dim)] * layers
    return sum(rows * (columns * width + scale) for rows, columns in matrices)


@pytest.mark.parametrize(("weights", "width", "scale"), [("int8", 1, 4), ("fp16", 2, 0)])
def test_the_report_says_how_much_was_compared(weights, width, scale, builds):
    out, report = builds[weights]
    compared = report.artifacts[0].parity["weights"]
    g = GEOMETRY
    sites = len(g.engram_layers)
    # q, k, v, gate and out of each block, the two tables, and each site's two small matrices, which stay float32.
    assert compared["matrices"] == 5 * g.num_layers + 2 + 2 * sites
    assert compared["bytes"] == stored_bytes(width, scale) + 2 * sites * g.engram_width * g.d_model * 4
    # The lanes' and the MLP's two, all small: factors went into them.
    assert compared["folded"] == 3 * g.num_layers
    text = " ".join(render_text(report, width=200).split())
    assert f"{compared['matrices']} matrices" in text and "the checkpoint's in every bit" in text
    assert pipeline.verify(out, checkpoint=None, progress=QUIET) == report


def test_float32_is_compared_where_nothing_was_folded(builds):
    compared = builds["fp32"][1].artifacts[0].parity["weights"]
    assert compared["matrices"] >= GEOMETRY.num_layers and compared["folded"] >= GEOMETRY.num_layers
    assert compared["bytes"] >= GEOMETRY.num_layers * 4 * GEOMETRY.d_model * GEOMETRY.num_heads * GEOMETRY.v_head_dim


#: Wide enough for what the small model leaves in float32, and with two matrices of one shape in a block.
WIDE = dataclasses.replace(
    SMALL,
    d_model=128,
    num_heads=2,
    num_kv_heads=1,
    out_vocab=200,
    engram_sub_dim=32,
    engram_layers=(0, 1),
    heads=(HeadGeometry("confidence", 4, 80, 1),),
)


#: Tensors of it that 4-bit builds hold in halves: of a block six Kronecker factors, five vectors of the MLP, three taps
#: and five scales of norms; the engram's taps, the last norm.
HALVES = 3 * (6 + 5 + 3 + 5) + 2


def wide(folder, **changes):
    """A build of it; where its checkpoint is, and its options."""
    write_sample(folder / "wide.safetensors", WIDE, 4)
    asked = {"context": 24, "buckets": (8,), "heads": ("confidence",), **changes}
    return options(folder / "wide.safetensors", folder / "dist", **asked)


@pytest.mark.parametrize(("weights", "kind"), [("int8", "int8"), ("fp16", "halves"), ("int4", "forms")])
def test_factors_sites_a_cut_vocabulary_and_a_head(weights, kind, tmp_path):
    asked = wide(tmp_path, weights=weights)
    report = pipeline.build(asked, QUIET)
    artifact = report.artifacts[0]
    assert {source for source, *_ in artifact.parity["scheme"][kind]} >= {
        "stack/mhc_phi_res",
        "engrams/key_proj/kernel",
        "engrams/embedding",
        "embedding/embedding",
        "confidence_head/proj/kernel",
    }
    # Of attention and lanes, the tables, the sites, the head. The last block's lanes aren't mixed any more, and what is
    # left of their matrix is small, as the MLP's two are; at 4 bits that is no reason, and vectors are halves.
    small = (2 + 2 * 3 + HALVES) * (weights == "int4")
    assert artifact.parity["weights"]["matrices"] == 8 * 3 - 3 + 2 + 2 * 2 + 1 + small
    assert artifact.parity["weights"]["folded"] == (0 if small else 2 * 3 + 1)
    assert pipeline.verify(asked.out, checkpoint=asked.checkpoint, progress=QUIET) == report


@pytest.mark.parametrize("weights", ["int8", "fp16", "int4"])
def test_equal_matrices_are_no_fault(weights, tmp_path):
    """They become one constant, under the name of one: of two blocks, of two of a block, of two sites."""
    tensors = dict(make_sample(WIDE, 4))
    out_proj, gate = (tensors[f"stack/layers/block/self_attn/{name}_proj/kernel"] for name in ("out", "gate"))
    out_proj[2] = out_proj[0]
    out_proj[1] = gate[1]
    tensors["engrams_1/key_proj/kernel"] = tensors["engrams_0/key_proj/kernel"]
    asked = wide(tmp_path, weights=weights)
    write_checkpoint(tmp_path / "wide.safetensors", WIDE, tensors)
    compared = pipeline.build(asked, QUIET).artifacts[0].parity["weights"]
    assert compared["matrices"] == 8 * 3 - 3 + 2 + 2 * 2 + 1 + (2 + 2 * 3 + HALVES) * (weights == "int4")


def test_equal_norms_are_no_fault(tmp_path):
    """As in a model that has hardly been trained; and a diagonal that equals them where it matters."""
    tensors = dict(make_sample(WIDE, 4))
    for name, value in tensors.items():
        if name.endswith(("norm/scale", "Norm_0/scale")):
            value[...] = 0.5
    tensors["stack/layers/block/hadamard_mlp/d1"][0] = 1.5
    asked = wide(tmp_path, weights="int4")
    write_checkpoint(tmp_path / "wide.safetensors", WIDE, tensors)
    compared = pipeline.build(asked, QUIET).artifacts[0].parity["weights"]
    assert compared["matrices"] == 8 * 3 - 3 + 2 + 2 * 2 + 1 + 2 + 2 * 3 + HALVES


def test_what_the_names_could_hide_the_logits_find(tmp_path, monkeypatch):
    """Two matrices of one shape, read with their scales by each other's ops in one block."""

    def swap(file):
        out, gate = "layers.2.attention.out_proj", "layers.2.attention.q_proj+k_proj+v_proj+gate_proj[208:336]"
        assert file.matrix(out).shape == file.matrix(gate).shape
        file.exchange_operands(out, gate, scales=True)

    spoil_finished(monkeypatch, swap)
    with pytest.raises(VerificationFailed, match=r"logits differ by .* in the last block"):
        pipeline.build(wide(tmp_path, weights="int8"), QUIET)


# Spoiled on the way into the file


@pytest.mark.parametrize("layer", [0, 3, 4])
def test_every_other_scale_wrong_by_two_percent(layer, refused, monkeypatch):
    """Of which logits tell nothing in a late block."""
    met = scale_wrongly(monkeypatch, f"layers.{layer}.attention.out_proj", 1.02)
    said = refused()
    assert met
    assert said.startswith(f"{OUT_PROJ} of block {layer} (content): 48 of 96 rows differ, row 1 first, whose scale is ")


@pytest.mark.parametrize("other", [1, 3])
def test_another_matrix_under_this_ones_name(other, refused, monkeypatch):
    """Of another block, which makes two matrices one constant; and its own upside down."""
    right, seen = WeightStore.matrix, {}

    def exchanged(self, weight, data, factor=None):
        seen.setdefault(weight.name, data)
        if weight.name == "net.layers.3.attention.out_proj":
            data = seen[f"net.layers.{other}.attention.out_proj"] if other != 3 else data[::-1].copy()
        return right(self, weight, data, factor)

    monkeypatch.setattr(WeightStore, "matrix", exchanged)
    said = refused()
    if other == 3:
        assert said == f"{OUT_PROJ} of block 3 (content): 96 of 96 rows differ, row 0 first, which holds row 95"
    else:
        assert said.startswith("layers.3/matmul") and f"of decode reads {OUT_PROJ} of block 1 (content)" in said


# Spoiled in the finished file


def test_one_bit(refused):
    def flip(values):
        values[77, 31] ^= 1

    said = refused(lambda file: file.matrix("layers.4.attention.out_proj").change(flip))
    assert said.startswith(f"{OUT_PROJ} of block 4 (content): 1 of 96 rows differ, row 77 first, where 1 of 256 values")
    assert "(at 31: " in said


def test_one_bit_of_a_half(refused):
    def flip(values):
        values.view("u2")[77, 31] ^= 1

    said = refused(lambda file: file.halves("layers.4.attention.out_proj").change(flip), weights="fp16")
    assert said.startswith(f"{OUT_PROJ} of block 4 (content): 1 of 96 rows differ, row 77 first")


def test_the_last_bit_of_a_scale(refused):
    def flip(scales):
        scales.view("u4")[5] ^= 1

    said = refused(lambda file: file.scales(f"layers.2.attention.{QKV}").change(flip))
    q_proj = "stack/layers/block/self_attn/q_proj/kernel of block 2 (routing)"
    assert said.startswith(f"{q_proj}: 1 of 192 rows differ, row 5 first, whose scale is ")


def test_two_blocks_matrices_exchanged_with_their_scales(refused):
    def swap(file):
        for part in (file.matrix, file.scales):
            one, other = (part(f"layers.{layer}.attention.out_proj") for layer in (1, 3))
            held = one.read(), other.read()
            one.change(partial(np.copyto, src=held[1]))
            other.change(partial(np.copyto, src=held[0]))

    said = refused(swap)
    assert f"{OUT_PROJ} of block 1 (content): 96 of 96 rows differ" in said and "(and 1 more)" in said
    assert f"holds row 0 of {OUT_PROJ} of block 3" in said


def test_two_rows_exchanged_with_their_scales(refused):
    """Rows of k and of v, which lie in one matrix behind q's."""
    k, v = 192 + 7, 192 + 96 + 11

    def swap(file):
        for part in (file.matrix, file.scales):
            part(f"layers.3.attention.{QKV}").change(partial(exchange, a=k, b=v))

    said = refused(swap)
    assert said.startswith(
        "stack/layers/block/self_attn/k_proj/kernel of block 3 (routing): 1 of 96 rows differ, row 7 first, "
        "which holds row 11 of stack/layers/block/self_attn/v_proj/kernel of block 3 (content)"
    )


def test_ops_of_two_blocks_that_read_each_others_matrices(refused):
    def swap(file: Spoiled):
        file.exchange_operands("layers.1.attention.out_proj", "layers.3.attention.out_proj")

    # Found by the first that is compared; the scales stand behind the ops and are the others' too.
    assert f"reads {OUT_PROJ} of block" in refused(swap)


def test_a_scale_in_the_tensor(refused):
    said = refused(lambda file: file.tensor_scale("layers.2.attention.out_proj", 1.001))
    assert said.startswith("the matrix layers.2.attention.out_proj: its tensor has a scale other than 1")


# In blocks of 4 bits


def test_one_level_of_four_bits(refused):
    def flip(levels):
        levels[77, 15] ^= 0x10

    said = refused(lambda file: file.levels("layers.4.attention.out_proj").change(flip), weights="int4")
    assert said.startswith(f"{OUT_PROJ} of block 4 (content): 1 of 96 rows differ, row 77 first, where 1 of 256 values")
    assert "(at 31: " in said


def test_the_last_digit_of_a_blocks_scale(refused):
    def flip(scales):
        scales.view("u2")[5, 2] ^= 1 << 3  # of the 8 that bfloat16 has

    said = refused(lambda file: file.block_scales("layers.2.attention.out_proj").change(flip), weights="int4")
    what = f"{OUT_PROJ} of block 2 (content): 1 of 96 rows differ, row 5 first, whose scale of columns 64"
    assert said.startswith(what)


def test_two_blocks_of_a_row_exchanged(refused):
    def swap(file):
        for part, width in ((file.levels, 16), (file.block_scales, 1)):
            one, other = slice(0, width), slice(width, 2 * width)
            part("embedding").change(partial(exchange, a=(3, one), b=(3, other)))

    said = refused(swap, weights="int4")
    assert said.startswith("embedding/embedding (vocabulary): 1 of ") and " rows differ, row 3 first, where " in said


def test_the_last_bit_of_a_lanes_factor(tmp_path, monkeypatch):
    """Behind the op, apart from the scales of blocks."""

    def flip(factors):
        factors.view("u4")[1] ^= 1

    lanes = "layers.1.lanes.phi_pre+phi_post+phi_res"
    spoil_finished(monkeypatch, lambda file: file.scales(lanes).change(flip))
    said = r"phi_pre of block 1 .*: 1 of 4 rows differ, row 1 first, whose scale "
    with pytest.raises(VerificationFailed, match=said):
        pipeline.build(wide(tmp_path, weights="int4"), QUIET)


# In half precision beside them


@pytest.mark.parametrize(("name", "layout", "place", "what"), [
    ("layers.2.mlp.w1a[:,:6]", "", (3, 1), "hadamard_mlp/w1a of block 2 (mixing): 1 of 8 rows differ, row 3 first"),
    ("layers.2.mlp.w2b", "", (0, 5), "hadamard_mlp/w2b of block 2 (mixing): 1 of 16 rows differ, row 0 first"),
    ("layers.3.mlp.d2", "flat", (0, 7), "hadamard_mlp/d2 of block 3 (mixing): 1 of 1 rows differ, row 0 first, where"),
    ("layers.1.norm_in.scale", "flat", 7, "ZCRMSNorm_0/scale of block 1 (norms): 1 of 1 rows differ"),
    ("layers.1.post_norm.scale", "flat", 7, "post_attn_norm/scale of block 1 (norms): 1 of 1 rows differ"),
    ("layers.0.attention.q_norm.scale+k_norm.scale", "each", (4, 2), "k_norm/scale of block 0 (norms): 1 of 2 rows"),
    ("layers.4.attention.q_taps+k_taps+v_taps", "taps", (0, 200), "k_taps of block 4 (routing): 1 of 96 rows differ"),
    ("engram.taps", "taps", (0, 1, 0, 9), "engrams/taps (memory): 1 of 192 rows differ, row 9 first, where 1 of 4"),
])
def test_the_last_bit_of_a_half_beside_4_bits(name, layout, place, what, refused):
    def flip(values):
        values.view("u2")[place] ^= 1

    said = refused(lambda file: file.halves(name, layout).change(flip), weights="int4")
    assert what in said


# Later


def test_a_file_that_was_changed_with_its_report_is_found_with_the_checkpoint(builds, tmp_path):
    out = builds.copy("int8", tmp_path / "dist")
    path = out / "model.tflite"

    def flip(values):
        values[3, 3] ^= 1

    Spoiled(path).matrix("layers.4.attention.out_proj").change(flip)
    redescribe(out)
    # The recorded logits can't tell it.
    pipeline.verify(out, checkpoint=None, progress=QUIET)
    with pytest.raises(VerificationFailed, match=r"out_proj/kernel of block 4 .* row 3 first") as failure:
        pipeline.verify(out, checkpoint=str(builds.checkpoint), progress=QUIET)
    assert failure.value.where == str(out) and "build it again" in failure.value.fix
