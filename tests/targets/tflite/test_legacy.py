"""The older TFLite runtime computes what today's does, and whatever it can't do is said in one line."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.checkpoint.geometry import SMALL
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.errors import BadInput, UsageError
from needle_export.measure import parity
from needle_export.targets.base import RuntimeRefused
from needle_export.targets.ports import CONTRACT_KEY, DECODE, prefill_name
from needle_export.targets.tflite.analysis import metadata
from needle_export.targets.tflite.contract import contract_json, input_ports, output_ports
from needle_export.targets.tflite.legacy import FOLDER, VARIABLE, VERSION, LegacyRunner, find_legacy_python
from needle_export.targets.tflite.prepare import prepare
from needle_export.targets.tflite.session import Loop
from needle_export.targets.tflite.state import reference_state
from tests.support.programs import sample_checkpoint, tokens
from tests.support.tflite_models import FLOAT, Tiny, save

pytest.importorskip("litert_torch")
pytest.importorskip("ai_edge_litert")

CONTEXT, BUCKET = 32, 8

#: How a sequence is fed. Rings have 16 rows here, so all of them wrap: in steps, in chunks, in both.
LENGTHS = {
    "a padded chunk, then steps": [5, *[1] * 20],
    "steps": [1] * 32,
    "chunks": [24],
    "both": [19, 1, 1, 7, 1, 3],
}


@pytest.fixture(scope="module")
def legacy() -> Path:
    python = find_legacy_python()
    if python is None:
        pytest.skip("no Python with tflite-runtime 2.14; `make setup` makes one where PYTHON is 3.11, on Linux")
    return python


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(sample_checkpoint(tmp_path_factory.mktemp("checkpoint"), SMALL), CONTEXT, NullProgress())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, compiler: Compiler) -> dict[str, Path]:
    """The same small model in each scheme."""
    from needle_export.targets.tflite.lower import exporter

    folder, states = tmp_path_factory.mktemp("models"), compiler.states
    found = {}
    for scheme in ("fp32", "fp16", "int8"):
        found[scheme] = folder / f"{scheme}.tflite"
        with exporter(Rules(scheme)) as target:
            for rows in (1, BUCKET):
                program = compiler.program(rows)
                prepare(program, False)
                name = DECODE if rows == 1 else prefill_name(rows)
                outputs = output_ports(states, SMALL.head_vocab, rows)
                target.add(name, program, rows, input_ports(states, rows), outputs)
            target.write(found[scheme], contract_json(states, SMALL.head_vocab, CONTEXT, (BUCKET,), {}))
    return found


def todays(path: Path) -> Loop:
    from ai_edge_litert.interpreter import Interpreter

    return Loop(Interpreter(str(path), num_threads=1), json.loads(metadata(path, CONTRACT_KEY) or ""))


def deviations(old: LegacyRunner, new: Loop, lengths: list[int], seed: int = 0) -> tuple[float, float]:
    """Of logits and of states, the latter as a share of a state's range; a sequence is fed to both."""
    ids, at, worst = tokens(SMALL, sum(lengths), seed), 0, 0.0
    old.reset()
    new.reset()
    for length in lengths:
        piece = ids[at : at + length]
        got, want = old.feed(piece), new.feed(piece)
        assert got.shape == want.shape == (length, SMALL.head_vocab)
        worst, at = max(worst, float(np.abs(got - want).max())), at + length
    got_state, want_state = old.state(), reference_state(new)
    assert {n: (v.shape, v.dtype) for n, v in got_state.items()} == {
        n: (v.shape, v.dtype) for n, v in want_state.items()
    }
    shares = [float(np.abs(got_state[n] - v).max() / max(1.0, np.abs(v).max())) for n, v in want_state.items()]
    return worst, max(shares)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("scheme", ["fp32", "fp16"])
