"""What is wrong with a Core ML package comes out: in a finished one, and in a lowering before anything is published."""

from __future__ import annotations

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.errors import VerificationFailed
from needle_export.graph.ops import op
from needle_export.graph.program import layer_of
from needle_export.targets.coreml.host import Host
from needle_export.targets.coreml.names import block_name
from tests.support.coreml_builds import GEOMETRY, QUIET, options, patched
from tests.support.coreml_tamper import Spoiled
from tests.targets.coreml.packages import read_spec, write_spec

pytest.importorskip("coremltools")

# A finished package


@pytest.fixture
def spoiled(packages, tmp_path, monkeypatch):
    """A copy that is verified as if its hashes were right: only running it can tell."""
    monkeypatch.setattr(pipeline, "check_files", lambda *arguments: None)
    monkeypatch.setattr(pipeline, "check_app_files", lambda *arguments: None)
    return lambda weights: Spoiled(packages.copy(tmp_path / "copy", weights, os="ios18"))


def refused(spoiled):
    with pytest.raises(VerificationFailed) as failure:
        pipeline.verify(spoiled.folder, checkpoint=None, progress=QUIET)
    assert failure.value.exit_code == 4
    return failure.value.what


@pytest.mark.parametrize("weights", ["fp16", "int8", "int4", "palette4"])
def test_an_untouched_copy_is_not_refused(weights, spoiled):
    copy = spoiled(weights)
    assert pipeline.verify(copy.folder, checkpoint=None, progress=QUIET)
    write_spec(copy.package, read_spec(copy.package))
    assert pipeline.verify(copy.folder, checkpoint=None, progress=QUIET)


@pytest.mark.parametrize("how", [Spoiled.flip_signs, Spoiled.flip_one_bit], ids=["a row's signs", "one bit"])
def test_flipped_bits_inside_a_matrix(how, spoiled):
    copy = spoiled("fp16")
    how(copy)
    assert "differ" in refused(copy) or "not finite" in refused(copy)


@pytest.mark.parametrize(
    ("weights", "parameter"), [("int8", "scale"), ("int4", "scale"), ("palette4", "lut")]
)
def test_wrong_scales_and_levels(weights, parameter, spoiled):
    copy = spoiled(weights)
    copy.double_a_scale(parameter)
    assert "differ" in refused(copy)


@pytest.mark.parametrize(("weights", "parameter"), [("int4", "data"), ("palette4", "indices")])
def test_entries_out_of_place(weights, parameter, spoiled):
    copy = spoiled(weights)
    copy.exchange_nibbles(parameter)
    assert "differ" in refused(copy)


def test_two_constants_of_one_shape_exchanged(spoiled):
    copy = spoiled("fp16")
    copy.swap_constants()
    assert "differ" in refused(copy)


@pytest.mark.parametrize("function", ["decode", "prefill_16"])
@pytest.mark.parametrize("state", ["k_00", "v_02", "taps", "engram_history"])
def test_a_lost_state_write(state, function, spoiled):
    copy = spoiled("fp16")
    copy.drop_write(state, function)
    assert "differ" in refused(copy)


# A lowering


@pytest.fixture
def failing(packages, tmp_path):
    """A build that must fail, publish nothing and say where: what it says."""

    def run(**changes):
        with pytest.raises(VerificationFailed) as failure:
            packages.build(tmp_path / "dist", **{"weights": "fp32", "buckets": (16,), "os": "ios18", **changes})
        assert failure.value.exit_code == 4 and failure.value.fix == "nothing was published"
        assert list(tmp_path.iterdir()) == []
        return failure.value.what

    return run


def in_block(b, block):
    return b._place == block_name(block)


def test_a_wrong_eps(failing, monkeypatch):
    from needle_export.targets.coreml import fused

    right = fused._norm
    def wrong(b, x, scale, eps, width):
        return right(b, x, scale, 1e-3 if in_block(b, 1) else eps, width)

    monkeypatch.setattr(fused, "_norm", wrong)
    assert "in prefill, block 1" in failing()


def test_a_rotation_the_other_way(failing, monkeypatch):
    from needle_export.targets.coreml import fused

    def other_way(b, n):
        _, cos, sin = n.args
        if layer_of(n) == 1:
            b.memo["minus"] = b.memo.get("minus") or b.mul(b.get(sin), -1)
            held, b.env[sin] = b.env[sin], b.memo["minus"]
            key, b.memo["rotation", cos, sin] = b.memo.pop(("rotation", cos, sin), None), None
            del b.memo["rotation", cos, sin]
            fused.rotary(b, n)
            b.env[sin], b.memo["rotation", cos, sin] = held, key
        else:
            fused.rotary(b, n)

    patched(monkeypatch, op("rotary"), other_way)
    # Both sides of every product turn the other way, so that only distances change their sign.
    assert "in prefill, block 1" in failing()


