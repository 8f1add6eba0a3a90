"""Forms that a lowering chose between, in LiteRT on CPU: chains of one op or a few.

    python -m tests.benchmarks.tflite_micro [NAME...]   # norms scales caches joins turns sinkhorns; default: all

One thread. Chains of 40 links are timed in turn, round by round; the median of the rounds in microseconds a link, with
the quartiles. Trust the differences and ratios.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from litert_converter.mlir import ir, passmanager
from litert_converter.mlir._mlir_libs import converter_api_ext as converter
from litert_converter.mlir.dialects import func
from numpy.typing import NDArray

from needle_export.config.rules import Rules
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.store import WeightStore
from needle_export.targets.views import Ref

Array = NDArray[Any]
Shape = tuple[int, ...]
Body = Callable[[Builder, Ref, list[Ref], int], Ref]

LINKS, ROUNDS, REPEATS = 40, 40, 22


def chain(shapes: list[tuple[int, ...]], body: Body, links: int = LINKS) -> Interpreter:
    """A model of links one after the other, over the first of its inputs."""
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context, ir.Location.unknown():
        module = ir.Module.create()
        types = [ir.RankedTensorType.get(shape, ir.F32Type.get()) for shape in shapes]
        main = func.FuncOp("main", ir.FunctionType.get(types, []), ip=ir.InsertionPoint.at_block_begin(module.body))
        builder = Builder(SimpleNamespace(streams={}, weights={}), WeightStore(Rules("fp32")), 1)  # type: ignore[arg-type]  # no program
        with ir.InsertionPoint(main.add_entry_block()):
            inputs = [Ref(a, shape) for a, shape in zip(main.arguments, shapes, strict=True)]
            value = inputs[0]
            for link in range(links):
                value = body(builder, value, inputs, link)
            func.ReturnOp([value.value])
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, [value.value.type]))
        main.attributes["sym_visibility"] = ir.StringAttr.get("public")
        names = [f"x{i}" for i in range(len(shapes))]
        converter.set_signature(module.operation, signature_name="decode", input_names=names, output_names=["z"])
        merged = converter.merge_modules([module])
        converter.run_convert_to_tfl_passes(merged, passmanager.PassManager(), converter.ConvertToTFLConfig())
        data = converter.export_flatbuffer_to_bytes(getattr(merged, "operation", merged))
    interpreter = Interpreter(model_content=data, num_threads=1)
    filled(interpreter)
    return interpreter


def filled(model: Interpreter) -> Array:
    """Set every input once, to values that stay there; the first output of one run."""
    rng = np.random.default_rng(0)
    model.allocate_tensors()
    for d in model.get_input_details():
        value = rng.standard_normal(d["shape"], np.float32) if d["dtype"] == np.float32 else np.full(d["shape"], 200)
        model.set_tensor(d["index"], value.astype(d["dtype"]))
    model.invoke()
    result: Array = model.get_tensor(model.get_output_details()[0]["index"])
    return result


def partitions(model: Interpreter) -> int:
    """How many pieces XNNPACK has made of it."""
    return sum(op["op_name"] == "DELEGATE" for op in model._get_ops_details())


def timed(models: dict[str, Interpreter], links: int = LINKS) -> dict[str, Array]:
    """Microseconds a link, the median of each round; in turn."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            spent = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                model.invoke()
                spent.append(time.perf_counter() - start)
            times[name].append(float(np.median(spent[2:])) / links * 1e6)
    return {name: np.array(t) for name, t in times.items()}


def spread(a: Array) -> str:
    """The median and, in brackets, the quartiles."""
    low, middle, high = np.percentile(a, (25, 50, 75))
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def compare(title: str, chains: dict[str, tuple[list[Shape], Body]], links: int = LINKS) -> None:
    """Time chains against each other and print them."""
    times = timed({name: chain(shapes, body, links) for name, (shapes, body) in chains.items()}, links)
    print(title)
    for name, us in times.items():
        print(f"    {name:44}{spread(us)} us")


