"""The published 20-layer geometry: the sizes, counts and limits that this project promises.

Times live in the benchmark; here stands what doesn't depend on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.sample import write_sample

pytestmark = pytest.mark.published

PROGRAM = """
import json, sys
from pathlib import Path
from needle_export import pipeline
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.measure.latency import peak_rss
options = BuildOptions(sys.argv[1], Path(sys.argv[2]), weights=sys.argv[3], bench=False)
pipeline.build(options, NullProgress())
print(json.dumps(peak_rss()))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "needle3.safetensors"
    write_sample(path, PUBLISHED, 0)
    return path


@pytest.mark.parametrize(("weights", "width"), [("fp32", 4), ("fp16", 2)])
def test_a_build_keeps_its_promises(weights, width, checkpoint, tmp_path):
    out = tmp_path / "dist"
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(out), weights]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    (artifact,) = report["artifacts"]
    parameters = report["checkpoint"]["parameters"]
    assert parameters == 121_019_861
    assert artifact["size"]["total_bytes"] <= 1.01 * width * parameters
    parity = artifact["parity"]
    assert parity["max_abs"] <= 1e-4 and parity["steps"] == parity["argmax_equal"] >= 3 * 64
    assert parity["distinct_predictions"] > 100
    for name, fusion in artifact["fusion"].items():
        assert fusion["fused"] == fusion["expected"], name
    if weights == "fp32":
        assert artifact["nodes"]["decode"] <= 2000
    # Full caches for the 1,024 positions: keys 48 and values 64 wide, two heads, twenty blocks.
    parts = artifact["state_bytes"]["by_part"]
    assert parts["keys"] == 20 * 1024 * 2 * 48 * 4 and parts["values"] == 20 * 1024 * 2 * 64 * 4
    assert json.loads(done.stdout) < 5e9
