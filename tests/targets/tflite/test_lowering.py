"""The TFLite artifact computes what the reference computes, with builtins that every runtime and delegate knows."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx

from needle_export.checkpoint.geometry import SMALL
from needle_export.compile import Compiler
from needle_export.config.rules import Rules
from needle_export.graph import reference
from needle_export.graph.ops import op
from needle_export.graph.program import Part, Program, Weight
from needle_export.targets.ports import CONTRACT_KEY, Port
from needle_export.targets.tflite import contract
from needle_export.targets.tflite.analysis import Graph, metadata, read_graph
from needle_export.targets.tflite.session import Loop
from needle_export.targets.tflite.state import reference_state
from tests.support.geometries import VARIANTS
from tests.support.programs import compile_tflite, sample_checkpoint, tokens

pytest.importorskip("litert_torch")
interpreters = pytest.importorskip("ai_edge_litert.interpreter")

#: Longer than twice the window of 16, so that rings wrap more than once.
CONTEXT, BUCKET = 40, 8

Artifact = tuple[str, Path, Compiler]


@pytest.fixture(scope="module", params=VARIANTS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A geometry's file, with decode and one prefill length."""
    folder = tmp_path_factory.mktemp(request.param)
    compiler, _ = compile_tflite(sample_checkpoint(folder, VARIANTS[request.param]), folder, CONTEXT, (BUCKET,))
    return request.param, folder / contract.FILE_NAME, compiler


def opened(path: Path) -> Loop:
    described = json.loads(metadata(path, CONTRACT_KEY) or "")
    return Loop(interpreters.Interpreter(str(path), num_threads=1), described)


def deviations(loop: Loop, compiler: Compiler) -> dict[str, float]:
    """Of every state, as a share of its range."""
    found, wanted = reference_state(loop), compiler._state(torch.from_numpy(IDS[: loop.position]))
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in wanted.items()}
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in wanted.items()}
    return {n: float(np.abs(found[n] - v).max() / max(1.0, np.abs(v).max())) for n, v in wanted.items()}


IDS = tokens(SMALL, CONTEXT)  # every variant has this vocabulary


def test_it_computes_what_the_reference_computes(artifact: Artifact) -> None:
    name, path, compiler = artifact
    with torch.inference_mode():
        expected = compiler.net(torch.from_numpy(IDS).unsqueeze(0))[0].numpy()
    assert expected.shape == (CONTEXT, VARIANTS[name].head_vocab)
    loop = opened(path)

    def chunk(count: int) -> np.ndarray:
        return loop.chunk(IDS[loop.position : loop.position + count], BUCKET)

    def step() -> np.ndarray:
        return loop.decode(int(IDS[loop.position])).copy()[None]

    # Two chunks, the second padded; over the ring's end in steps, in a chunk, in a padded one.
    def chunks(count: int) -> list[Callable[[], np.ndarray]]:
        return [lambda: chunk(count)]

    plan = [*chunks(8), *chunks(5), *[step] * 6, *chunks(8), *[step] * 2, *chunks(7), *[step] * 4]
    parts = []
    with torch.inference_mode():
        for part in plan:
            parts.append(part())
            worst = deviations(loop, compiler)
            assert max(worst.values()) < 2e-5, (loop.position, worst)
    got = np.concatenate(parts)
    assert got.shape == expected.shape and np.abs(got - expected).max() < 2e-5
    assert (got.argmax(-1) == expected.argmax(-1)).all() and len(set(expected.argmax(-1).tolist())) > 10
    # Again from the start, with what the first sequence left in the caches behind the rows in use.
    loop.reset()
    again = np.concatenate([chunk(8), chunk(5), step()])
    assert np.array_equal(again[:13], got[:13]) and np.abs(again - expected[:14]).max() < 2e-5


