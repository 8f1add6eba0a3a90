"""One block of the model: lanes around (engram injection, attention, Monarch MLP).

Everything is plain PyTorch. Dimension letters: B batch, T positions, S cache rows, C model width, H query
heads, G key/value heads, Dqk and Dv their widths, n lanes, N = hada_n the Monarch width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import Geometry
from needle_export.graph import reference as ref

EPS = 1e-6

#: Sinkhorn iterations of the lane mixing; the scaling has not converged by then, so the count is exact.
SINKHORN_ITERATIONS = 20

#: Attends: takes q, k, v after convolution, norm and rotation; returns [..., T, H*Dv].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Filters [..., T, C] rows with taps [K, C] causally.
Taps = Callable[[Tensor, Tensor], Tensor]


def param(value: Tensor) -> Tensor:
    """A float32 parameter of its own, never a view of the checkpoint.

    A tensor that gradients are to reach stays itself: who trains the model owns it, and holds it in the checkpoint's
    layout.
    """
    return value if value.requires_grad else nn.Parameter(value.to(torch.float32, copy=True), requires_grad=False)


class Norm(nn.Module):
    """Zero-centred RMS norm: ``(1 + scale) * x / rms(x)``."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = param(scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return ref.rms_norm(x, 1 + self.scale, EPS)


