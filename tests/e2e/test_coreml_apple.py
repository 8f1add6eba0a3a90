"""Core ML itself, as far as it can be tried without a Mac: a fake of coremltools' model class over our evaluator.

Nothing here ran on an Apple device. What is proven is our side: which calls are made with what, and what is said when
they fail.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import COMPUTE_UNITS, BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, Unsupported, UsageError, VerificationFailed
from needle_export.measure import half, parity
from needle_export.report.schema import load_report
from needle_export.report.text import render_text
from needle_export.targets.base import RuntimeRefused
from needle_export.targets.coreml import apple
from needle_export.targets.coreml.session import EvaluatorRunner
from needle_export.targets.coreml.target import CoremlTarget
from tests.support import fake_coreml
from tests.support.fake_coreml import Faults

QUIET = NullProgress()
VERSION = "of macOS 15.5, compute units all"
TOKENS = np.random.default_rng(2).integers(1, SMALL.vocab_size, 40)

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a fake of what is there")


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A build with states, and one without."""
    folder = tmp_path_factory.mktemp("coreml")
    write_sample(folder / "small.safetensors", SMALL, 3)
    for system in ("ios18", "ios17"):
        options = BuildOptions(
            str(folder / "small.safetensors"), folder / system, "coreml", weights="fp16", os=system, context=48,
            buckets=(8, 16), bench=False,
        )
        pipeline.build(options, QUIET)
    return {system: folder / system for system in ("ios18", "ios17")}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """This machine as a Mac, until the test ends."""
    return fake_coreml.install(monkeypatch.setattr)


def verify(dist: Path):
    return pipeline.verify(dist, checkpoint=None, progress=QUIET)


def bench(dist: Path, **changes):
    asked = {"threads": 1, "steps": 4, "prompt": (20,), "progress": QUIET, **changes}
    return pipeline.bench(dist, **asked)


def test_off_macos_it_says_so_and_nothing_more(dists):
    dist = dists["ios18"]
    assert not apple.available() and apple.missing() == "Core ML is there on macOS only"
    assert verify(dist) == load_report(dist)
    (artifact,) = load_report(dist).artifacts
    check = artifact.runtimes[-1]
    assert (check.runtime, check.loaded, check.reproduced) == ("Core ML", None, None)
    assert check.reason == "not tried: Core ML is there on macOS only"
    assert any("no Apple device took part" in note for note in artifact.notes)
    for units in (None, "all"):
        with pytest.raises(Unsupported, match="Core ML is there on macOS only; measure it on a device") as refusal:
            bench(dist, compute_units=units)
        assert refusal.value.exit_code == 5
    for call in (lambda: apple.AppleRunner(dist), lambda: apple.compute_plan(dist / "model.mlpackage", "decode")):
        with pytest.raises(Unsupported, match="Core ML is there on macOS only; try it on a Mac"):
            call()


def test_a_mac_whose_coremltools_cannot_load_core_ml(monkeypatch):
    monkeypatch.setattr(apple, "macos_version", lambda: "15.5")
    assert apple.missing() == "coremltools can't load its part for Core ML on this system"


def test_the_names_of_compute_units_are_coremltools(mac):
    import coremltools as ct

    assert tuple(apple.COMPUTE_UNITS) == COMPUTE_UNITS and COMPUTE_UNITS[0] == apple.DEFAULT_UNITS
    assert {ct.ComputeUnit[name] for name in apple.COMPUTE_UNITS.values()} == set(ct.ComputeUnit)


@pytest.mark.parametrize("system", ["ios18", "ios17"])
def test_the_loop_gives_what_the_evaluator_gives(system, dists, mac):
    ours = EvaluatorRunner(dists[system], precision="declared")
    theirs = apple.AppleRunner(dists[system], compute_units="cpu-ne")
    for _ in range(2):
        for runner in (ours, theirs):
            runner.reset()
        for cut in (slice(0, 21), slice(21, 22), slice(22, 40)):
            np.testing.assert_array_equal(theirs.feed(TOKENS[cut]), ours.feed(TOKENS[cut]))
        states, want = theirs.state(), ours.state()
        assert states.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(states[name], want[name], err_msg=name)
    assert (theirs.context, theirs.max_chunk, theirs.streams()) == (48, 16, {})
    single = system == "ios17"
    loaded = [name for name, _ in mac.loaded]
    assert {units for _, units in mac.loaded} == {"CPU_AND_NE"}
    # One model a function, each loaded once.
    assert loaded == (["main"] * 3 if single else ["decode", "prefill_16", "prefill_8"])
    with pytest.raises(UsageError, match="49 tokens don't fit in a context of 48"):
        theirs.feed(TOKENS[:9])
    theirs.close()


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        ("refused", "with a state of decode, Core ML can't run prefill_16: the state was made by another model; so"
         " prompts were read token by token"),
        ("ignored", "prefill_16 leaves a state of decode as it was, so prompts were read token by token"),
    ],
)
def test_a_state_that_cannot_be_shared_costs_time_and_no_token(foreign, said, dists, mac):
    mac.foreign = foreign
    runner = apple.AppleRunner(dists["ios18"])
    got = runner.feed(TOKENS[:20])
    want = EvaluatorRunner(dists["ios18"], precision="declared")
    expected = np.concatenate([want.feed(TOKENS[i : i + 1]) for i in range(20)])
    np.testing.assert_array_equal(got, expected)
    assert mac.called.count("decode") == 20
    assert runner.told()[0] == said
    report = verify(dists["ios18"])
    # Its first prompt goes through the other prefill.
    assert said.replace("prefill_16", "prefill_8") in report.artifacts[0].notes
    assert report.artifacts[0].runtimes[-1].reproduced


