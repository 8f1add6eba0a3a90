"""The measurements behind the decision records and docs/onnx.md.

    python docs/decisions/measure.py [NAME...]      # single nodes: all of them, or those named
    python docs/decisions/measure.py builds DIR...  # decode steps of several builds, in turn

Single nodes run in ONNX Runtime, one thread, caches bound in and out as a host binds them; the median is
written in microseconds. Run it on a quiet machine, and trust the ratios.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

H, G, QK, V = 12, 2, 48, 64
MS = "com.microsoft"
SCALE = QK**-0.5
Arrays = dict[str, np.ndarray]


def node(kind: str, inputs: str, outputs: str, domain: str = "", **attributes: object) -> onnx.NodeProto:
    """A node from space-separated names."""
    return helper.make_node(kind, inputs.split(), outputs.split(), domain=domain, **attributes)


def run(nodes: Sequence[onnx.NodeProto], feeds: Arrays, outputs: Arrays, constants: Arrays) -> float:
    """Median microseconds of one call."""

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    graph = helper.make_graph(
        list(nodes),
        "g",
        [info(k, v) for k, v in feeds.items()],
        [info(k, v) for k, v in outputs.items()],
        [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(MS, 1)], ir_version=12
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for _ in range(200):
        session.run_with_iobinding(binding)
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def f(*shape: int) -> np.ndarray:
    """Random floats."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def repeated(kind: Callable[[int], onnx.NodeProto], feeds: Arrays, outputs: Arrays, constants: Arrays) -> float:
    """Microseconds a node in a chain: the difference between 40 and 8 of them, divided by 32."""

    def chain(count: int) -> float:
        nodes = [kind(i) for i in range(count)]
        nodes.append(node("Identity", f"x{count}", "y"))
        return run(nodes, feeds, outputs, constants)

    return (chain(40) - chain(8)) / 32


#: Scores, mask, softmax, values: the groups' rows are read strided where they lie.
BY_HAND = [
    node("FusedMatMul", "q k", "s", MS, transB=1, transBatchB=1, alpha=SCALE),
    node("Add", "s m", "t"),
    node("Softmax", "t", "w", axis=-1),
    node("FusedMatMul", "w v", "o", MS, transBatchB=1),
]


