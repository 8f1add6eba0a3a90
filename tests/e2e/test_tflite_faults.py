"""What is wrong with a TFLite file, its host or another runtime comes out before anything is published."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.errors import FusionFailed, VerificationFailed
from needle_export.graph import ops, reference
from needle_export.model import block
from needle_export.report.schema import load_report
from needle_export.report.text import render_text
from needle_export.targets.base import OtherRuntime, RuntimeRefused
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.store import WeightStore
from needle_export.targets.tflite.target import TfliteRunner, TfliteTarget
from tests.support.tflite_builds import (
    GEOMETRY,
    QUIET,
    every_other_row,
    forget_writes,
    options,
    scale_wrongly,
    store_wrongly,
)

pytest.importorskip("litert_torch")
interpreters = pytest.importorskip("ai_edge_litert.interpreter")


@pytest.fixture
def build(builds, tmp_path, monkeypatch):
    """A build with one prefill length into a folder of its own, which must stay away if it fails.

    Its matrices are not compared, so that what is found here is found by running the file.
    """
    monkeypatch.setattr(pipeline, "_compare_weights", lambda *arguments: None)
    return lambda **changes: pipeline.build(
        options(builds.checkpoint, tmp_path / "dist", **{"buckets": (16,), **changes}), QUIET
    )


@pytest.mark.parametrize(
    ("weight", "spot"),
    [
        ("layers.2.attention.out_proj", "block 2"),
        ("layers.0.mlp.w2b", "block 0"),
        ("layers.3.attention.q_proj+k_proj+v_proj+gate_proj[0:416]", "block 3"),
        ("embedding", "block 0"),
    ],
)
def test_a_wrong_weight_is_found_and_its_block_named(weight, spot, build, tmp_path, monkeypatch):
    met = store_wrongly(monkeypatch, weight, every_other_row(1.02))
    with pytest.raises(VerificationFailed) as failure:
        build()
    assert met and spot in str(failure.value) and failure.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_only_a_prefill_reads_wrongly_is_found(build, tmp_path, monkeypatch):
    # A batched matrix is cut for its sites: the second signature alone gets another one.
    stored = WeightStore._float
    seen: set[str] = set()

    def damaged(self, given, data, reason):
        again = given.name == "net.layers.1.attention.out_proj" and given.name in seen
        seen.add(given.name)
        return stored(self, given, np.ascontiguousarray(every_other_row(1.02)(data)) if again else data, reason)

    monkeypatch.setattr(WeightStore, "_float", damaged)
    with pytest.raises(VerificationFailed, match="in prefill, block 1"):
        build()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parts", [("keys",), ("values",), ("history",), ("tokens",)], ids=lambda p: p[0])
def test_a_host_that_forgets_a_kind_of_state_is_found(parts, build, tmp_path, monkeypatch):
    forget_writes(monkeypatch, parts)
    with pytest.raises(VerificationFailed):
        build()
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_state_write_is_found(build, tmp_path, monkeypatch):
    from needle_export.targets.tflite import fused
    from needle_export.targets.tflite import lower as module

    def stale(b: Builder, n):
        fused.causal_taps(b, n)
        if b.rows == 1:
            history = n.args[1]
            b.new_rows[history.name] = b.slice(b.get(history), 0, 0, 1)

    monkeypatch.setitem(module._LOWERINGS, ops.op("causal_taps"), stale)
    with pytest.raises(VerificationFailed):
        build()
    assert list(tmp_path.iterdir()) == []


def test_a_missed_fusion_fails_the_build_by_block(build, tmp_path, monkeypatch):
    original, calls = reference.sinkhorn, itertools.count()

    def shorter_in_one_block(logits, iterations):
        return original(logits, iterations - (next(calls) % GEOMETRY.num_layers == 3))

    monkeypatch.setattr(block.ref, "sinkhorn", shorter_in_one_block)
    with pytest.raises(FusionFailed, match="sinkhorn was promised 5 times and fired 4: in block 3") as failure:
        build()
    assert failure.value.exit_code == 4 and list(tmp_path.iterdir()) == []


def test_a_failed_build_leaves_the_earlier_one(builds, tmp_path, monkeypatch):
    out = builds.copy("fp32", tmp_path / "dist")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    met = store_wrongly(monkeypatch, "layers.1.attention.out_proj", every_other_row(3))
    with pytest.raises(VerificationFailed):
        pipeline.build(options(builds.checkpoint, out), QUIET)
    assert met and {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["dist"]
    monkeypatch.undo()
    assert pipeline.verify(out, checkpoint=None, progress=QUIET)


# Int8: what its wider tolerance still tells apart. Smaller errors of a weight are found in test_tflite_weights.py.


def test_int8_with_the_other_rounding_of_inputs_is_refused(build, tmp_path, monkeypatch):
    """As an op that asks for symmetric inputs has them in TFLite's own kernel."""
    op, interpreter = Builder.op, interpreters.Interpreter

    def symmetric(self, kind, inputs, dims, **attributes):
        if kind == "fully_connected":
            attributes["asymmetric_quantize_inputs"] = False
        return op(self, kind, inputs, dims, **attributes)

    def without_delegate(*arguments, **settings):
        plain = interpreters.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        return interpreter(*arguments, experimental_op_resolver_type=plain, **settings)

    monkeypatch.setattr(TfliteTarget, "other_runtimes", lambda self, folder: [])
    monkeypatch.setattr(interpreters, "Interpreter", without_delegate)
    # The kernel alone is no deviation: only the rounding is.
    assert build(weights="int8").artifacts[0].runtimes[0].reproduced
    monkeypatch.setattr(Builder, "op", symmetric)
    with pytest.raises(VerificationFailed, match="differ"):
        build(weights="int8", seed=3)
    assert [a.weights for a in load_report(tmp_path / "dist").artifacts] == ["int8"]