class Attention(nn.Module):
    """Projections, taps, per-head norms, rotation, gate and output of one block's attention."""

    def __init__(self, geometry: Geometry, w: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.heads, self.groups = geometry.num_heads, geometry.num_kv_heads
        self.qk, self.value = geometry.qk_head_dim, geometry.v_head_dim
        self.q_proj, self.k_proj = param(w["q_proj/kernel"]), param(w["k_proj/kernel"])
        self.v_proj, self.gate_proj = param(w["v_proj/kernel"]), param(w["gate_proj/kernel"])
        self.out_proj = param(w["out_proj/kernel"])
        self.has_taps = geometry.qkv_conv_taps > 0
        if self.has_taps:
            self.q_taps, self.k_taps, self.v_taps = (param(w[f"{x}_taps"]) for x in "qkv")
        self.q_norm, self.k_norm = Norm(w["q_norm/scale"]), Norm(w["k_norm/scale"])

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, taps: Taps, attend: Attend) -> Tensor:
        """h [..., T, C], cos and sin [T, Dqk/2] -> [..., T, C]."""
        q = torch.matmul(h, self.q_proj)
        k = torch.matmul(h, self.k_proj)
        v = torch.matmul(h, self.v_proj)
        if self.has_taps:
            rows = torch.cat([q, k, v], dim=-1)
            rows = taps(rows, torch.cat([self.q_taps, self.k_taps, self.v_taps], dim=-1))
            q, k, v = torch.split(rows, [q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
        q = self.q_norm(q.reshape(*q.shape[:-1], self.heads, self.qk))
        k = self.k_norm(k.reshape(*k.shape[:-1], self.groups, self.qk))
        v = v.reshape(*v.shape[:-1], self.groups, self.value)
        out = attend(ref.rotary(q, cos, sin), ref.rotary(k, cos, sin), v)
        out = out * torch.sigmoid(torch.matmul(h, self.gate_proj))
        return torch.matmul(out, self.out_proj)


class Monarch(nn.Module):
    """The MLP: three Kronecker products with diagonals, two fixed permutations and a conditioned SiLU."""

    d1: Tensor
    d2: Tensor
    b2: Tensor
    d3: Tensor
    d4: Tensor
    w1a: Tensor
    w1b: Tensor
    w2a: Tensor
    w2b: Tensor
    w3a: Tensor
    w3b: Tensor
    cond_v: Tensor
    cond_u: Tensor
    p1: Tensor
    p2: Tensor

    def __init__(
        self, geometry: Geometry, w: Mapping[str, Tensor], permutations: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.width = geometry.d_model
        self.pad = geometry.hada_n - geometry.d_model
        for name in (
            "d1",
            "d2",
            "b2",
            "d3",
            "d4",
            "w1a",
            "w1b",
            "w2a",
            "w2b",
            "w3a",
            "w3b",
            "cond_v",
            "cond_u",
        ):
            setattr(self, name, param(w[name]))
        self.register_buffer("p1", permutations[0])
        self.register_buffer("p2", permutations[1])

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, C] -> [..., T, C]."""
        cond = 1 + torch.matmul(torch.softmax(torch.matmul(x, self.cond_v), dim=-1), self.cond_u)
        z = nn.functional.pad(x, (0, self.pad)) if self.pad else x
        z = ref.kronecker(self.d1 * z, self.w1a, self.w1b).index_select(-1, self.p1)
        z = nn.functional.silu(self.d2 * cond * z + self.b2)
        z = ref.kronecker(z, self.w2a, self.w2b).index_select(-1, self.p2)
        z = self.d4 * ref.kronecker(self.d3 * z, self.w3a, self.w3b)
        return z[..., : self.width] if self.pad else z


class Lanes(nn.Module):
    """Reads one vector from the n lanes of the stream, writes one back, and mixes the lanes."""

    phi_pre: Tensor
    phi_post: Tensor
    phi_res: Tensor
    a_pre: Tensor
    a_post: Tensor
    a_res: Tensor
    ones: Tensor

    def __init__(self, geometry: Geometry, w: Mapping[str, Tensor], layer: int) -> None:
        super().__init__()
        n = geometry.mhc_lanes
        self.lanes = n
        for kind in ("pre", "post", "res"):
            setattr(self, f"phi_{kind}", param(w[f"phi_{kind}"]))
            setattr(self, f"a_{kind}", param(w[f"a_{kind}"]))
        home = torch.zeros(n)
        home[layer % n] = 1.0
        # The offsets that keep a fresh block on its own lane are constants of the architecture.
        self.b_pre = param(w["b_pre"] + 8 * home - 4)
        self.b_post = param(w["b_post"] - 4 * (1 - home))
        self.b_res = param(w["b_res"].reshape(n * n))
        self.register_buffer("ones", torch.ones(n * geometry.d_model))

    def forward(self, stream: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., T, n, C] -> [..., T, n, C]."""
        nx = ref.rms_norm(stream.flatten(-2), self.ones, EPS)
        pre = torch.sigmoid(ref.scaled_linear(nx, self.phi_pre, self.b_pre, self.a_pre))
        u = ref.lane_read(stream, pre)
        y = block(u) - u
        post = torch.sigmoid(ref.scaled_linear(nx, self.phi_post, self.b_post, self.a_post))
        logits = ref.scaled_linear(nx, self.phi_res, self.b_res, self.a_res)
        logits = logits.reshape(*logits.shape[:-1], self.lanes, self.lanes)
        mix = ref.sinkhorn(logits, SINKHORN_ITERATIONS)
        return ref.lane_write(stream, mix, post, y, 2.0)


class Block(nn.Module):
    """Optional engram injection, gated attention and the Monarch MLP, around one residual vector."""

    ones: Tensor

    def __init__(
        self, geometry: Geometry, w: Mapping[str, Tensor], permutations: tuple[Tensor, Tensor], layer: int
    ) -> None:
        super().__init__()

        def sub(prefix: str) -> dict[str, Tensor]:
            return {k[len(prefix) :]: v for k, v in w.items() if k.startswith(prefix)}

        self.lanes = Lanes(geometry, sub("mhc_"), layer)
        self.norm_in = Norm(w["ZCRMSNorm_0/scale"])
        attention = sub("self_attn/")
        if geometry.sliding_window and layer not in geometry.global_layers:
            # A local layer's taps don't reach beyond its window either.
            reach = torch.arange(geometry.qkv_conv_taps) < geometry.sliding_window
            attention |= {k: v * reach.unsqueeze(-1) for k, v in attention.items() if k.endswith("_taps")}
        self.attention = Attention(geometry, attention)
        self.post_norm = Norm(w["post_attn_norm/scale"])
        self.gate = param(w["attn_gate"])
        self.pre_mlp_norm = Norm(w["pre_hada_norm/scale"])
        self.mlp = Monarch(geometry, sub("hadamard_mlp/"), permutations)
        self.inv_sqrt_width = 1 / math.sqrt(geometry.d_model)
        self.register_buffer("ones", torch.ones(geometry.d_model))

    def forward(
        self,
        stream: Tensor,
        cos: Tensor,
        sin: Tensor,
        engram: tuple[Tensor, Tensor] | None,
        taps: Taps,
        attend: Attend,
    ) -> Tensor:
        """stream [..., T, n, C], engram key and value [..., T, C] or None -> [..., T, n, C]."""

        def body(x: Tensor) -> Tensor:
            if engram is not None:
                key, value = engram
                match = ref.row_dot(
                    ref.rms_norm(x, self.ones, EPS), ref.rms_norm(key, self.ones, EPS), self.inv_sqrt_width
                )
                x = x + torch.sigmoid(match) * value
            out = self.attention(self.norm_in(x), cos, sin, taps, attend)
            x = x + torch.sigmoid(self.gate) * self.post_norm(out)
            added: Tensor = self.mlp(self.pre_mlp_norm(x))
            return x + added

        following: Tensor = self.lanes(stream, body)
        return following
