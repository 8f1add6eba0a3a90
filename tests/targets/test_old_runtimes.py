"""An artifact of an older opset runs in the runtime that the opset is for, in a venv of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from needle_export import pipeline
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress

ROOT = Path(__file__).parents[2]

#: The oldest release that each opset is promised for.
OLDEST = {21: ("1.18.1", "numpy<2"), 23: ("1.23.2", "numpy"), 24: ("1.25.1", "numpy")}

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime
from needle_export.measure import parity
from needle_export.targets.onnx.session import OnnxRunner
folder = Path(sys.argv[1])
assert onnxruntime.__version__ == sys.argv[2]
with np.load(folder / "reference.npz") as archive:
    cases, columns = parity.unpack({name: archive[name] for name in archive.files})
measured = parity.compare(OnnxRunner(folder), cases, columns, lambda _: None)
artifact = json.loads((folder / "report.json").read_text())["artifacts"][0]
fault = parity.judge(measured, parity.recorded_tolerance(artifact["weights"], artifact["parity"]))
assert fault is None, fault
print(measured.steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "weights"), [*((opset, "fp32") for opset in OLDEST), (24, "int8"), (24, "int4")])
def test_runs_in_the_oldest_promised_runtime(opset, weights, tmp_path):
    version, numpy = OLDEST[opset]
    checkpoint = tmp_path / "sample.safetensors"
    write_sample(checkpoint, SMALL, 0)
    out = tmp_path / "dist"
    options = BuildOptions(str(checkpoint), out, context=60, opset=opset, weights=weights, bench=False)
    pipeline.build(options, NullProgress())
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", f"onnxruntime=={version}", numpy]
    subprocess.run(install, check=True, capture_output=True)
    run = [str(python), "-c", PROGRAM, str(out), version]
    done = subprocess.run(
        run, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