def test_verify_compares_in_core_ml_and_says_how_it_went(dists, mac):
    (artifact,) = verify(dists["ios18"]).artifacts
    assert artifact.status == "verified-by-evaluator"
    check = artifact.runtimes[-1]
    assert (check.runtime, check.version, check.loaded, check.reproduced) == ("Core ML", VERSION, True, True)
    assert 1e-5 < check.max_abs < 0.1 and check.reason == ""
    assert [r.runtime for r in artifact.runtimes] == ["evaluator", "Core ML"]
    (compared,) = [note for note in artifact.notes if note.startswith(f"in Core ML {VERSION}: ")]
    assert "next tokens equal, SQNR " in compared
    plans = [note for note in artifact.notes if note.startswith("Core ML's plan for ")]
    assert len(plans) == 3 and all("on the Neural Engine" in note for note in plans)
    assert "verified by our evaluator, not on the runtime" in render_text(verify(dists["ios18"]), width=200)


def test_a_build_on_a_mac_tells_and_claims_no_less_and_no_more(dists, mac, tmp_path):
    checkpoint = dists["ios18"].parent / "small.safetensors"
    options = BuildOptions(str(checkpoint), tmp_path / "dist", "coreml", weights="fp16", context=48, buckets=(16,))
    mac.scale = 3.0  # wrong in Core ML, which decides nothing here
    (artifact,) = pipeline.build(options, QUIET).artifacts
    assert (artifact.status, artifact.latency) == ("verified-by-evaluator", None)
    check = artifact.runtimes[-1]
    assert (check.loaded, check.reproduced) == (True, False) and "dB" in check.reason
    assert not any("no Apple device took part" in note for note in artifact.notes)


FAULTY = {
    "a state that forgets": ({"forgets": True}, "dB of signal to error, less than 30"),
    "other logits": ({"scale": 1.1}, "dB of signal to error, less than 30"),
    "no numbers": ({"scale": float("nan")}, "logits are not finite"),
    "a function that isn't loaded": (
        {"load": frozenset({"prefill_8"})},
        "Core ML doesn't load prefill_8 with compute units all: Failed to build the model execution plan",
    ),
    "decode isn't loaded": ({"load": frozenset({"decode"})}, "Core ML doesn't load decode"),
    "a prediction that raises": (
        {"predict": frozenset({"decode"})},
        "Core ML can't run decode: Unable to compute the prediction using a neural network model.",
    ),
    "a prefill that raises": ({"predict": frozenset({"prefill_8"})}, "Core ML can't run prefill_8"),
    "no states": ({"states": False}, "makes no state for decode: State functionality is only supported on macOS 15+"),
    "states nobody can read": ({"reading": False}, "Core ML doesn't show the state"),
}


@pytest.mark.parametrize(("faults", "said"), FAULTY.values(), ids=FAULTY)
def test_what_goes_wrong_in_core_ml_fails_verification_in_a_sentence(faults, said, dists, monkeypatch):
    fake_coreml.install(monkeypatch.setattr, **faults)
    with pytest.raises(VerificationFailed) as failure:
        verify(dists["ios18"])
    assert f"in Core ML {VERSION}: " in failure.value.sentence and said in failure.value.sentence
    assert "\n" not in failure.value.sentence and failure.value.exit_code == 4


def test_without_states_older_systems_run_the_packages_that_have_none(dists, mac):
    mac.states = mac.reading = False
    assert verify(dists["ios17"]).artifacts[0].runtimes[-1].reproduced


def test_limits_of_half_precision():
    good = parity.Measured(signal=1000.0, error=1.0, steps=10, argmax_equal=9)
    assert half.judge_half(good) is None and good.sqnr_db == pytest.approx(30)
    assert "8 of 10 next tokens" in half.judge_half(parity.Measured(signal=1e6, error=1, steps=10, argmax_equal=8))
    assert "29.9 dB" in half.judge_half(parity.Measured(signal=980.0, error=1.0, steps=10, argmax_equal=10))
    assert half.judge_half(parity.Measured(signal=0.0, error=1.0)) is not None
    assert half.judge_half(parity.Measured(signal=1.0)) is None


