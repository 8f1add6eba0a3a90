"""What lies in a Core ML package: ops, types and constants that devices are reported to want, read from the files."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.model.state import state_specs
from needle_export.targets.coreml import contract
from needle_export.targets.coreml.evaluate import Evaluator
from needle_export.targets.coreml.evaluate.spec import Stored
from needle_export.targets.coreml.host import Host
from needle_export.targets.coreml.names import block_of
from needle_export.targets.coreml.session import EvaluatorRunner, read_contract
from needle_export.weights.linear import quantize_blocks
from needle_export.weights.palette import palettize
from tests.support.coreml_builds import CONTEXT, GEOMETRY, constants, functions, package, types_of, uses
from tests.targets.coreml.packages import SPEC, WEIGHTS

pytest.importorskip("coremltools")

SCHEMES = ("fp32", "fp16", "int8", "int4", "palette4")
g = GEOMETRY

schemes = pytest.mark.parametrize("weights", SCHEMES)
everywhere = pytest.mark.parametrize(
    ("weights", "system"), [(w, "ios18") for w in SCHEMES] + [(w, "ios17") for w in SCHEMES[:3]]
)
halves = pytest.mark.parametrize("weights", SCHEMES[1:])


def blocks(ops):
    """How many of some ops each block has, by what their names begin with."""
    found = Counter()
    for op in ops:
        if block_of(op.name) >= 0:
            found[block_of(op.name)] += 1
    return found


@pytest.fixture
def dist(packages):
    return lambda weights, system="ios18", **changes: packages.get(weights, os=system, **changes)[0]


@schemes
def test_attention_is_one_op_a_block_and_repeats_nothing(weights, dist):
    for rows, function in functions(dist(weights)):
        types, attention = types_of(function), uses(function, "scaled_dot_product_attention")
        assert len(attention) == g.num_layers and blocks(attention) == dict.fromkeys(range(g.num_layers), 1)
        share = g.num_heads // g.num_kv_heads
        for op in attention:
            query, key, value = (types[op.inputs[name][0]].shape for name in ("query", "key", "value"))
            assert query == (1, g.num_kv_heads, share * rows, g.qk_head_dim) and g.qk_head_dim == 48
            assert key[:2] == value[:2] == (1, g.num_kv_heads)
            assert key[2] == value[2] and (key[3], value[3]) == (48, 64)
            # In decode one row of a mask serves all heads of a group.
            assert types[op.inputs["attn_mask"][0]].shape == (1 if rows == 1 else share * rows, key[2])
        # Of the lanes' start, and of masks for the heads of a group, once a call.
        tiled = sorted(op.inputs["x"][0] for op in uses(function, "tile") if not op.name.startswith("expand_"))
        assert tiled == ([] if rows == 1 else ["mask", "ring_mask"])
        assert len(uses(function, "tile")) == len(tiled) + 1
        # A concatenation with itself is a rotation's cosines and sines.
        joined = [o for o in uses(function, "concat") if o.outputs[0][1].dtype != "int32"]
        doubled = [o for o in joined if len(set(o.inputs["values"])) < len(o.inputs["values"])]
        assert len(doubled) == 2 and all(types[o.outputs[0][0]].shape == (rows, 1, 48) for o in doubled)


@pytest.mark.parametrize("weights", SCHEMES[:3])
def test_without_states_attention_is_two_products(weights, dist):
    for name in ("model.mlpackage", "model_prefill_8.mlpackage", "model_prefill_16.mlpackage"):
        (function,) = package(dist(weights, "ios17"), name).functions.values()
        rows, types = function.inputs["tokens"].shape[0], types_of(function)
        assert function.opset == "CoreML7" and not function.states
        assert not uses(function, "scaled_dot_product_attention", "read_state", "write_state")
        products = [o for o in uses(function, "matmul") if len(types[o.inputs["y"][0]].shape) == 4]
        assert blocks(products) == dict.fromkeys(range(g.num_layers), 2)
        for op in products:
            assert types[op.inputs["y"][0]].shape[:2] == (1, g.num_kv_heads)
        outputs = {n: d.shape for n, d in function.outputs.items()}
        assert outputs["k_00_rows"] == (2, rows, 48) and outputs["v_02_rows"] == (2, rows, 64)


@schemes
def test_sinkhorn_is_one_op_a_half_iteration_in_float32(weights, dist):
    for _, function in functions(dist(weights)):
        types, norms = types_of(function), uses(function, "layer_norm")
        # The last block's mixing is never read, and left out.
        assert blocks(norms) == dict.fromkeys(range(g.num_layers - 1), 39) and len(norms) == 39 * (g.num_layers - 1)
        assert all(op.outputs[0][1].dtype == "float32" for op in norms)
        axes = [constants(function)[op.inputs["axes"][0]].value.tolist() for op in norms]
        assert axes == ([[1, 2], [2, 3]] * 20)[:39] * (g.num_layers - 1)
        for op in norms:
            assert types[op.inputs["x"][0]].dtype == "float32"
            assert constants(function)[op.inputs["epsilon"][0]].value == np.float32(1e-20)


@halves
def test_sums_of_squares_are_float32_and_products_half(weights, dist):
    for _, function in functions(dist(weights)):
        types = types_of(function)
        for op in uses(function, "reduce_sum_square", "rsqrt", "cos", "sqrt", "square"):
            given = types[op.inputs["x"][0]].dtype
            assert given == "float32" and op.outputs[0][1].dtype in ("float32", "float16"), op.name
        for op in uses(function, "linear", "matmul", "scaled_dot_product_attention", "silu", "sigmoid", "conv"):
            assert op.outputs[0][1].dtype == "float16", op.name
        assert len(uses(function, "reduce_sum_square")) >= 6 * g.num_layers - 1
        assert function.inputs["mask"].dtype == "float16" and function.outputs["logits"].dtype == "float32"


@everywhere
def test_every_shape_is_a_number(weights, system, dist):
    for _, function in functions(dist(weights, system)):
        every = types_of(function)
        assert all(size > 0 for declared in every.values() for size in declared.shape)
        assert max(len(declared.shape) for declared in every.values()) <= 5


@schemes
def test_every_state_is_written_in_every_function(weights, dist):
    for _, function in functions(dist(weights)):
        written = Counter(op.inputs["input"][0] for op in uses(function, "write_state"))
        assert written == dict.fromkeys(function.states, 1)
        kinds = {name.partition("_")[0] for name in function.states}
        assert kinds == {"k", "v", "taps", "engram"} and len(function.states) == 2 * g.num_layers + 2
        for name, declared in function.states.items():
            assert declared.dtype == "float16" and declared.shape[-1] % 32 == 0, name
        assert {function.states[f"k_{n:02d}"].shape[-1] for n in range(g.num_layers)} == {96}


def test_the_published_states_are_multiples_of_32_too():
    for context in (64, 1024, 2048, 8191):
        ports = contract.state_ports(state_specs(PUBLISHED, context), True)
        assert len(ports) == 42 and all(p.dtype == "float16" and p.shape[-1] % 32 == 0 for p in ports)
        assert {p.shape[-1] for p in ports if p.name.startswith("k_")} == {96}
        assert {p.shape[-1] for p in ports if p.name.startswith("v_")} == {64}
        # Nothing is padded but an odd context's last row.
        rows = sum(math.prod(p.shape) for p in ports if p.name.startswith("k_")) / (2 * 48)
        assert rows <= 20 * (min(context, 8191) + 1)


@pytest.mark.parametrize(("function", "rows"), [("decode", 1), ("prefill_8", 8)])
def test_no_position_is_baked_in(function, rows, dist):
    """New rows land where the slots say and nowhere else, at every position that a call may begin at."""
    path = dist("fp32")
    evaluator = Evaluator(package(path))
    host = Host(read_contract(package(path).metadata, path), "float32")
    logits, keys = [], []
    for at in range(0, CONTEXT - rows, 1 if rows == 1 else 2):
        host.reset()
        host.position = at
        if rows > 1 and at % host.ring + rows > host.ring:
            continue
        evaluator.reset()
        found = evaluator.run(function, host.inputs(np.arange(1, rows + 1), rows))
        logits.append(found["logits"])
        for name, value in evaluator.state.items():
            if name[0] in "kv" and name[1] == "_":
                ring = name[2:] != f"{g.global_layers[0]:02d}"
                width = 48 if name[0] == "k" else 64
                held = value.reshape(g.num_kv_heads, -1, width)
                first = at % host.ring if ring else at
                assert np.flatnonzero(np.abs(held).sum((0, 2))).tolist() == list(range(first, first + rows)), name
                if name == "k_00":
                    keys.append(held[:, first])
    assert len(logits) > 5
    # A key is turned by its position; and behind an empty cache, the n-grams' start is all that a position changes.
    assert all(np.abs(keys[0] - key).max() > 1e-2 for key in keys[1:])
    assert all(np.abs(logits[-1] - each).max() < 0.5 for each in logits[3:])


@everywhere
def test_masks_stay_within_half_precision(weights, system, dist):
    path = dist(weights, system)
    runner = EvaluatorRunner(path)
    runner.feed(np.arange(1, 22))
    for bucket in (1, 8):
        given = runner.host.inputs([5], bucket)
        for name in ("mask", "ring_mask"):
            assert set(np.unique(given[name])) <= {0.0, np.float32(-1e4)} and (given[name] == 0).any()
    for _, function in functions(path):
        for value in constants(function).values():
            if value.type.dtype in ("float16", "float32"):
                array = np.asarray(value.value, np.float64)
                assert np.isfinite(array).all() and array.min(initial=0) > -1e4 and array.max(initial=0) < 6e4


# Constants


def matrices(function):
    """What compresses a matrix in a function, or holds it, by its name."""
    made = [op for op in function.ops if op.type == "const" or op.type.startswith("constexpr")]
    return {op.outputs[0][0]: op for op in made if math.prod(op.outputs[0][1].shape) >= 10_000}


def held(function, op, parameter):
    value = op.inputs[parameter][0]
    return constants(function)[value] if isinstance(value, str) else value


FORMS = {
    "fp32": {"const": "float32"},
    "fp16": {"const": "float16"},
    "int8": {"constexpr_blockwise_shift_scale": "int8"},
    "int4": {"constexpr_blockwise_shift_scale": "int4"},
    "palette4": {"constexpr_lut_to_dense": "uint4"},
}


@schemes
def test_compressed_constants_stay_compressed_and_have_their_form(weights, dist):
    (kind, dtype), = FORMS[weights].items()
    for _, function in functions(dist(weights)):
        large = matrices(function)
        # Four products a block, the table, the engram's tables and two projections; none of them twice.
        read = [op.inputs["weight"][0] for op in uses(function, "linear")]
        assert len(large) >= 2 * g.num_layers + 3
        assert set(large) & set(read) and sum(name in large for name in read) >= 2 * g.num_layers + 1
        for name, op in large.items():
            assert op.type == kind, name
            shape = op.outputs[0][1].shape
            if kind == "const":
                assert op.outputs[0][1].dtype == dtype
            elif weights == "palette4":
                indices, levels = held(function, op, "indices"), held(function, op, "lut")
                assert indices.type.dtype == dtype and indices.type.shape == shape
                assert levels.type.dtype == "float16" and levels.type.shape == (shape[0] // 16, 1, 16, 1)
                assert (np.diff(np.asarray(levels.value, np.float32)[:, 0, :, 0], axis=1) >= 0).all()
            else:
                data, scale = held(function, op, "data"), held(function, op, "scale")
                block = math.gcd(32, shape[1]) if weights == "int4" else shape[1]
                assert (data.type.dtype, data.type.shape, scale.type.dtype) == (dtype, shape, "float16")
                assert scale.type.shape == (shape[0], shape[1] // block) and "offset" not in op.inputs
        # Nothing decompresses what another op compresses again, and no array of floats of a matrix's size is left.
        assert not [o for o in uses(function, kind) if o.type != "const" and any(
            isinstance(v, str) and v not in constants(function) for vs in o.inputs.values() for v in vs)]


def test_before_ios18_int8_has_the_older_form(dist):
    for _, function in functions(dist("int8", "ios17")):
        large = matrices(function)
        assert {op.type for op in large.values()} == {"constexpr_affine_dequantize"}


@pytest.mark.parametrize("weights", SCHEMES[1:])
def test_what_is_stored_is_the_checkpoints_rounded_once(weights, packages, dist):
    """Output projections, which nothing is folded into or merged with."""
    tensors = read_checkpoint(packages.checkpoint).tensors
    kernels = tensors["stack/layers/block/self_attn/out_proj/kernel"].astype(np.float32)
    for _, function in functions(dist(weights)):
        found = [op for op in matrices(function).values() if op.outputs[0][1].shape == kernels.shape[:0:-1]]
        assert len(found) == g.num_layers
        for kernel, op in zip(kernels, found, strict=True):
            matrix = torch.from_numpy(np.ascontiguousarray(kernel.T))
            if weights == "fp16":
                assert np.array_equal(held(function, op, "val").value, matrix.half().numpy())
            elif weights == "palette4":
                indices, levels = palettize(matrix, 4, 16)
                assert np.array_equal(held(function, op, "indices").value, indices.numpy())
                assert np.array_equal(np.asarray(held(function, op, "lut").value)[:, 0, :, 0], levels.numpy())
            else:
                values, scales = quantize_blocks(matrix, *{"int8": (8, matrix.shape[1]), "int4": (4, 32)}[weights])
                assert np.array_equal(held(function, op, "data").value, values.numpy())
                assert np.array_equal(held(function, op, "scale").value, scales.numpy())


@schemes
def test_the_tied_table_lies_in_the_file_once(weights, packages, dist):
    """Rows are looked up in what the head multiplies with."""
    offsets = set()
    for _, function in functions(dist(weights)):
        table = (g.vocab_size, g.d_model)
        named = [name for name, op in matrices(function).items() if op.outputs[0][1].shape == table]
        (name,) = named
        assert len([o for o in uses(function, "gather") if o.inputs["x"][0] == name]) == 1
        assert len([o for o in uses(function, "linear") if o.inputs["weight"][0] == name]) == 1
        op = matrices(function)[name]
        value = held(function, op, {"const": "val", "constexpr_lut_to_dense": "indices"}.get(op.type, "data"))
        assert isinstance(value, Stored)
        offsets.add(value.offset)
    assert len(offsets) == 1
    if weights in ("fp32", "fp16"):
        values = read_checkpoint(packages.checkpoint).tensors["embedding/embedding"]
        data = (dist(weights) / "model.mlpackage" / WEIGHTS).read_bytes()
        assert data.count(values.astype({"fp32": np.float32, "fp16": np.float16}[weights]).tobytes()) == 1


@schemes
def test_functions_share_their_weights(weights, packages, dist):
    alone = packages.get(weights, os="ios18", buckets=())[0] / "model.mlpackage"
    three = dist(weights) / "model.mlpackage"
    own, more = ((p / WEIGHTS).stat().st_size for p in (alone, three))
    # What a prefill adds: taps and first Kronecker factors in another layout, and the zeros that coremltools gives
    # every product as its bias. That is a few rows a block, whatever the matrices take.
    assert 0 < more - own < (52_000 if weights == "fp32" else 29_000)
    assert (three / SPEC).stat().st_size < 3.6 * (alone / SPEC).stat().st_size
    large = [{held(f, op, {"const": "val", "constexpr_lut_to_dense": "indices"}.get(op.type, "data")).offset
              for op in matrices(f).values()} for _, f in functions(dist(weights))]
    assert large[0] == large[1] == large[2] and len(large[0]) >= 2 * g.num_layers + 3
