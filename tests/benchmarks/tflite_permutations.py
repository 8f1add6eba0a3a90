"""What the two permutations of each MLP cost in LiteRT, and what a way round their GATHER would cost.

    python -m tests.benchmarks.tflite_permutations               # single permutations of 1,024 floats
    python -m tests.benchmarks.tflite_permutations step [ROWS]   # a whole int8 step: with GATHER, with the network, and
                                                                 # with neither, which is wrong and a bound

XNNPACK has no GATHER, so each one cuts the graph. One thread; models are timed in turn, round by round. Single
permutations are links of chains of 40, each with constants of its own. A way round is checked before it is timed.
docs/decisions/0009 draws the conclusion.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.checkpoint.sample import write_sample
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.graph.program import FxNode
from needle_export.targets.base import LoweringOptions
from needle_export.targets.tflite import elementwise, lower
from needle_export.targets.tflite.builder import Builder
from needle_export.targets.tflite.target import TfliteTarget
from needle_export.targets.views import Ref
from tests.benchmarks.tflite_micro import Array, Body, chain, filled, partitions, spread, timed

SIZE, SIDE = 1024, 32


def order(link: int) -> Array:
    """The permutation of a link: out[i] = x[order[i]]."""
    return np.random.RandomState(11 + link).permutation(SIZE)


def routes(index: Array) -> list[Array]:
    """A permutation as three stages of 32 switches of 32 x 32: one-hot [32, 32, 32] each (a Clos network).

    Between the stages the value is turned, so that each switch of the middle stage has one entry of every switch before
    it and behind it. Which one an entry passes is the colour of an edge from first to last switch, such that no two
    edges of a switch share one: the graph is regular, so 32 perfect matchings, one after the other, colour it.
    """
    left: dict[tuple[int, int], list[int]] = {}
    for place, source in enumerate(index.tolist()):
        left.setdefault((source // SIDE, place // SIDE), []).append(place)
    stages = [np.zeros((SIDE, SIDE, SIDE), np.float32) for _ in range(3)]

    def augment(first: int, seen: set[int], match: dict[int, int]) -> bool:
        for last in range(SIDE):
            if last not in seen and left.get((first, last)):
                seen.add(last)
                if last not in match or augment(match[last], seen, match):
                    match[last] = first
                    return True
        return False

    for middle in range(SIDE):
        match: dict[int, int] = {}
        assert all(augment(first, set(), match) for first in range(SIDE))
        for last, first in match.items():
            place = left[first, last].pop()
            stages[0][first, index[place] % SIDE, middle] = 1
            stages[1][middle, first, last] = 1
            stages[2][last, middle, place % SIDE] = 1
    return stages


def switched(b: Builder, x: Ref, index: Array) -> Ref:
    first, middle, last = (b.constant(stage) for stage in routes(index))
    x = b.transpose(b.matmul(x, first), (2, 1, 0))
    return b.matmul(b.transpose(b.matmul(x, middle), (2, 1, 0)), last)


def gathered(b: Builder, x: Ref, index: Array, shape: tuple[int, ...]) -> Ref:
    return b.gather(b.reshape(x, (SIZE,)), b.constant(index.reshape(shape), np.int32), 0)


def factor(link: int) -> Array:
    """A first Kronecker factor, transposed; orthogonal, so that values keep their size."""
    return np.linalg.qr(np.random.default_rng(link).standard_normal((SIDE, SIDE)))[0].astype(np.float32)


def merged(b: Builder, x: Ref, link: int) -> Ref:
    """Permutation and factor at once: a broadcast MUL [32, 1024] and a one-hot product that sums by column."""
    to = np.argsort(order(link))
    wide = b.mul(b.reshape(x, (1, SIZE)), b.constant(factor(link)[:, to // SIDE]))
    return b.product(wide, b.constant(np.eye(SIDE, dtype=np.float32)[:, to % SIDE]))


FLAT, SWITCHES, SQUARE = (1, SIZE), (SIDE, 1, SIDE), (SIDE, SIDE)
EYE = np.eye(SIZE, dtype=np.float32)
#: By name: shape of the value, a link, and the chain without a permutation.
CHAINS: dict[str, tuple[tuple[int, ...], Body, str]] = {
    "ADD": (FLAT, lambda b, x, a, i: b.add(x, a[1]), ""),
    "ADD, GATHER": (FLAT, lambda b, x, a, i: gathered(b, b.add(x, a[1]), order(i), FLAT), "ADD"),
    "ADD, three stages": (SWITCHES, lambda b, x, a, i: switched(b, b.add(x, a[1]), order(i)), "ADD"),
    "ADD, dense product": (FLAT, lambda b, x, a, i: b.product(b.add(x, a[1]), b.constant(EYE[order(i)])), "ADD"),
    "factor": (SQUARE, lambda b, x, a, i: b.matmul(b.constant(factor(i)), x), ""),
    "GATHER, factor": (SQUARE, lambda b, x, a, i: b.matmul(b.constant(factor(i)), gathered(b, x, order(i), SQUARE)),
                       "factor"),
    "merged with factor": (SQUARE, lambda b, x, a, i: merged(b, x, i), "factor"),
}


def singles() -> None:
    """Check every way on one link, then time chains."""
    found = {name: filled(chain([shape, shape], body, 1)).reshape(-1) for name, (shape, body, _) in CHAINS.items()}
    for name in ("ADD, GATHER", "ADD, three stages", "ADD, dense product"):
        assert np.array_equal(found[name], found["ADD"][order(0)]), name
    assert np.allclose(found["merged with factor"], found["GATHER, factor"], atol=1e-5)
    models = {name: chain([shape, shape], body) for name, (shape, body, _) in CHAINS.items()}
    times = timed(models)
    for name, (_, _, bare) in CHAINS.items():
        more = f"; for the permutation{spread(times[name] - times[bare])}" if bare else ""
        print(f"{name:20}{partitions(models[name]):3} partitions, us a link{spread(times[name])}{more}")


def step(rows: int) -> None:
    """Decode of the published geometry at int8, in one file for each way."""

    def network(b: Builder, n: FxNode) -> None:
        index = b.program.weights[n.args[2].name].value.numpy()
        b.put(n, switched(b, b.reshape(b.ref(n.args[0]), SWITCHES), index))

    ways = {"GATHER": elementwise.index_select, "three stages": network, "left out": elementwise.view}
    models, results = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        write_sample(Path(folder) / "p.safetensors", PUBLISHED, 0)
        compiler = Compiler(read_checkpoint(str(Path(folder) / "p.safetensors")), rows, NullProgress())
        options = LoweringOptions(Rules("int8"), rows, None, compiler.max_chunk, {})
        for name, lowering in ways.items():
            (place := Path(folder) / name).mkdir()
            with patch.dict(lower._LOWERINGS, {elementwise.aten.index_select.default: lowering}):
                TfliteTarget().compile(compiler, compiler.states, PUBLISHED.head_vocab, place, options)
            models[name] = Interpreter(str(place / "model.tflite"), num_threads=1)
            results[name] = filled(models[name])
        assert np.array_equal(results["three stages"], results["GATHER"])
        times = timed(models, 1)
    for name, us in times.items():
        each = (us - times["left out"]) / (2 * PUBLISHED.num_layers)
        print(f"{name:13}{partitions(models[name]):3} partitions, ms{spread(us / 1e3)}, us a permutation{spread(each)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        step(int((sys.argv[2:] or [256])[0]))
    else:
        singles()