def ordered(path: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Names of inputs and outputs of each signature in the order of the graph's own list."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAsModel(path.read_bytes(), 0)
    found = {}
    for at in range(model.SignatureDefsLength()):
        signature = model.SignatureDefs(at)
        graph = model.Subgraphs(signature.SubgraphIndex())

        def names(entry: Any, count: int, order: Any) -> list[str]:
            by_tensor = {entry(i).TensorIndex(): entry(i).Name().decode() for i in range(count)}
            return [by_tensor[int(tensor)] for tensor in order]

        found[signature.SignatureKey().decode()] = (
            names(signature.Inputs, signature.InputsLength(), graph.InputsAsNumpy()),
            names(signature.Outputs, signature.OutputsLength(), graph.OutputsAsNumpy()),
        )
    return found


def test_inputs_and_outputs_are_the_documented_ones(artifact: Artifact) -> None:
    name, path, compiler = artifact
    kinds = {"float32": "float32", "int32": "int32"}
    order, graphs = ordered(path), {graph.name: graph for graph in read_graph(path)}
    assert list(order) == ["decode", f"prefill_{BUCKET}"]
    for rows, key in ((1, "decode"), (BUCKET, f"prefill_{BUCKET}")):
        inputs = contract.input_ports(compiler.states, rows)
        outputs = contract.output_ports(compiler.states, VARIANTS[name].head_vocab, rows)
        assert order[key] == ([p.name for p in inputs], [p.name for p in outputs])
        assert all(port.doc for port in (*inputs, *outputs))
        graph = graphs[key]
        for port, tensor in [(p, graph.inputs[p.name]) for p in inputs] + [(p, graph.outputs[p.name]) for p in outputs]:
            assert (graph.tensors[tensor].shape, graph.tensors[tensor].dtype) == (port.shape, kinds[port.dtype])


FORBIDDEN = {"GATHER_ND", "BROADCAST_TO", "TILE"}


def test_only_ops_and_shapes_that_delegates_know(artifact: Artifact) -> None:
    for graph in read_graph(artifact[1]):
        used = {one.name for one in graph.ops}
        assert not used & FORBIDDEN and not [one for one in used if one.startswith("CUSTOM")]
        assert all(len(t.shape) <= 4 and -1 not in t.shape for t in graph.tensors)
        assert {t.dtype for t in graph.tensors} <= {"float32", "int32", "bool"}


def repeated(graph: Graph) -> list[str]:
    """What the results of concatenations are called that have an input twice, without block and running number."""
    found = []
    for one in graph.ops:
        if one.name == "CONCATENATION" and len(set(one.inputs)) < len(one.inputs):
            found.append(re.sub(r"^layers\.\d+/|_\d+$", "", graph.tensors[one.outputs[0]].name))
    return found


def test_keys_and_values_are_never_repeated(artifact: Artifact) -> None:
    name, path, _ = artifact
    geometry = VARIANTS[name]
    for graph in read_graph(path):
        # The lanes' start, a rotation's angles, and row and gates where a step writes lanes with a gain of 2.
        kinds = {re.sub(r"^stream_\d+$", "lane_write", kind) for kind in repeated(graph)}
        assert kinds <= {"expand", "rotary"} | ({"lane_write"} if graph.name == "decode" else set())
        assert repeated(graph).count("expand") == 1 and repeated(graph).count("rotary") == 1
        # Whatever attention multiplies has a group at most as often as the cache has.
        shapes = [graph.tensors[t].shape for n, t in graph.inputs.items() if n.startswith(("k_", "v_"))]
        assert len(shapes) == 2 * geometry.num_layers
        for shape in shapes:
            assert shape[0] == geometry.num_kv_heads and shape[2] in (geometry.qk_head_dim, geometry.v_head_dim)
        products = [
            graph.tensors[one.inputs[1]].shape
            for one in graph.ops
            if one.name == "BATCH_MATMUL" and "cached_attention" in graph.tensors[one.outputs[0]].name
        ]
        assert len(products) >= 2 * geometry.num_layers
        assert {shape[0] for shape in products} == {geometry.num_kv_heads}


# Single lowerings


Tensors = dict[str, Tensor]


class One:
    """A graph of few ops under construction; results of ops are known as they are added."""

    def __init__(self, inputs: Tensors, weights: Tensors) -> None:
        self.inputs, self.weights, self.graph = inputs, weights, fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.nodes = {n: self._keep(self.graph.placeholder(n), v) for n, v in {**inputs, **weights}.items()}

    def call(self, target: Any, *arguments: Any) -> fx.Node:
        """An op; strings among the arguments name inputs and weights."""
        given = tuple(self.nodes[a] if isinstance(a, str) else a for a in arguments)
        result = target(*(self.values[a] if isinstance(a, fx.Node) else a for a in given))
        return self._keep(self.graph.call_function(target, given), result)

    def run(self, folder: Path, rows: int, *results: fx.Node) -> list[np.ndarray]:
        """Lower it and run it."""
        from needle_export.targets.tflite.lower import exporter

        self.graph.output(tuple(results))
        held = {n: Weight(f"net.{n}", v, (Part(n, "lanes", 0, v.numel()),)) for n, v in self.weights.items()}
        wanted = {f"out_{i}": self.values[node] for i, node in enumerate(results)}
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        program, path = Program(module, held, tuple(self.inputs), tuple(wanted), rows), folder / "one.tflite"
        with exporter(Rules("fp32")) as made:
            made.add("decode", program, rows, _ports(self.inputs), _ports(wanted))
            made.write(path, "{}")
        runner = interpreters.Interpreter(str(path), num_threads=1).get_signature_runner("decode")
        kinds = {torch.int64: np.int32, torch.float32: np.float32}
        found = runner(**{n: v.numpy().astype(kinds[v.dtype]) for n, v in self.inputs.items()})
        return [found[name] for name in wanted]

    def _keep(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["val"] = self.values[node] = value
        return node


def _ports(values: Tensors) -> tuple[Port, ...]:
    kinds = {torch.int64: "int32", torch.float32: "float32"}
    return tuple(Port(n, tuple(v.shape), kinds[v.dtype], "") for n, v in values.items())


def run_one(
    folder: Path, target: Any, arguments: tuple[Any, ...], inputs: Tensors, weights: Tensors, rows: int
) -> list[np.ndarray]:
    """One op lowered and run: all its results but a next state."""
    one = One(inputs, weights)
    call = one.call(target, *arguments)
    count = len(one.values[call]) - 1 if isinstance(one.values[call], tuple) else 0
    results = [one.call(operator.getitem, call, i) for i in range(count)] or [call]
    return one.run(folder, rows, *results)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize("slots", [512, 18432, 1, 3, 1000, 65_521, 999_983, (1 << 30) - 35])
def test_the_hash_is_that_of_unsigned_integers(slots: int, rows: int, tmp_path: Path) -> None:
    orders, heads = [1, 2, 4], 4
    seeds = torch.tensor(reference.hash_seeds(orders, heads, heads))
    # Tokens with high bits set, and next to powers of two, so that products have every sign.
    random = torch.Generator().manual_seed(slots)
    ids = torch.randint(0, 1 << 31, (rows + 3,), generator=random)
    ids[-1] = 0x7FFF_FFFF
    for position in (0, 2, 1000):
        inputs = {"tokens": ids[3:], "history": ids[:3], "position": torch.tensor([position])}
        arguments = ("tokens", "history", "position", "seeds", orders, slots)
        wanted = reference.ngram_rows(ids[3:], ids[:3], inputs["position"], seeds, orders, slots)
        got = run_one(tmp_path, op("ngram_rows"), arguments, inputs, {"seeds": seeds}, rows)
        assert got[0].dtype == np.int32 and np.array_equal(got[0], wanted[0].numpy())
        assert np.array_equal(got[1], wanted[1].numpy())
        if slots > 512:
            assert len(np.unique(got[0])) > got[0].size // 2


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_sinkhorn_is_the_one_of_float64(scale: float, rows: int, tmp_path: Path) -> None:
    logits = scale * normal(rows, 4, 4, seed=rows)
    (got,) = run_one(tmp_path, op("sinkhorn"), ("logits", 20), {"logits": logits}, {}, rows)
    wanted = reference.sinkhorn(logits.double(), 20).numpy()
    assert np.abs(got - wanted).max() < 2e-7
    # Nineteen iterations would be told apart where it hasn't converged.
    if scale == 4.0:
        assert np.abs(reference.sinkhorn(logits.double(), 19).numpy() - wanted).max() > 1e-5


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize("position", [0, 7, 8184])
def test_rotary_at_any_position(position: int, rows: int, tmp_path: Path) -> None:
    width, heads = 48, 6
    speeds = 1e5 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    angles = (torch.arange(position, position + rows, dtype=torch.float64)[:, None] * speeds).float()
    x, exact = normal(rows, heads, width), angles.double()
    one = One({"x": x, "angles": angles}, {})
    cos, sin = (one.call(f, "angles") for f in (torch.ops.aten.cos.default, torch.ops.aten.sin.default))
    (got,) = one.run(tmp_path, rows, one.call(op("rotary"), "x", cos, sin))
    wanted = reference.rotary(x.double(), exact.cos(), exact.sin()).numpy()
    assert np.abs(got - wanted).max() < 2e-6


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize(("count", "dilation"), [(3, 1), (4, 3), (4, 1), (2, 5)])
def test_causal_taps_with_any_dilation(count: int, dilation: int, rows: int, tmp_path: Path) -> None:
    channels = 24
    inputs = {"x": normal(rows, channels), "history": normal((count - 1) * dilation, channels, seed=1)}
    taps = normal(count, channels, seed=2)
    arguments = ("x", "history", "taps", dilation)
    (got,) = run_one(tmp_path, op("causal_taps"), arguments, inputs, {"taps": taps}, rows)
    wanted = reference.causal_taps(inputs["x"].double(), inputs["history"].double(), taps.double(), dilation)[0]
    assert np.abs(got - wanted.numpy()).max() < 2e-6


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize(("a", "c"), [(8, 16), (16, 8), (4, 4), (3, 5)])
def test_kronecker(a: int, c: int, rows: int, tmp_path: Path) -> None:
    factors = {"a": normal(a, a), "c": normal(c, c, seed=1)}
    x = normal(rows, a * c, seed=2)
    (got,) = run_one(tmp_path, op("kronecker"), ("x", "a", "c"), {"x": x}, factors, rows)
    whole = torch.kron(factors["a"].double(), factors["c"].double())
    wanted = reference.kronecker(x.double(), factors["a"].double(), factors["c"].double())
    assert np.abs(got - wanted.numpy()).max() < 2e-5
    assert torch.allclose(wanted, x.double() @ whole)


def lanes(rows: int) -> dict[str, Tensor]:
    return {"stream": normal(rows, 4, 24), "mix": normal(rows, 4, 4, seed=1), "gates": normal(rows, 4, seed=2),
            "y": normal(rows, 24, seed=3)}


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_lanes_are_written_and_read(gain: float, rows: int, tmp_path: Path) -> None:
    inputs = lanes(rows)
    (got,) = run_one(tmp_path, op("lane_write"), (*inputs, gain), inputs, {}, rows)
    assert np.abs(got - reference.lane_write(*inputs.values(), gain).numpy()).max() < 1e-5
    two = {name: inputs[name] for name in ("stream", "gates")}
    (got,) = run_one(tmp_path, op("lane_read"), tuple(two), two, {}, rows)
    assert np.abs(got - reference.lane_read(*two.values()).numpy()).max() < 1e-5


@pytest.mark.parametrize("rows", [1, BUCKET])
@pytest.mark.parametrize("width", [16, 96, 256])
@pytest.mark.parametrize("kind", ["varied", "ones", "root"])
def test_a_norm_of_any_width_and_scale(kind: str, width: int, rows: int, tmp_path: Path) -> None:
    """Narrow rows are averaged by a product, wide ones by a mean, and a scale of 1/sqrt(D) by a sum."""
    scale = {"varied": normal(width), "ones": torch.ones(width), "root": torch.full((width,), width**-0.5)}[kind]
    x = 3 * normal(rows, width, seed=1)
    x[0, :] *= 1e-3  # small enough for eps to count
    (got,) = run_one(tmp_path, op("rms_norm"), ("x", "scale", 1e-6), {"x": x}, {"scale": scale}, rows)
    wanted = reference.rms_norm(x.double(), scale.double(), 1e-6).numpy()
    assert np.abs(got - wanted).max() < 2e-6 * max(1, np.abs(wanted).max())