def by_hand(keys: np.ndarray, values: np.ndarray) -> float:
    """Attention of one row as four nodes; keys [S, G, Dqk], values [S, G, Dv]."""
    mask = np.zeros((1, len(keys)), np.float32)
    feeds = {"q": f(G, H // G, QK), "k": keys, "v": values, "m": mask}
    return run(BY_HAND, feeds, {"o": f(G, H // G, V)}, {})


def attention() -> None:
    """One query row over S cached rows: by hand, the Attention op on [1, S, G*D], and on [1, G, S, D]."""
    for size in (256, 1024):
        k, v, mask = f(size, G, QK), f(size, G, V), np.zeros((1, size), np.float32)
        hand = by_hand(k, v)
        flat = run(
            [node("Attention", "q k v m", "o", q_num_heads=H, kv_num_heads=G, scale=SCALE)],
            {"q": f(1, 1, H * QK), "k": k.reshape(1, size, -1), "v": v.reshape(1, size, -1), "m": mask},
            {"o": f(1, 1, H * V)},
            {},
        )
        heads = run(
            [node("Attention", "q k v m", "o", scale=SCALE)],
            {"q": f(1, H, 1, QK), "k": f(1, G, size, QK), "v": f(1, G, size, V), "m": mask},
            {"o": f(1, H, 1, V)},
            {},
        )
        say(
            f"attention, {size} rows: {hand:.0f} us by hand, {flat:.0f} us Attention on [1, S, G*D], "
            f"{heads:.0f} us on [1, G, S, D]"
        )


def prefix() -> None:
    """300 rows in use of a 2,048-row cache: a prefix bound, or all of it with nonpad_kv_seqlen."""
    k, v = f(2048, G, QK), f(2048, G, V)
    bound = by_hand(k[:320], v[:320])
    inputs = ["q", "k", "v", "", "", "", "n"]
    whole = run(
        [helper.make_node("Attention", inputs, ["o"], q_num_heads=H, kv_num_heads=G, scale=SCALE)],
        {
            "q": f(1, 1, H * QK),
            "k": k.reshape(1, 2048, -1),
            "v": v.reshape(1, 2048, -1),
            "n": np.array([300], np.int64),
        },
        {"o": f(1, 1, H * V)},
        {},
    )
    say(f"300 rows in use of 2,048: {bound:.0f} us with a prefix of 320 bound, {whole:.0f} us with nonpad_kv_seqlen")


def write() -> None:
    """One row into a 2,048-row cache, bound as input and output, and into another buffer."""
    cache, other = f(2048, G, QK), f(2048, G, QK)
    feeds = {"c": cache, "i": np.array([[300]], np.int64), "u": f(1, G, QK)}
    nodes = [node("ScatterND", "c i u", "o")]
    idle = run([node("Identity", "u", "o")], {"u": feeds["u"]}, {"o": f(1, G, QK)}, {})
    same, apart = (run(nodes, feeds, {"o": out}, {}) for out in (cache, other))
    say(
        f"writing a row: {same - idle:.1f} us in place, {apart - idle:.1f} us into another buffer "
        f"(the {idle:.1f} us of an empty call taken off)"
    )


def permutation() -> None:
    """1,024 floats in another order."""
    order = np.random.RandomState(11).permutation(1024).astype(np.int64)
    x, y = {"x0": f(1, 1024)}, {"y": f(1, 1024)}
    gather = repeated(lambda i: node("Gather", f"x{i} p", f"x{i + 1}", axis=1), x, y, {"p": order})
    elements = repeated(lambda i: node("GatherElements", f"x{i} p", f"x{i + 1}", axis=1), x, y, {"p": order[None]})
    say(f"permuting 1,024 floats: {elements:.1f} us GatherElements, {gather:.1f} us Gather")


def sinkhorn() -> None:
    """A node of a half iteration on a 4 x 4 matrix."""
    x, y = {"x0": np.abs(f(4, 4)) + 0.1}, {"y": f(4, 4)}
    norm = repeated(lambda i: node("LpNormalization", f"x{i}", f"x{i + 1}", axis=-1 - i % 2, p=1), x, y, {})
    log = repeated(lambda i: node("LogSoftmax", f"x{i}", f"x{i + 1}", axis=-1 - i % 2), x, y, {})
    say(f"half a Sinkhorn iteration: {norm:.2f} us LpNormalization, {log:.2f} us LogSoftmax")


def blocks() -> None:
    """A product of one row with integers: 20 different matrices in one graph, as a step reads each once."""
    count = 20
    for bits in (4, 8):
        for rows, columns in ((1568, 768), (768, 768), (24, 3072), (8192, 768)):
            found = []
            for block in (32, 64, 128, 256):
                shape = (rows, columns // block, block * bits // 8)
                rng = np.random.default_rng(0)
                constants = {f"b{i}": rng.integers(0, 256, shape, np.uint8) for i in range(count)}
                constants["s"] = np.full(shape[:2], 0.01, np.float32)
                size = {"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": 4}
                nodes = [node("MatMulNBits", f"x b{i} s", f"y{i}", MS, **size) for i in range(count)]
                outputs = {f"y{i}": f(1, rows) for i in range(count)}
                found.append(f"{run(nodes, {'x': f(1, columns)}, outputs, constants) / count:.1f} us by {block}")
            say(f"{bits} bits, {rows} x {columns}: {', '.join(found)}")


def builds(folders: Sequence[str]) -> None:
    """Decode steps of each build in turn, so that all meet the same machine; the quickest tenth counts."""
    from needle_export.targets.onnx.session import OnnxRunner

    runners = [OnnxRunner(Path(folder)) for folder in folders]
    tokens = np.random.default_rng(0).integers(1, min(r.vocab for r in runners), 1024)
    for begin, end in ((256, 448), (768, 960)):
        times: list[list[float]] = [[] for _ in runners]
        for runner in runners:
            runner.feed(tokens[runner.position : begin])
        for index in range(begin, end):
            for runner, spent in zip(runners, times, strict=True):
                start = time.perf_counter()
                runner.feed(tokens[index : index + 1])
                spent.append(time.perf_counter() - start)
        quick = [float(np.percentile(spent, 10)) * 1e3 for spent in times]
        for folder, ms in zip(folders, quick, strict=True):
            say(f"{folder}, {begin} tokens in: {ms:.2f} ms a token, {ms / quick[0]:.2f} of the first")


def say(text: str) -> None:
    """One line of the result."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


ALL = {name.__name__: name for name in (attention, prefix, write, permutation, sinkhorn, blocks)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["builds"]:
        builds(sys.argv[2:])
    else:
        for wanted in sys.argv[1:] or ALL:
            ALL[wanted]()
