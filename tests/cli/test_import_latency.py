"""import-latency and bench --adb: what they put into a published report, and what they refuse; adb is a stand-in."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from needle_export.report.schema import REPORT_NAME, load_report
from tests.cli.conftest import Run
from tests.support.reports import FILES, make_artifact, make_report, write_artifact
from tests.unit.measure.test_readings import BENCHMARK_MODEL, PERF_TEST

#: A stand-in for adb: what it is asked is written down, what it does is told by a file.
ADB = """\
#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
plan = json.loads((here / "plan.json").read_text())
asked = sys.argv[1:]
with (here / "asked").open("a") as log:
    log.write(json.dumps(asked) + "\\n")
if asked == ["devices"]:
    sys.stdout.write("List of devices attached\\n" + plan["devices"])
    sys.exit(0)
assert asked[0] == "-s", asked
text = " ".join(asked[2:])
for part, (code, out, err) in plan["answers"].items():
    if part in text:
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
sys.exit(0)
"""


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A published TFLite build."""
    folder = tmp_path / "dist"
    folder.mkdir()
    write_artifact(folder, {"model.tflite": b"TFL"})
    report = make_report(make_artifact({"model.tflite": b"TFL"}, target="tflite", imported=()))
    from needle_export.report.schema import dump_report

    (folder / REPORT_NAME).write_bytes(dump_report(report))
    return folder


