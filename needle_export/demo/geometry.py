"""The demo's numbers, and the values that its training starts from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from needle_export.checkpoint.geometry import Geometry, HeadGeometry, tensor_shapes
from needle_export.graph.reference import hadamard

DEMO = Geometry(
    vocab_size=1024, out_vocab=0, d_model=256, num_heads=4, num_kv_heads=2, num_layers=6, qk_head_dim=48,
    v_head_dim=64, max_seq_len=1024, rope_theta=100000.0, mhc_lanes=4, sliding_window=128, global_layers=(2, 5),
    qkv_conv_taps=3, engram_orders=(2, 3), engram_heads=1, engram_slots=1024, engram_sub_dim=128,
    engram_seed_heads=0, engram_layers=(1, 4), ladder_order=(), split_permutations=False, kv_window=0, kv_bits=8,
    pad_token_id=0, heads=(HeadGeometry("confidence", 4, 4, 1),),
)
"""Every mechanism of the published model at the real head widths, in 2.7 million parameters."""

_SIGMA = 0.02


def initial(geometry: Geometry, seed: int) -> dict[str, Tensor]:
    """Every tensor before training, float32, as the family is initialised.

    Normal values of 0.02; matrices that write into the stream are smaller by the root of twice the depth; norms, taps,
    factors and lanes begin neutral. From the public cactus-needle package, ``needle.model.architecture``.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _start(name, shape, geometry, generator) for name, shape in tensor_shapes(geometry).items()}


def _start(name: str, shape: tuple[int, ...], geometry: Geometry, generator: torch.Generator) -> Tensor:
    leaf = name.rsplit("/", 1)[-1]
    if leaf in ("scale", "attn_gate", "b2", "cond_u", "mhc_b_pre", "mhc_b_post", "row_bias", "bias"):
        return torch.zeros(shape)
    if leaf in ("d1", "d2", "d3", "gain"):
        return torch.ones(shape)
    if leaf == "d4":
        return torch.full(shape, 0.02)
    if leaf.startswith("mhc_a_"):
        return torch.full(shape, 0.01)
    if leaf == "mhc_b_res":
        return (4 * torch.eye(shape[-1])).expand(shape).clone()
    if leaf.endswith("taps"):
        taps = torch.zeros(shape)
        taps[..., 0, :] = 1
        return taps
    if leaf in ("w1a", "w1b", "w2a", "w2b", "w3a", "w3b"):
        return hadamard(torch.eye(shape[-1]), shape[-1]).expand(shape).clone()
    writes = name.endswith(("out_proj/kernel", "value_proj/kernel"))
    sigma = _SIGMA / math.sqrt(2 * geometry.num_layers) if writes else _SIGMA
    return torch.randn(shape, generator=generator) * sigma