def norms() -> None:
    """RMS norm with its mean as two ops, and as one product with a vector of 1/D and a bias."""

    def two(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        return b.mul(x, b.unary("rsqrt", b.add(b.reduce("mean", b.mul(x, x), -1), b.constant(1e-6))))

    def one(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        width = x.dims[-1]
        row = b.constant(np.full((1, width), 1 / width))
        return b.mul(x, b.unary("rsqrt", b.product(b.mul(x, x), row, b.constant([1e-6]))))

    for shape in ((1, 768), (1, 3072), (14, 48)):
        compare(f"RMS norm of {list(shape)}", {"MEAN, ADD": ([shape], two), "FULLY_CONNECTED": ([shape], one)})


def scales() -> None:
    """An int8 product 768 x 768 with its rows' scales in the tensor, and behind the op."""
    width = 768
    rng = np.random.default_rng(0)
    rows = (rng.random(width) * 1e-3 + 1e-4).astype(np.float32)

    def weight(b: Builder, scales: str) -> Ref:
        values = rng.integers(-127, 128, (width, width)).astype(np.int8)
        plain = ir.RankedTensorType.get(values.shape, ir.IntegerType.get_signless(8))
        dense = ir.DenseElementsAttr.get(values, type=plain)
        kind = ir.Type.parse(f"tensor<{width}x{width}x!quant.uniform<i8<-127:127>:f32{scales}>>")
        made = ir.Operation.create(
            "tfl.pseudo_qconst", results=[kind], attributes={"value": dense, "qtype": ir.TypeAttr.get(kind)}
        )
        return Ref(made.result, values.shape)

    inside = ":0, {" + ",".join(f"{s:.9e}" for s in rows) + "}"
    chains: dict[str, tuple[list[Shape], Body]] = {}
    for count in (1, 64):
        shape = (count, width)
        chains |= {
            f"{count} rows, scales in the tensor": ([shape], lambda b, x, a, i: b.product(x, weight(b, inside))),
            f"{count} rows, one scale": ([shape], lambda b, x, a, i: b.product(x, weight(b, ", 0.0004"))),
            f"{count} rows, scale 1 and a MUL behind": (
                [shape], lambda b, x, a, i: b.mul(b.product(x, weight(b, ", 1.0")), b.constant(rows))),
        }
    compare("int8 FULLY_CONNECTED 768 x 768", chains)


def caches() -> None:
    """Attention of one row, 12/2 heads, 48/64 wide, over a cache of 256 and of 1,024 rows; caches of 20 blocks."""
    blocks = 20
    for size in (256, 1024):

        def attend(k: Shape, v: Shape, left_k: bool, left_v: bool, size: int = size) -> tuple[list[Shape], Body]:
            def body(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
                keys, values = a[1 + i], a[1 + blocks + i]
                # The sums stand before the transposes, or the converter makes right operands of the left ones again.
                if left_k:
                    mask = b.constant(np.ones((size, 1)))
                    scores = b.transpose(b.add(b.matmul(keys, x, transpose_y=True), mask), (0, 2, 1))
                else:
                    scores = b.add(b.matmul(x, keys, transpose_y=k[1] != 48), b.constant(np.ones((1, size))))
                weights = b.softmax(scores)
                if left_v:
                    own = b.constant(np.ones((64, 1)))
                    out = b.transpose(b.add(b.matmul(values, weights, transpose_y=True), own), (0, 2, 1))
                else:
                    out = b.add(b.matmul(weights, values, transpose_y=v[1] == 64), b.constant(np.ones((1, 64))))
                return b.slice(out, -1, 0, 48)

            return [(2, 6, 48), *[k] * blocks, *[v] * blocks], body

        rows, turned = ((2, size, 48), (2, size, 64)), ((2, 48, size), (2, 64, size))
        compare(
            f"attention of one row over {size} rows",
            {
                "K, V [G, S, D], right operands": attend(*rows, False, False),
                "K left, V right": attend(*rows, True, False),
                "K right, V [G, D, S] left": attend(rows[0], turned[1], False, True),
                "K left, V [G, D, S] left": attend(rows[0], turned[1], True, True),
                "K [G, D, S] right, V right": attend(turned[0], rows[1], False, False),
                "K right, V [G, D, S] right": attend(rows[0], turned[1], False, False),
            },
            blocks,
        )


def joins() -> None:
    """Attention of 64 rows over 256 cached and the new ones: keys and values joined, or scores cut."""
    new, size = 64, 256
    shapes: list[Shape] = [(2, 6 * new, 48), (2, size, 48), (2, size, 64), (2, new, 48), (2, new, 64)]

    def joined(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        keys, values = b.concat([a[1], a[3]], 1), b.concat([a[2], a[4]], 1)
        out = b.matmul(b.softmax(b.matmul(x, keys, transpose_y=True)), values)
        return b.slice(out, -1, 0, 48)

    def cut(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        scores = b.concat([b.matmul(x, a[1], transpose_y=True), b.matmul(x, a[3], transpose_y=True)], -1)
        weights = b.softmax(scores)
        seen = b.matmul(b.slice(weights, -1, 0, size), a[2])
        out = b.add(seen, b.matmul(b.slice(weights, -1, size, new), a[4]))
        return b.slice(out, -1, 0, 48)

    compare(
        f"attention of {new} rows over {size} cached and {new} new ones",
        {"keys and values joined": (shapes, joined), "scores joined, weights cut": (shapes, cut)},
        10,
    )


def turns() -> None:
    """A permutation of the last axis of [64, 1024]: as it lies, or of runs of 64."""
    shape, index = (64, 1024), np.random.RandomState(11).permutation(1024)

    def plain(b: Builder, x: Ref, a: list[Ref], _: int) -> Ref:
        return b.add(x, a[1])

    def last(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        return b.gather(plain(b, x, a, i), b.constant(index, np.int32), 1)

    def runs(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        return b.transpose(b.gather(b.transpose(plain(b, x, a, i), (1, 0)), b.constant(index, np.int32), 0), (1, 0))

    compare(
        "1,024 floats of 64 rows in another order, and an ADD",
        {"ADD alone": ([shape] * 2, plain), "GATHER of the last axis": ([shape] * 2, last),
         "TRANSPOSE, GATHER of the first, TRANSPOSE": ([shape] * 2, runs)},
    )


def sinkhorns() -> None:
    """Half an iteration of Sinkhorn on matrices 4 x 4: a sum and a quotient, and a product with ones and a quotient."""
    ones, eye = np.ones((4, 4)), np.eye(4)
    sums = np.kron(eye, ones), np.kron(ones, eye)

    def sum_(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        return b.binary("div", x, b.reduce("sum", x, -2 if i % 2 else -1))

    def product(b: Builder, x: Ref, a: list[Ref], i: int) -> Ref:
        return b.binary("div", x, b.product(x, b.constant(sums[i % 2])))

    for count in (1, 64):
        compare(
            f"half an iteration of Sinkhorn on {count} matrices 4 x 4",
            {"SUM, DIV": ([(count, 4, 4)], sum_), "FULLY_CONNECTED, DIV": ([(count, 16)], product)},
        )


ALL = {part.__name__: part for part in (norms, scales, caches, joins, turns, sinkhorns)}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or ALL:
        ALL[wanted]()