@pytest.mark.parametrize(
    ("weight", "factor"),
    [
        ("layers.0.attention.q_proj+k_proj+v_proj+gate_proj[0:416]", 1.02),
        ("layers.0.attention.out_proj", 1.05),
        ("embedding", 1.05),
        ("layers.3.attention.out_proj", 1.2),
    ],
)
def test_int8_with_wrong_scales_is_refused(weight, factor, build, tmp_path, monkeypatch):
    met = scale_wrongly(monkeypatch, weight, factor)
    with pytest.raises(VerificationFailed, match="differ"):
        build(weights="int8")
    assert met and list(tmp_path.iterdir()) == []


# Other runtimes


class Moved:
    """A runner whose logits are off by this much; it says when it is closed."""

    def __init__(self, folder, by, state=None):
        self.inner, self.by, self.closed, self.spoil = TfliteRunner(folder), by, False, state
        self.context, self.max_chunk = self.inner.context, self.inner.max_chunk

    def reset(self):
        self.inner.reset()

    def feed(self, tokens):
        return self.inner.feed(tokens) + np.float32(self.by)

    def state(self):
        found = self.inner.state()
        return {name: value[:-1] for name, value in found.items()} if self.spoil else found

    def close(self):
        self.closed = True


class Aborts(Moved):
    """One that goes away in the middle."""

    def feed(self, tokens):
        raise RuntimeRefused("aborts the process (SIGABRT) when reading tokens")


def test_what_other_runtimes_make_of_it_is_told_and_stops_nothing(build, monkeypatch):
    def cannot_open():
        raise RuntimeRefused("Didn't find op for builtin opcode 'GATHER' version '99'.")

    opened = []

    def fakes(self, folder):
        def opener(kind, *arguments):
            def start():
                opened.append(kind(folder, *arguments))
                return opened[-1]

            return start

        return [
            OtherRuntime("absent", "1", None, "not tried: nobody has it"),
            OtherRuntime("refuses", "2", cannot_open),
            OtherRuntime("aborts", "3", opener(Aborts, 0)),
            OtherRuntime("deviates", "4", opener(Moved, 0.5)),
            OtherRuntime("other shapes", "5", opener(Moved, 0, True)),
            OtherRuntime("blind", "6", opener(Moved, np.nan)),
            OtherRuntime("agrees", "7", opener(Moved, 0)),
        ]

    monkeypatch.setattr(TfliteTarget, "other_runtimes", fakes)
    report = build()
    found = {check.runtime: check for check in report.artifacts[0].runtimes}
    assert [check.version for check in found.values()][1:] == ["1", "2", "3", "4", "5", "6", "7"]
    loaded = {name: (check.loaded, check.reproduced) for name, check in found.items()}
    assert loaded == {
        "ai-edge-litert": (True, True),
        "absent": (None, None),
        "refuses": (False, None),
        "aborts": (False, None),
        "deviates": (True, False),
        "other shapes": (True, False),
        "blind": (True, False),
        "agrees": (True, True),
    }
    assert found["absent"].reason == "not tried: nobody has it"
    assert found["refuses"].reason == "Didn't find op for builtin opcode 'GATHER' version '99'."
    assert found["aborts"].reason == "aborts the process (SIGABRT) when reading tokens"
    assert found["deviates"].reason.startswith("logits differ by 5.0") and 0.4 < found["deviates"].max_abs < 0.6
    assert "shape" in found["other shapes"].reason and "not finite" in found["blind"].reason
    assert found["agrees"].reason == "" and found["agrees"].max_abs < 1e-5
    assert len(opened) == 5 and all(runner.closed for runner in opened)
    # Nobody who reads the report can miss it.
    text = " ".join(render_text(report, width=200).split())
    assert "deviates 4" in text and "logits differ by" in text and "not tried: nobody has it" in text


def test_a_crash_that_is_no_refusal_stops_the_build(build, tmp_path, monkeypatch):
    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(TfliteTarget, "other_runtimes", lambda self, folder: [OtherRuntime("broken", "1", broken)])
    with pytest.raises(ZeroDivisionError):
        build()
    assert list(tmp_path.iterdir()) == []