def test_a_lost_state_is_far_below_the_limit(dists, monkeypatch):
    """The distance that LEAST_SQNR_DB counts on, from both sides."""
    cases, columns = pipeline._recorded(dists["ios18"], load_report(dists["ios18"]).artifacts[0])
    found = {}
    for name, faults in (("right", {}), ("forgets", {"forgets": True})):
        fake_coreml.install(monkeypatch.setattr, **faults)
        runner = apple.AppleRunner(dists["ios18"])
        if name == "forgets":
            runner._shares = {8: True, 16: True}
        found[name] = parity.compare(runner, cases, columns, lambda _: None).sqnr_db
    assert found["right"] > half.LEAST_SQNR_DB + 10
    assert found["forgets"] < half.LEAST_SQNR_DB - 10


def test_the_plan_counts_ops_by_device(dists, mac):
    plan = apple.compute_plan(dists["ios18"] / "model.mlpackage", "decode")
    assert set(plan.ops) == {"Neural Engine", "CPU", "no device named"}
    assert 0 < plan.cost["Neural Engine"] < 1 and plan.cost["CPU"] == 0
    assert next(iter(plan.ops)) == "Neural Engine"
    text = str(plan)
    assert text.startswith("Core ML's plan for decode, not a measurement: ")
    assert "% of the estimated cost)" in text and "ops no device named" in text
    single = apple.compute_plan(dists["ios17"] / "model.mlpackage", "decode", single=True)
    assert single.ops["CPU"] > 0
    mac.plan = False
    with pytest.raises(RuntimeRefused, match="Core ML gives no plan for decode: MLComputePlan needs a newer system"):
        apple.compute_plan(dists["ios18"] / "model.mlpackage", "decode")
    runner = apple.AppleRunner(dists["ios18"])
    assert runner.told() == ["Core ML gives no plan for decode: MLComputePlan needs a newer system"]


def test_bench_measures_in_core_ml_and_names_what_on(dists, mac, monkeypatch, tmp_path):
    for name, value in fake_coreml.site(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(apple, "_sysctl", {"machdep.cpu.brand_string": "Apple M9", "hw.model": "Mac99,1"}.get)
    report = bench(dists["ios18"], compute_units="cpu-gpu")
    (artifact,) = report.artifacts
    assert artifact.status == "verified-by-evaluator"
    latency = artifact.latency
    assert artifact.memory is None
    assert latency.kind == "measured" and latency.threads == 0
    assert latency.host == "Apple M9 (Mac99,1), macOS 15.5, Core ML with compute units cpu-gpu"
    assert latency.command.endswith("--compute-units cpu-gpu --steps 4 --prompt 20")
    assert latency.decode.ms_p50 > 0 and [p.tokens for p in latency.prefill] == [20]
    assert any(note.startswith("Core ML's plan for prefill_16") for note in artifact.notes)
    text = " ".join(render_text(report, width=200).split())
    assert "compute units cpu-gpu, threads as the runtime chooses, by: " in text
    with pytest.raises(UsageError, match="--threads: Core ML chooses its threads itself"):
        bench(dists["ios18"], threads=2)


def test_bench_in_a_process_without_core_ml_fails_in_a_sentence(dists, mac):
    # Only this process meets the fake: the one that is timed finds Linux.
    with pytest.raises(BadInput, match=r"measuring failed: .*Core ML is there on macOS only"):
        bench(dists["ios18"])


def test_the_machine_is_named_as_far_as_it_tells(mac, monkeypatch):
    monkeypatch.setattr(apple.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("sysctl")))
    assert apple.machine("all").endswith(", macOS 15.5, Core ML with compute units all")


def test_what_is_no_package_of_ours_is_refused(dists, mac, tmp_path):
    with pytest.raises(BadInput, match="this part of the artifact is missing"):
        apple.AppleRunner(tmp_path)
    shutil.copytree(dists["ios18"], tmp_path / "dist")
    (tmp_path / "dist" / "model.mlpackage" / "Manifest.json").write_text("{}")
    with pytest.raises(BadInput, match="coremltools can't read it: "):
        apple.AppleRunner(tmp_path / "dist")


def test_the_target_opens_in_core_ml_by_the_same_contract(dists, mac):
    (other,) = CoremlTarget().other_runtimes(dists["ios18"])
    assert other.native and other.version == VERSION
    runner = other.open()
    assert runner.feed(TOKENS[:3]).shape == (3, SMALL.head_vocab)
    runner.close()