def test_a_missing_mask(failing, monkeypatch):
    from needle_export.targets.coreml import attention

    right = attention._mask

    def none(b, mask, share):
        made = right(b, mask, share)
        return b.mul(made, 0) if in_block(b, 1) else made

    monkeypatch.setattr(attention, "_mask", none)
    assert "in prefill, block 1" in failing()


def test_norms_of_queries_and_keys_exchanged(failing, monkeypatch):
    from needle_export.targets.coreml.store import WeightStore

    right, met = WeightStore.plain, []

    def exchanged(store, weight, data, reason="", every=0):
        if weight.name == "layers.1.attention.qk_norm":
            # One norm for both: a row for every head of queries, then of keys.
            assert len(data) == GEOMETRY.num_heads + GEOMETRY.num_kv_heads
            met.append(weight.name)
            data = np.ascontiguousarray(np.roll(data, GEOMETRY.num_kv_heads, axis=0))
        return right(store, weight, data, reason, every)

    monkeypatch.setattr(WeightStore, "plain", exchanged)
    said = failing()
    assert met and "in prefill, block 1" in said


def test_sinkhorns_axes_exchanged(failing, monkeypatch):
    from needle_export.targets.coreml.builder import Builder

    right = Builder.unary

    def exchanged(b, kind, x, **more):
        if kind == "layer_norm" and in_block(b, 1):
            more["axes"] = {(1, 2): [2, 3], (2, 3): [1, 2]}[tuple(more["axes"])]
        return right(b, kind, x, **more)

    monkeypatch.setattr(Builder, "unary", exchanged)
    assert "in prefill, block 1" in failing()


def test_one_iteration_of_sinkhorn_less(failing, monkeypatch):
    from needle_export.targets.coreml import fused

    def shorter(b, n):
        if layer_of(n) == 0:
            n.args, right = (n.args[0], 1), n.args
            fused.sinkhorn(b, n)
            n.args = right
        else:
            fused.sinkhorn(b, n)

    patched(monkeypatch, op("sinkhorn"), shorter)
    assert "in prefill, block 0" in failing()


def test_a_position_off_by_one(failing, monkeypatch):
    from needle_export.targets.coreml import lower

    right = lower._input

    def late(b, node):
        right(b, node)
        if node.name == "position" and b.rows > 1:
            b.put(node, b.ref_of(b.op("add", x=b.ref(node), y=np.ones(1, np.int32))))

    monkeypatch.setattr(lower, "_input", late)
    # A chunk by itself can't tell, as only distances count; the first step behind it can.
    assert "in decode, block 0" in failing()


@pytest.mark.parametrize("system", ["ios17", "ios18"])
def test_a_host_that_writes_a_row_too_far(system, failing, monkeypatch):
    inputs, keep = Host.inputs, Host.keep

    def shifted(host, tokens, bucket):
        given = inputs(host, tokens, bucket)
        if "slots" in given and bucket == 1:
            given["slots"] = given["slots"] + np.int32(host.position < host.context - 1) * np.array([1, 0], np.int32)
        return given

    def kept(host, outputs, count):
        if count == 1:
            host.position += 1
        keep(host, outputs, count)
        if count == 1:
            host.position -= 1

    monkeypatch.setattr(Host, "inputs", shifted)
    monkeypatch.setattr(Host, "keep", kept)
    assert "differ" in failing(os=system)


def test_a_state_that_is_never_written(failing, monkeypatch):
    from needle_export.targets.coreml.builder import Builder

    right = Builder.op

    def forgetful(b, kind, **given):
        if kind == "coreml_update_state" and given["state"].name == "v_01" and b.rows == 1:
            return right(b, "identity", x=given["value"])
        return right(b, kind, **given)

    monkeypatch.setattr(Builder, "op", forgetful)
    assert "differ" in failing()


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_a_wrong_matrix(weights, failing, monkeypatch):
    from needle_export.targets.coreml.store import WeightStore

    right = WeightStore.matrix

    def wrong(store, weight, data):
        if weight.name == "net.layers.1.attention.out_proj":
            data = data * np.where(np.arange(len(data)) % 2, 1.02, 1).astype(np.float32)[:, None]
        return right(store, weight, data)

    monkeypatch.setattr(WeightStore, "matrix", wrong)
    assert "out_proj/kernel of block 1 (content): 48 of 96 rows differ, row 1 first" in failing(weights=weights)


def test_a_failed_build_leaves_the_earlier_one(packages, tmp_path, monkeypatch):
    from needle_export.targets.coreml import attention

    out = packages.copy(tmp_path / "dist", os="ios18")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    right = attention._mask
    monkeypatch.setattr(attention, "_mask", lambda b, mask, share: b.mul(right(b, mask, share), 0))
    with pytest.raises(VerificationFailed), packages.sharing():
        pipeline.build(options(packages.checkpoint, out, buckets=(16,)), QUIET)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["dist"]