def test_floats_agree(legacy: Path, models: dict[str, Path], scheme: str, lengths: list[int]) -> None:
    with LegacyRunner(models[scheme], legacy) as old:
        logits, state = deviations(old, todays(models[scheme]), lengths)
    assert logits < 1e-5 and state < 1e-5


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_int8_agrees_but_for_ties(legacy: Path, models: dict[str, Path], lengths: list[int]) -> None:
    """TFLite's own kernel, which 2.14 takes, finds XNNPACK's levels but for inputs halfway between two of them.

    Without such an input a sequence agrees as it does in float32; that most do shows that the levels are the same.
    With one, logits moved by up to 0.013 in 150 sequences of this model (a fifth of them had one). Levels of
    another kind would move all of them, and int8 itself moves them by up to 0.1.
    """
    with LegacyRunner(models["int8"], legacy) as old:
        new = todays(models["int8"])
        found = [deviations(old, new, lengths, seed) for seed in range(24)]
    assert sorted(logits for logits, _ in found)[len(found) // 2] < 1e-5
    assert max(logits for logits, _ in found) < 0.05


def test_the_reference_agrees(legacy: Path, models: dict[str, Path], compiler: Compiler) -> None:
    with LegacyRunner(models["fp32"], legacy) as old:
        measured = parity.compare(old, compiler.reference(0), None, lambda _: None)
        assert old.version == VERSION and old.streams() == {}
        assert (old.context, old.max_chunk) == (CONTEXT, BUCKET)
    assert measured.max_abs < 2e-5 and measured.state_max_abs < 2e-5
    assert measured.steps == measured.argmax_equal > 0


def test_a_sequence_ends_at_the_context(legacy: Path, models: dict[str, Path]) -> None:
    with LegacyRunner(models["fp32"], legacy) as old:
        old.feed(tokens(SMALL, 30))
        with pytest.raises(UsageError, match="33 tokens don't fit in a context of 32"):
            old.feed(tokens(SMALL, 3))
        assert old.feed(tokens(SMALL, 2)).shape == (2, SMALL.head_vocab)
        assert old.feed(tokens(SMALL, 0)).shape == (0, SMALL.head_vocab)


# What the runtime can't do


def tiny(path: Path) -> Path:
    """A model with a scale for each row of an int8 weight, which 2.14 doesn't know."""
    contract = {"context": 8, "vocab": 4, "buckets": [], "state": []}

    def body(t: Tiny) -> dict[str, Any]:
        weight = t.constant(np.ones((4, 2), np.int8), "!quant.uniform<i8<-127:127>:f32:0, {0.5,0.25,1.0,2.0}>")
        return {"logits": t.op("fully_connected", (1, 4), t["x"], weight, t.absent())}

    return save(path, {DECODE: ({"x": ((1, 2), FLOAT)}, body)}, {CONTRACT_KEY: json.dumps(contract)})


def test_an_op_that_is_too_new_is_refused(legacy: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeRefused) as caught:
        LegacyRunner(tiny(tmp_path / "m.tflite"), legacy)
    assert str(caught.value).startswith("Didn't find op for builtin opcode 'FULLY_CONNECTED' version '12'.")
    assert "\n" not in str(caught.value)


def test_a_python_without_the_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeRefused, match=r"^is not installed there \(No module named 'tflite_runtime'\)$"):
        LegacyRunner(tiny(tmp_path / "m.tflite"), Path(sys.executable))


def test_a_file_without_a_contract_is_no_artifact(tmp_path: Path) -> None:
    def body(t: Tiny) -> dict[str, Any]:
        return {"y": t.op("logistic", (2,), t["x"])}

    path = save(tmp_path / "m.tflite", {DECODE: ({"x": ((2,), FLOAT)}, body)})
    with pytest.raises(BadInput, match="doesn't carry this tool's metadata"):
        LegacyRunner(path, Path(sys.executable))


#: A runtime for the artifact of :func:`tiny` whose logits repeat the token. It is told where to go wrong.
FAKE = """
import os, signal, sys, time
from pathlib import Path
import numpy as np

{loading}

class Interpreter:
    def __init__(self, model_path, num_threads):
        Path({pid!r}).write_text(str(os.getpid()))
        self.held = [np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((1, 4), np.float32)]
        {opening}

    def allocate_tensors(self):
        pass

    def get_signature_runner(self, name):
        return self

    def get_input_details(self):
        return {{n: {{"index": i, "dtype": np.int32}} for i, n in enumerate(("tokens", "position"))}}

    def get_output_details(self):
        return {{"logits": {{"index": 2, "dtype": np.float32}}}}

    def tensor(self, index):
        return lambda: self.held[index]

    def invoke(self):
        {running}
        self.held[2][:] = self.held[0]
"""


