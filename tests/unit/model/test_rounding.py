"""Parameters rounded so that what ops read of them are halves."""

from __future__ import annotations

import pytest
import torch

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.model import rows
from needle_export.model.network import Needle
from needle_export.model.rounding import halves_read, read_factor, round_as_read
from needle_export.model.step import Step, parameter_sources


@pytest.fixture
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    path = tmp_path_factory.mktemp("model") / "needle3.safetensors"
    write_sample(path, SMALL, 3)
    read = read_checkpoint(path)
    step = Step(Needle(read.geometry, read.tensors, read.permutations).eval(), 32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in step.parameters():  # of more digits than a half has
            value += 0.01 * torch.randn(value.shape, generator=generator)
    return step


def read(step: Step, layer: int) -> dict[str, torch.Tensor]:
    """What the model itself makes of scales before it multiplies by them, as targets fold it."""
    block = step.net.layers[layer]
    return {
        "norm_in": 1 + block.norm_in.scale,
        "post_norm": torch.sigmoid(block.gate) * (1 + block.post_norm.scale),
        "pre_mlp_norm": 1 + block.pre_mlp_norm.scale,
        "attention.q_norm": (1 + block.attention.q_norm.scale) * SMALL.qk_head_dim**-0.5,
        "attention.k_norm": 1 + block.attention.k_norm.scale,
    }


def test_norms_are_read_as_the_halves_that_are_stored(step: Step) -> None:
    before = {layer: read(step, layer) for layer in (0, 1)}
    sources = parameter_sources(step)
    wanted = {(source, layer) for source, _, layer in sources.values() if "scale" in source and layer == 1}
    assert len(wanted) == 5
    with torch.no_grad():
        round_as_read(step, wanted)
    for kind, value in read(step, 1).items():
        # To the last bit of float32, and to all of half precision.
        halves = before[1][kind].half()
        assert not torch.equal(halves.float(), before[1][kind])
        assert torch.allclose(value, halves.float(), rtol=2**-22, atol=0) and torch.equal(value.half(), halves)
        path = f"net.layers.1.{kind}.scale"
        assert torch.equal(halves_read(step.get_parameter(path), read_factor(step, path)), halves)
    assert all(torch.equal(value, read(step, 0)[kind]) for kind, value in before[0].items())


def test_a_closed_gate_leaves_a_scale_as_it_is(step: Step) -> None:
    with torch.no_grad():
        step.net.layers[1].gate.fill_(-1e4)
        before = step.net.layers[1].post_norm.scale.clone()
        round_as_read(step, {("stack/layers/block/post_attn_norm/scale", 1)})
    assert torch.equal(step.net.layers[1].post_norm.scale, before)


def test_vectors_are_matrices_of_one_row(step: Step) -> None:
    mlp, attention = "stack/layers/block/hadamard_mlp", "stack/layers/block/self_attn"
    wanted = {(f"{mlp}/{name}", 1) for name in ("d1", "b2", "w1b")} | {(f"{attention}/q_norm/scale", 1)}
    with torch.no_grad():
        round_as_read(step, wanted)
    found = {key: m for key, m in rows.matrices(step, (), {}, as_read=wanted).items() if m.dtype == "float16"}
    assert {path for path, _ in found} == {
        f"layers.1.{name}" for name in ("mlp.d1", "mlp.b2", "mlp.w1b", "attention.q_norm.scale")
    }
    shapes = {path: (m.rows, m.used, m.load()[0].shape) for (path, _), m in found.items()}
    assert shapes["layers.1.mlp.d1"] == (1, (1, SMALL.d_model), (1, SMALL.hada_n))
    assert shapes["layers.1.mlp.b2"] == (1, (1, SMALL.hada_n), (1, SMALL.hada_n))
    heads, width = SMALL.num_heads, SMALL.qk_head_dim
    assert shapes["layers.1.attention.q_norm.scale"] == (heads, (heads, width), (heads, width))
    assert rows.matrices(step, (), {}).keys() == rows.matrices(step, (), {}, as_read=wanted).keys() - {
        (path, -1) for path in shapes if not path.endswith("w1b")
    }
