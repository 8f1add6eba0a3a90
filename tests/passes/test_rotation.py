"""Weights in codebook form: rotations move to inputs, once each, and cancel where two meet; results stay the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import make_sample
from needle_export.codebooks import Codebooks
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rule, Rules
from needle_export.graph.ops import op
from needle_export.graph.passes.rotation import cancel_rotations, rotate_codebooks
from needle_export.graph.program import Part, Program, Weight
from needle_export.weights.codes import Codes
from needle_export.weights.cq import codebook, encode
from tests.support.containers import container_bytes
from tests.support.programs import sample_checkpoint, step_inputs

aten = torch.ops.aten
HADAMARD = op("hadamard")
CONTEXT = 24


def coded(rows, columns, group=8, bits=4, seed=0):
    matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return Codes(bits, *encode(matrix, bits, group), codebook(bits, group))


def small_program(build, weights, inputs):
    """A program of one function, from tensors by name."""
    class Module(torch.nn.Module):
        def forward(self, *values):
            return (build(*values),)

    names = [*weights, *inputs]
    exported = torch.export.export(Module(), (*weights.values(), *inputs.values()))
    graph = exported.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        node.name = node.target = name
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    parts = {n: (Part(f"x/{n}_proj/kernel", "content", -1, v.numel()),) for n, v in weights.items()}
    parts |= {n: (Part("embedding/embedding", "vocabulary", -1, weights[n].numel()),) for n in weights if "table" in n}
    held = {n: Weight(n, v, parts[n]) for n, v in weights.items()}
    return Program(module, held, tuple(inputs), ("y",), 1)


def rotate(program, codes):
    return rotate_codebooks(program, lambda weight: codes.get(weight.name))


def kernel(codes):
    return torch.from_numpy(codes.matrix().T.copy())


def turns(program):
    return program.nodes(HADAMARD)


def near(program, wanted, *inputs):
    (found,) = program.run(*inputs)
    return float((found - wanted).abs().max()) < 2e-6 * max(1.0, float(wanted.abs().max()))


def test_an_input_is_rotated_once_for_all_products_that_read_it():
    q, k = coded(24, 32, seed=1), coded(16, 32, seed=2)
    x = torch.randn(5, 32)
    program = small_program(lambda q, k, x: torch.cat([x @ q, x @ k], 1), {"q": kernel(q), "k": kernel(k)}, {"x": x})
    (wanted,) = program.run(x)
    fired = rotate(program, {"q": [q], "k": [k]})
    assert fired.counts == {"rotate_codebooks": 2} and len(turns(program)) == 1
    assert program.weights["q"].codes == (q,)
    assert np.array_equal(program.weights["q"].value.numpy(), q.rotated().T)
    assert near(program, wanted, x)


def test_products_with_other_groups_have_rotations_of_their_own():
    q, k = coded(24, 32, seed=1), coded(16, 32, group=16, seed=2)
    x = torch.randn(5, 32)
    program = small_program(lambda q, k, x: torch.cat([x @ q, x @ k], 1), {"q": kernel(q), "k": kernel(k)}, {"x": x})
    (wanted,) = program.run(x)
    rotate(program, {"q": [q], "k": [k]})
    assert [n.args[1] for n in turns(program)] in ([8, 16], [16, 8]) and near(program, wanted, x)


def test_a_weight_that_something_else_reads_too_stays_as_it_is():
    q = coded(24, 32)
    x = torch.randn(5, 32)
    program = small_program(lambda q, x: x @ q + q.sum(), {"q": kernel(q)}, {"x": x})
    before = program.weights["q"].value.clone()
    fired = rotate(program, {"q": [q]})
    assert not fired.places and not turns(program)
    assert program.weights["q"].codes == () and torch.equal(program.weights["q"].value, before)


def test_a_table_is_rotated_behind_its_lookup_and_before_the_head_that_reads_some_rows():
    table = coded(12, 16)
    value = torch.from_numpy(table.matrix())
    ids, x = torch.tensor([3, 11, 3]), torch.randn(3, 16)

    def build(table, ids, x):
        return torch.cat([torch.nn.functional.embedding(ids, table), torch.nn.functional.linear(x, table[:9])], 1)

    program = small_program(build, {"table": value}, {"ids": ids, "x": x})
    (wanted,) = program.run(ids, x)
    fired = rotate(program, {"table": [table]})
    assert fired.counts == {"rotate_codebooks": 2} and len(turns(program)) == 2
    assert near(program, wanted, ids, x)


@pytest.mark.parametrize(("shape", "group", "left"), [((3, 32), 8, 0), ((3, 32), 16, 2), ((3, 32), 32, 2)])
def test_rotations_cancel_only_where_groups_stay_together(shape, group, left):
    """Rows of 16 beside each other: a group of 8 or 16 of a projection lies in one row, one of 32 in two."""
    table, projection = coded(12, 16, group=8, seed=1), coded(10, 32, group=group, seed=2)
    ids = torch.tensor([[3, 1], [11, 0], [3, 4]])
    weights = {"table": torch.from_numpy(table.matrix()), "p": kernel(projection)}
    program = small_program(
        lambda table, p, ids: torch.nn.functional.embedding(ids, table).reshape(*shape) @ p, weights, {"ids": ids}
    )
    (wanted,) = program.run(ids)
    rotate(program, {"table": [table], "p": [projection]})
    assert len(turns(program)) == 2
    fired = cancel_rotations(program)
    assert len(turns(program)) == left and len(fired.places) == (left == 0)
    assert near(program, wanted, ids)


def test_nothing_cancels_through_an_op_that_mixes_a_group_or_that_something_else_reads():
    table, projection = coded(12, 16, seed=1), coded(10, 16, seed=2)
    ids = torch.tensor([3, 1, 11])
    weights = {"table": torch.from_numpy(table.matrix()), "p": kernel(projection)}
    for between in (lambda x, p: (x * torch.arange(16.0)) @ p, lambda x, p: x.relu() @ p,
                    lambda x, p: torch.cat([x @ p, x.exp()], 1)):
        program = small_program(
            lambda table, p, ids, between=between: between(torch.nn.functional.embedding(ids, table), p),
            weights, {"ids": ids},
        )
        (wanted,) = program.run(ids)
        rotate(program, {"table": [table], "p": [projection]})
        cancel_rotations(program)
        assert len(turns(program)) == 2 and near(program, wanted, ids)


# --- the traced step -----------------------------------------------------------------------------------


def checkpoint_of(folder, geometry=SMALL, **layout):
    path = folder / "model.cact"
    path.write_bytes(container_bytes(geometry, make_sample(geometry, 2), **layout))
    return read_checkpoint(path)


def step_of(checkpoint, rules, rows):
    """The program with codes, and with numbers in their place."""
    made = []
    for rotated in (True, False):
        compiler = Compiler(checkpoint, CONTEXT, NullProgress())
        compiler.rotate = rotated
        compiler.use_formats(Codebooks(checkpoint, rules), False)
        made.append((compiler, compiler.program(rows)))
    return made


def same_step(checkpoint, rules, rows):
    (compiler, program), (_, plain) = step_of(checkpoint, rules, rows)
    inputs = step_inputs(compiler.net, CONTEXT, rows or 5)
    for name, have, want in zip(program.outputs, program.run(*inputs), plain.run(*inputs), strict=True):
        assert float((have - want).abs().max()) < 2e-5 * max(1.0, float(want.abs().max())), name
    return compiler, program


def parted(program, source):
    return [w for w in program.weights.values() if w.parts and any(p.source == source for p in w.parts)]


def test_a_step_with_codes_computes_what_their_numbers_do(tmp_path):
    checkpoint = checkpoint_of(tmp_path, group=8)
    compiler, program = same_step(checkpoint, Rules("codebook"), None)
    with_codes = [w for w in program.weights.values() if w.codes]
    # A block: four projections as one, out_proj, three of lanes (the last block's mixing is dropped); both ends;
    # tables and projections of the engram, which are one or two.
    layers = SMALL.num_layers
    assert sum("q_proj" in w.name for w in with_codes) == layers
    for source in ("embedding/embedding", "engrams/embedding"):
        (table,) = parted(program, source)
        assert [c.form for c in table.codes] == ["codebook4x8"]
    # One rotation of what each product reads, whatever reads it.
    inputs = [(n.args[0], n.args[1]) for n in turns(program)]
    assert len(set(inputs)) == len(inputs)
    # Between the engram's tables and projections none is left; the fused head and lookup keep theirs.
    phase = next(iter(compiler.places))
    cancelled = [p for p in compiler.places[phase] if p[0] == "cancel_rotations"]
    assert len(cancelled) == 1
    for node in turns(program):
        assert not any(u.target is HADAMARD for u in node.users)


def test_groups_of_other_widths_stay_apart_in_the_engram(tmp_path):
    """From floats, rows of 24 are groups of 8 and rows of 96 groups of 32: nothing cancels."""
    checkpoint = sample_checkpoint(tmp_path, SMALL)
    compiler, program = Compiler(checkpoint, CONTEXT, NullProgress()), None
    compiler.use_formats(Codebooks(checkpoint, Rules("cq4")), False)
    program = compiler.program(1)
    (table,) = parted(program, "engrams/embedding")
    assert [c.form for c in table.codes] == ["cq4x8"]
    assert not [p for p in compiler.places["decode"] if p[0] == "cancel_rotations"]
    assert {n.args[1] for n in turns(program)} >= {8, 32}


def test_projections_of_several_widths_are_not_merged(tmp_path):
    """By width: queries and keys of two bits are one product, values and gates of four another."""
    def bits(slot):
        return 2 if slot.tensor.endswith(("q_proj/kernel", "k_proj/kernel")) else 4

    compiler, program = same_step(checkpoint_of(tmp_path, group=8, bits=bits), Rules("codebook"), 1)
    merged = [w for w in program.weights.values() if w.codes and "self_attn" in w.parts[0].source and len(w.parts) > 1]
    found = [{p.source.split("/")[-2] for p in w.parts} for w in merged]
    assert found.count({"q_proj", "k_proj"}) == found.count({"v_proj", "gate_proj"}) == SMALL.num_layers
    assert {c.form for w in merged for c in w.codes} == {"codebook2x8", "codebook4x8"}
    fusion = compiler.fusions()["merge_projections"]
    assert fusion.fused == fusion.expected


@pytest.mark.parametrize("odd", [0, 1])
def test_blocks_may_have_widths_of_their_own(tmp_path, odd):
    """One block's projections have four widths and no two are one product; what is owed follows."""
    widths = {"q_proj": 1, "k_proj": 2, "v_proj": 3}

    def bits(slot):
        return widths.get(slot.tensor.split("/")[-2], 4) if slot.layer == odd else 4

    checkpoint = checkpoint_of(tmp_path, group=8, bits=bits)
    compiler = Compiler(checkpoint, CONTEXT, NullProgress())
    compiler.use_formats(Codebooks(checkpoint, Rules("codebook")), False)
    program = compiler.program(1)
    found = {w.name.split("attention.")[-1]: w.codes[0].bits for w in program.weights.values()
             if w.codes and f"layers.{odd}.attention" in w.name}
    assert found == {**widths, "gate_proj": 4, "out_proj": 4}
    fusion = compiler.fusions()["merge_projections"]
    assert fusion.fused == fusion.expected


def test_one_role_in_codes_leaves_the_others_alone(tmp_path):
    checkpoint = checkpoint_of(tmp_path, group=8)
    _, program = same_step(checkpoint, Rules("fp32", (Rule("vocabulary", "codebook"),)), 1)
    assert [w.parts[0].source for w in program.weights.values() if w.codes] == ["embedding/embedding"]
    assert len(turns(program)) == 2


def test_of_several_sites_each_has_its_own_codes(tmp_path):
    geometry = dataclasses.replace(SMALL, engram_layers=(0, 1))
    checkpoint = checkpoint_of(tmp_path, geometry, group=8)
    _, program = same_step(checkpoint, Rules("codebook"), 1)
    projections = [w for w in program.weights.values() if w.codes and "engrams/key_proj" in w.parts[0].source]
    assert all(len(w.codes) == 2 for w in projections) and projections