class Fake:
    """A Python with a runtime that goes wrong on demand; it needs nothing installed."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny(folder / "m.tflite")
        self.python = folder / "python"
        self._package, self._pid = folder / "tflite_runtime", folder / "pid"

    def open(
        self, loading: str = "", opening: str = "pass", running: str = "pass", version: str = VERSION
    ) -> LegacyRunner:
        self._package.mkdir()
        (self._package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        text = FAKE.format(pid=str(self._pid), loading=loading, opening=opening, running=running)
        (self._package / "interpreter.py").write_text(text)
        code = (
            f"import runpy, sys; sys.path.insert(0, {str(self._package.parent)!r});"
            " runpy.run_path(sys.argv[-1], run_name='__main__')"
        )
        self.script(f'exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
        return LegacyRunner(self.model, self.python)

    def script(self, text: str) -> None:
        self.python.write_text(f"#!/bin/sh\n{text}")
        self.python.chmod(0o755)

    def gone(self) -> bool:
        """Whether the process is no more, not even as one whose end nobody asked for."""
        try:
            os.kill(int(self._pid.read_text()), 0)
        except ProcessLookupError:
            return True
        return False


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


ONE = np.array([3])


def test_the_fake_would_run(fake: Fake) -> None:
    with fake.open(running="print('noise', flush=True); os.write(1, b'noise')") as runner:
        assert runner.feed(np.array([3, 1])).tolist() == [[3.0] * 4, [1.0] * 4]
        assert not runner.refusal and not fake.gone()
    assert fake.gone()
    with pytest.raises(ValueError, match="closed"):
        runner.feed(ONE)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("os.abort()", "aborts the process (SIGABRT) when {}"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashes the process (SIGSEGV) when {}"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "has something kill the process (SIGKILL) when {}"),
        ("os._exit(3)", "ends the process with code 3 when {}"),
        ("os.write(2, b'noise\\nlast words\\n\\n'); os.abort()", "aborts the process (SIGABRT) when {}: last words"),
        ("os.write(2, b'x' * 200_000); os.abort()", "aborts the process (SIGABRT) when {}: " + "x" * 300),
        ("raise ValueError('no such op\\nsecond line')", "no such op"),
        ("raise RuntimeError", "RuntimeError"),
    ],
)
@pytest.mark.parametrize("when", ["opening the model", "reading tokens"])
def test_a_fault_is_a_reason(fake: Fake, fault: str, reason: str, when: str) -> None:
    if when == "opening the model":
        with pytest.raises(RuntimeRefused) as caught:
            fake.open(opening=fault)
    else:
        runner = fake.open(running=fault)
        with pytest.raises(RuntimeRefused) as caught:
            runner.feed(ONE)
        # It stays as good as it was for whoever reports on it.
        assert (runner.refusal, runner.version, runner.context) == (str(caught.value), VERSION, 8)
        for again in (lambda: runner.feed(ONE), runner.reset, runner.state):
            with pytest.raises(RuntimeRefused) as second:
                again()
            assert str(second.value) == str(caught.value)
        runner.close()
    assert str(caught.value) == reason.format(when)
    assert fake.gone()


def test_who_does_not_answer_is_refused(fake: Fake) -> None:
    runner = fake.open(running="time.sleep(600)")
    runner.timeout = 0.2
    begin = time.monotonic()
    with pytest.raises(RuntimeRefused, match=r"^doesn't answer within 0\.2 s when reading tokens$"):
        runner.feed(ONE)
    assert time.monotonic() - begin < 30 and fake.gone()


def test_a_dropped_session_leaves_no_process(fake: Fake) -> None:
    runner = fake.open()
    assert not fake.gone()
    del runner
    assert fake.gone()


def test_another_release_is_refused(fake: Fake) -> None:
    with pytest.raises(RuntimeRefused, match=r"^is there as 2\.13\.0, not as 2\.14\.0$"):
        fake.open(version="2.13.0")


def test_a_runtime_that_cannot_be_loaded_is_refused(fake: Fake) -> None:
    with pytest.raises(RuntimeRefused, match=r"^is there and cannot be loaded \(division by zero\)$"):
        fake.open(loading="1 / 0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 0\n", "ends the process with code 0 when starting"),
        ("echo oops >&2; exit 7\n", "ends the process with code 7 when starting: oops"),
        (r"printf '\004\000\000\000oops'; sleep 1" + "\n", "has a Python that answers in no way that is understood"),
    ],
)
def test_what_is_no_python_is_refused(fake: Fake, text: str, reason: str) -> None:
    fake.script(text)
    with pytest.raises(RuntimeRefused) as caught:
        LegacyRunner(fake.model, fake.python)
    assert str(caught.value).startswith(reason)


def test_what_cannot_be_started_is_refused(fake: Fake) -> None:
    fake.python.write_bytes(b"\0")
    fake.python.chmod(0o755)
    with pytest.raises(RuntimeRefused, match=r"^has a Python that can't be started \("):
        LegacyRunner(fake.model, fake.python)


# Where it is looked for


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    return path


def test_it_is_looked_for_beside_the_running_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    assert find_legacy_python() is None
    beside = executable(tmp_path / FOLDER / "bin" / "python")
    assert find_legacy_python() == beside
    named = executable(tmp_path / "named" / "python")
    monkeypatch.setenv(VARIABLE, str(named))
    assert find_legacy_python() == named


@pytest.mark.parametrize("kind", ["missing", "a folder", "not executable"])
def test_a_wrong_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "python"
    if kind == "a folder":
        path.mkdir()
    elif kind == "not executable":
        path.touch(0o644)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(UsageError, match="is no program that can be run") as caught:
        find_legacy_python()
    assert str(path) in str(caught.value) and VARIABLE in str(caught.value)
