"""NeedleHost.swift, compiled and run beside host.py; needs a Swift compiler, and no Apple system."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.targets.coreml.contract import output_ports
from needle_export.targets.coreml.host import Host
from tests.support.coreml_contracts import CASES, contract_of

SWIFT = Path(__file__).parents[2] / "needle_export" / "targets" / "coreml" / "NeedleHost.swift"

#: Reads cases, goes through their calls twice with a reset between, and tells what a host has after each prompt.
DRIVER = """
import Foundation

struct Blob: Codable {
    let shape: [Int]
    let type: String
    let data: Data
}

struct Call: Codable {
    let tokens: [Int32]
    let bucket: Int
    let outputs: [String: Blob]
}

struct Case: Codable {
    let contract: String
    let prompts: [[Call]]
}

struct Answer: Codable {
    let plan: [[Int]]
    let inputs: [[String: Blob]]
    let caches: [String: Blob]
    let history: [Int32]
    let position: Int
}

func blob(_ tensor: NeedleTensor) -> Blob {
    let data = Data(bytes: tensor.memory, count: tensor.count * tensor.type.size)
    return Blob(shape: tensor.shape, type: tensor.type.rawValue, data: data)
}

func tensor(_ blob: Blob) -> NeedleTensor {
    let made = NeedleTensor(blob.shape, NeedleType(rawValue: blob.type)!)
    blob.data.withUnsafeBytes { made.memory.copyMemory(from: $0.baseAddress!, byteCount: blob.data.count) }
    return made
}

let cases = try JSONDecoder().decode([Case].self, from: FileHandle.standardInput.readDataToEndOfFile())
var answers: [[Answer]] = []
for one in cases {
    let host = NeedleHost(try NeedleContract.decode(one.contract))
    for _ in 0..<2 {
        var told: [Answer] = []
        for prompt in one.prompts {
            var length = 0
            for call in prompt { length += call.tokens.count }
            let plan = host.plan(length).map { [$0.count, $0.bucket] }
            var inputs: [[String: Blob]] = []
            for call in prompt {
                inputs.append(host.inputs(call.tokens, bucket: call.bucket).mapValues(blob))
                if !host.contract.stateful {
                    try host.keep(call.outputs.mapValues(tensor), count: call.tokens.count)
                }
                host.advance(call.tokens)
            }
            told.append(Answer(
                plan: plan, inputs: inputs, caches: host.caches.mapValues(blob),
                history: host.history, position: host.position))
        }
        answers.append(told)
        host.reset()
    }
}
FileHandle.standardOutput.write(try JSONEncoder().encode(answers))
"""

#: Bits of numbers in half precision, as the file computes them.
HALF_DRIVER = """
import Foundation

let values = try JSONDecoder().decode([UInt32].self, from: FileHandle.standardInput.readDataToEndOfFile())
FileHandle.standardOutput.write(try JSONEncoder().encode(values.map { needleHalf(Float(bitPattern: $0)) }))
"""


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("swiftc")
    if found is None:
        pytest.skip("swiftc isn't installed")
    return found


def run(compiler: str, driver: str, folder: Path, given: Any) -> Any:
    main = folder / "main.swift"
    main.write_text(driver, encoding="utf-8")
    program = folder / "program"
    subprocess.run([compiler, "-O", str(SWIFT), str(main), "-o", str(program)], check=True)
    answer = subprocess.run([program], input=json.dumps(given).encode(), capture_output=True, check=True)
    return json.loads(answer.stdout)


def blob(value: Any) -> dict[str, Any]:
    data = np.ascontiguousarray(value)
    return {"shape": list(data.shape), "type": str(data.dtype), "data": base64.b64encode(data.tobytes()).decode()}


def test_swift_computes_what_the_host_does(compiler: str, tmp_path: Path) -> None:
    """Plans, inputs, caches and histories over whole contexts, bit by bit."""
    cases, expected = [], []
    for case in CASES:
        for system in ("ios17", "ios18"):
            for half in (True, False):
                facts, states = contract_of(case, system, half)
                host, rng = Host(facts), np.random.default_rng(3)
                prompts, told = [], []
                while host.position < host.context:
                    length = min(host.context - host.position, int(rng.integers(1, 30)))
                    plan = host.plan(length)
                    calls, inputs = [], []
                    for count, bucket in plan:
                        tokens = rng.integers(0, 2**31, count)
                        given = host.inputs(tokens, bucket)
                        inputs.append({name: blob(value) for name, value in given.items()})
                        outputs: dict[str, Any] = {}
                        if not host.stateful:
                            ports = output_ports(states, 4, bucket, half, False)
                            outputs = {p.name: rng.normal(size=p.shape).astype(p.dtype) for p in ports}
                            host.keep(outputs, count)
                        host.advance(tokens)
                        calls.append(
                            {
                                "tokens": tokens.tolist(),
                                "bucket": bucket,
                                "outputs": {n: blob(v) for n, v in outputs.items()},
                            }
                        )
                    prompts.append(calls)
                    told.append(
                        {
                            "plan": [list(step) for step in plan],
                            "inputs": inputs,
                            "caches": {name: blob(value) for name, value in host.caches.items()},
                            "history": host.history.tolist(),
                            "position": host.position,
                        }
                    )
                cases.append({"contract": json.dumps(facts), "prompts": prompts})
                expected += [told, told]
    assert run(compiler, DRIVER, tmp_path, cases) == expected


def test_swift_rounds_to_half_precision(compiler: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    edges = np.array([0, -0.0, 1, -1e4, 65504, 65519.996, 65520, 65536, np.inf, -np.inf, 2**-14, 2**-25], np.float32)
    small = (rng.normal(size=5000) * 10.0 ** rng.uniform(-9, 5, 5000)).astype(np.float32)
    values = np.concatenate([edges, np.nextafter(edges[:8], np.float32(0)), small])
    with np.errstate(over="ignore", under="ignore"):
        expected = values.astype(np.float16).view(np.uint16).tolist()
    assert run(compiler, HALF_DRIVER, tmp_path, values.view(np.uint32).tolist()) == expected