@pytest.fixture
def adb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with the stand-in."""
    folder = tmp_path / "tools"
    folder.mkdir()
    program = folder / "adb"
    program.write_text(ADB.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    plan(folder)
    return folder


def plan(folder: Path, devices: str = "R3\tdevice\n", **answers: tuple[int, str, str]) -> None:
    usual = {
        "getprop ro.product.model": (0, "Pixel 8\n", ""),
        "getprop ro.build.version.release": (0, "14\n", ""),
        "date": (0, "2026-11-30\n", ""),
        "benchmark_model --graph": (0, BENCHMARK_MODEL, ""),
    }
    usual.update({key.replace("_", " ") if key in ("push", "rm") else key: value for key, value in answers.items()})
    (folder / "plan.json").write_text(json.dumps({"devices": devices, "answers": usual}))


def asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def test_a_file_s_time_stands_in_the_report_with_where_it_is_from(run: Run, dist: Path, tmp_path: Path) -> None:
    file = tmp_path / "pixel.txt"
    file.write_text(BENCHMARK_MODEL)
    before = load_report(dist)
    done = run("import-latency", str(dist), str(file), "--device", "pixel-8", "--json")
    assert done.exit_code == 0, done.output
    after = load_report(dist)
    (entry,) = after.artifacts[0].imported
    assert (entry.device, entry.format, entry.file) == ("pixel-8", "benchmark_model", "pixel.txt")
    assert (entry.phase, entry.tokens) == ("decode", 1)
    assert entry.ms == pytest.approx(8.2604) and len(entry.sha256) == 64 and entry.date is None
    assert after.artifacts[0].latency == before.artifacts[0].latency
    assert json.loads(done.output)["artifacts"][0]["imported"][0]["device"] == "pixel-8"
    # The same file again replaces what it said; another one is added.
    assert run("import-latency", str(dist), str(file), "--device", "pixel 8 of the lab").exit_code == 0
    other = tmp_path / "lab.csv"
    other.write_text("phase,ms,tokens,device\nprefill,90,64,till\ndecode,8,,till\n")
    done = run("import-latency", str(dist), str(other))
    assert done.exit_code == 0 and "pixel 8 of the lab" in done.output and "prompt of 64" in done.output
    assert [i.device for i in load_report(dist).artifacts[0].imported] == ["pixel 8 of the lab", "till", "till"]


@pytest.mark.parametrize(
    ("text", "options", "code", "said"),
    [
        (BENCHMARK_MODEL, (), 2, "doesn't say what it was measured on"),
        ("nothing of the kind", ("--device", "x"), 3, "neither the output of"),
        (PERF_TEST, ("--device", "x"), 2, "no onnx artifact"),
        (PERF_TEST, ("--device", "x", "--format", "benchmark_model"), 3, "no line of timings"),
        ("phase,ms\ndecode,1\n", ("--device", "x", "--prompt", "64"), 2, "says itself what was timed"),
    ],
)
def test_a_refused_import_leaves_the_report_alone(
    run: Run, dist: Path, tmp_path: Path, text: str, options: tuple[str, ...], code: int, said: str
) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text)
    before = (dist / REPORT_NAME).read_bytes()
    done = run("import-latency", str(dist), str(file), *options)
    assert done.exit_code == code and said in done.stderr, done.output
    assert len(done.stderr.splitlines()) == 1
    assert (dist / REPORT_NAME).read_bytes() == before
    assert sorted(p.name for p in dist.iterdir()) == ["model.tflite", REPORT_NAME]


def test_a_missing_file_and_a_missing_report_are_bad_input(run: Run, dist: Path, tmp_path: Path) -> None:
    assert run("import-latency", str(dist), str(tmp_path / "none"), "--device", "x").exit_code == 3
    (tmp_path / "a.txt").write_text(BENCHMARK_MODEL)
    assert run("import-latency", str(tmp_path), str(tmp_path / "a.txt"), "--device", "x").exit_code == 3


def test_a_prompt_s_time_is_of_its_tokens(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "onnx"
    folder.mkdir()
    write_artifact(folder, FILES)
    (tmp_path / "p.txt").write_text(PERF_TEST)
    done = run("import-latency", str(folder), str(tmp_path / "p.txt"), "--device", "pi", "--prompt", "64")
    assert done.exit_code == 0, done.output
    entry = load_report(folder).artifacts[0].imported[-1]
    assert (entry.phase, entry.tokens, entry.statistic) == ("prefill", 64, "median")


def test_adb_pushes_runs_cleans_up_and_imports(run: Run, dist: Path, adb: Path) -> None:
    done = run("bench", str(dist), "--adb", "any", "--steps", "50", "--threads", "2")
    assert done.exit_code == 0, done.output
    (entry,) = load_report(dist).artifacts[0].imported
    assert (entry.device, entry.file, entry.date) == ("Pixel 8, Android 14", "adb R3", "2026-11-30")
    assert entry.ms == pytest.approx(8.2604)
    calls = asked(adb)
    push = next(c for c in calls if c[2:3] == ["push"])
    assert push[:2] == ["-s", "R3"] and push[3] == str(dist / "model.tflite")
    ran = next(c for c in calls if "--graph" in c[-1])[-1]
    assert f"--graph={push[4]} --num_threads=2 --num_runs=50" in ran
    assert calls[-1][2:] == ["shell", f"rm -f {push[4]}"]


@pytest.mark.parametrize(
    ("devices", "answers", "options", "code", "said"),
    [
        ("", {}, (), 5, "no device is attached"),
        ("R3\tunauthorized\n", {}, (), 5, "the device R3 is unauthorized"),
        ("R3\tdevice\nR4\tdevice\n", {}, (), 2, "several devices are attached: R3, R4"),
        ("R3\tdevice\n", {}, ("R9",), 5, "no device 'R9'"),
        ("R3\tdevice\n", {"push": (1, "", "adb: error: device 'R3' not found")}, (), 5, "adb failed on R3"),
        ("R3\tdevice\n", {"benchmark_model --graph": (255, "", "adb: device offline")}, (), 5, "device offline"),
        ("R3\tdevice\n", {"benchmark_model --graph": (127, "sh: benchmark_model: inaccessible or not found\n", "")}, (),
         5, "isn't on the device"),
        ("R3\tdevice\n", {"benchmark_model --graph": (0, "timings: 8 ms, rather quick\n", "")}, (), 3,
         "no line of timings"),
    ],
)
def test_whatever_goes_wrong_on_adb_is_a_sentence_and_changes_nothing(
    run: Run, dist: Path, adb: Path, devices: str, answers: dict[str, tuple[int, str, str]], options: tuple[str, ...],
    code: int, said: str,
) -> None:
    plan(adb, devices, **answers)
    before = (dist / REPORT_NAME).read_bytes()
    done = run("bench", str(dist), "--adb", *(options or ("any",)))
    assert done.exit_code == code and said in done.stderr, done.output
    assert len(done.stderr.splitlines()) == 1
    assert (dist / REPORT_NAME).read_bytes() == before


def test_without_adb_nothing_can_be_run(run: Run, dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("bench", str(dist), "--adb", "any")
    assert done.exit_code == 5 and "there is no adb" in done.stderr


def test_options_of_adb_that_can_t_be(run: Run, dist: Path, adb: Path) -> None:
    assert run("bench", str(dist), "--benchmark-model", "/x").exit_code == 2
    assert run("bench", str(dist), "--adb", "any", "--benchmark-model", "/x; reboot").exit_code == 2
    assert run("bench", str(dist), "--adb", "any", "--device", "a", "--device", "b").exit_code == 2
