"""Probe heads: they pool the hidden states of every block and position into one judgement.

Letters: T positions, M = L + 1 rows (the embedding, then every block), C model width, P probes, Q queries, O outputs.
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

    Each probe [M, P, C] attends over positions within its row, each query [Q, C] over all pooled rows. Called on a
    whole sequence, or fed position by position: :meth:`absorb` keeps the softmax over positions running in a state of
    fixed size, and :meth:`answer` says at any time what the whole sequence so far would give.
    """

    ones: Tensor
    nothing: Tensor

    def __init__(self, geometry: HeadGeometry, w: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name, self.width = geometry.name, w["probes"].shape[-1]
        self.probes, self.gain = param(w["probes"]), param(w["gain"])
        self.query, self.row_bias = param(w["query"]), param(w["row_bias"])
        self.kernel = param(w["proj/kernel"])
        self.bias = param(w["proj/bias"]) if "proj/bias" in w else None
        self.register_buffer("ones", torch.ones(1))
        self.register_buffer("nothing", torch.zeros(self.kernel.shape[-1]))

    def forward(self, cells: Tensor) -> Tensor:
        """cells [T, M, C] of one unpadded sequence -> [O]; the embedding head's output has unit length."""
        scores = torch.einsum("tmc,mpc->mpt", cells, self.probes) / math.sqrt(self.width)
        pooled = torch.einsum("mpt,tmc->mpc", torch.softmax(scores, dim=-1), cells)
        return self.answer(self.ones, pooled)

    def absorb(
        self, cells: Tensor, count: Tensor, best: Tensor, total: Tensor, pool: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """cells [M, T, C] of which the first ``count`` [1] are real -> the state with them.

        The state is the largest score [M, P, 1], the sum of weights [M, P, 1] and the weighted sum of cells [M, P, C].
        """
        return ref.probe_absorb(cells, self.probes, count, best, total, pool, 1 / math.sqrt(self.width))

    def answer(self, total: Tensor, pool: Tensor) -> Tensor:
        """Sum of weights [M, P, 1] and weighted sum of cells [M, P, C] -> [O]."""
        bias = self.nothing if self.bias is None else self.bias
        return ref.probe_answer(
            total,
            pool,
            self.gain,
            self.query,
            self.row_bias,
            self.kernel,
            bias,
            1 / math.sqrt(self.width),
            EPS,
            self.name == "embedding",
        )
