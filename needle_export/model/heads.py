"""Probe heads: they pool the hidden states of every block and position into one judgement.

Letters: T positions, M = L + 1 rows (the embedding, then every block), C model width, P probes, Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import HeadGeometry
from needle_export.graph import reference as ref
from needle_export.model.block import EPS, param


class ProbeHead(nn.Module):
    """One probe head.

    Each probe [M, P, C] attends over positions within its row, each query [Q, C] over all pooled rows.
    """

    ones: Tensor

    def __init__(self, geometry: HeadGeometry, w: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name, self.width = geometry.name, w["probes"].shape[-1]
        self.probes, self.gain = param(w["probes"]), param(w["gain"])
        self.query, self.row_bias = param(w["query"]), param(w["row_bias"])
        self.kernel = param(w["proj/kernel"])
        self.bias = param(w["proj/bias"]) if "proj/bias" in w else None
        self.register_buffer("ones", torch.ones(self.width))

    def forward(self, cells: Tensor) -> Tensor:
        """cells [T, M, C] of one unpadded sequence -> [out_dim]; the embedding head's output has unit length."""
        scores = torch.einsum("tmc,mpc->mpt", cells, self.probes) / math.sqrt(self.width)
        pooled = torch.einsum("mpt,tmc->mpc", torch.softmax(scores, dim=-1), cells)
        pooled = ref.rms_norm(pooled, self.ones, EPS) * self.gain.unsqueeze(-1)
        match = torch.einsum("mpc,qc->qmp", pooled, self.query) / math.sqrt(self.width) + self.row_bias
        weights = torch.softmax(match.flatten(1), dim=-1)
        out = torch.matmul((weights @ pooled.flatten(0, 1)).flatten(), self.kernel)
        if self.bias is not None:
            out = out + self.bias
        if self.name == "embedding":
            out = out / torch.sqrt(torch.sum(out * out) + 1e-12)
        return out
