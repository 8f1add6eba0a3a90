"""Small graphs to time: they run, and their work is what their makers put in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from needle_export.measure.latency import ask
from needle_export.targets import find_target
from needle_export.targets.base import TimesKernels
from needle_export.targets.kernels import WIDTH, Kernel

TARGETS = ("onnx", "tflite")
BYTES = {"fp32": WIDTH * WIDTH * 4, "int8": WIDTH * WIDTH, "int4": WIDTH * WIDTH // 2}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", BYTES)
def test_a_chain_of_matrices_is_just_that(target: str, dtype: str, tmp_path: Path) -> None:
    found = find_target(target)
    assert isinstance(found, TimesKernels)
    run, phase = found.kernel(Kernel("products", dtype, 3, 4), tmp_path)
    run()
    (op,) = phase.ops
    assert (op.count, op.dtype, op.macs) == (3, dtype, 4 * WIDTH * WIDTH)
    # Scales come on top.
    assert BYTES[dtype] <= op.weight_bytes < 1.15 * BYTES[dtype]
    assert op.moved_bytes == 2 * 4 * WIDTH * 4


@pytest.mark.parametrize("target", TARGETS)
def test_a_block_has_the_ops_of_one(target: str, tmp_path: Path) -> None:
    found = find_target(target)
    assert isinstance(found, TimesKernels)
    run, phase = found.kernel(Kernel("blocks", "int8", 2, 1), tmp_path)
    run()
    counts: Counter[str] = Counter()
    for op in phase.ops:
        counts[op.op] += op.count
    matrices = [op for op in phase.ops if op.dtype == "int8"]
    assert sum(op.count for op in matrices) == 2 * 3
    balancing = {"onnx": "LpNormalization", "tflite": "DIV"}[target]
    assert counts[balancing] == 2 * 38
    assert {"onnx": 80, "tflite": 140}[target] < phase.count / 2 < {"onnx": 100, "tflite": 180}[target]
    run64, phase64 = found.kernel(Kernel("blocks", "int8", 1, 64), tmp_path)
    run64()
    assert phase64.count == phase.count / 2 and phase64.macs == 64 * phase.macs / 2


def test_a_process_of_its_own_times_them() -> None:
    answer = ask({"what": "kernels", "target": "onnx", "folder": "onnx", "kernels": {"call": {"kind": "small"}}})
    assert 0 < answer["call"]["seconds"] < 0.1
    assert answer["call"]["phase"]["ops"][0]["op"] == "Mul"
