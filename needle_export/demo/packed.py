"""Many requests behind one list of tools in one pass of the reference model.

The tokens up to the request (the head, P of them) are computed once; every request (a branch) goes on from there and
sees the head and itself. So a training step costs the head once instead of once a request, and its gradients are those
of K whole sequences whose heads are one. The blocks are the reference's own; only what looks at other positions is
written here for rows that lie packed: N = P + all branches' tokens, one behind the other.

Letters as in :mod:`needle_export.model.block`; P tokens of the head, K branches, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from needle_export.graph import reference as ref
from needle_export.model.network import Needle


class Packing:
    """Where the rows of a head and its branches lie, and which precede which.

    Args:
        head: P tokens.
        branches: the tokens of each branch, none empty.
    """

    def __init__(self, head: Sequence[int], branches: Sequence[Sequence[int]]) -> None:
        lengths = torch.tensor([len(b) for b in branches])
        self.head, self.count, self.longest = len(head), len(branches), int(lengths.max())
        self.tokens = torch.tensor([*head, *(t for b in branches for t in b)])
        self.rows = len(self.tokens)
        ends = torch.cumsum(lengths, 0)
        #: First row of each branch [K], among all rows.
        self.starts = self.head + ends - lengths
        at = torch.arange(self.longest)
        self.real = at < lengths.unsqueeze(1)
        #: Rows by branch and place [K, T]; padding repeats the branch's last row, and is masked where it is read.
        self.places = self.starts.unsqueeze(1) + torch.minimum(at, lengths.unsqueeze(1) - 1)
        #: Row by row, where it lies in [K, T] flattened.
        self.back = self.real.flatten().nonzero().squeeze(1)
        inner = torch.arange(self.rows) - self.head
        branch = torch.repeat_interleave(torch.arange(self.count), lengths)
        inner[self.head :] -= (ends - lengths)[branch]
        inner[: self.head] = torch.arange(self.head)
        self.positions = inner.clone()
        self.positions[self.head :] += self.head
        before = torch.arange(self.rows) - 1
        before[self.starts] = self.head - 1
        before[0] = self.rows
        self._before = torch.cat([before, torch.tensor([self.rows])])
        self._earlier = {0: torch.arange(self.rows)}

    def earlier(self, distance: int) -> Tensor:
        """Row of the token ``distance`` positions before each row [N]; N where there is none."""
        if distance not in self._earlier:
            self._earlier[distance] = self._before[self.earlier(distance - 1)]
        return self._earlier[distance]

    def ngrams(self, seeds: Tensor, orders: list[int], slots: int) -> tuple[Tensor, Tensor]:
        """What :func:`needle_export.graph.reference.ngram_rows` says of every row: [N, tables] each."""
        past = max(orders) - 1
        head = self.tokens[: self.head]
        tail = torch.cat([head.new_zeros(past), head])[-past:] if past else head[:0]
        parts, keep = [head], [torch.ones(self.head, dtype=torch.bool)]
        for k in range(self.count):
            own = self.tokens[self.places[k][self.real[k]]]
            parts += [tail, own]
            keep += [torch.zeros(past, dtype=torch.bool), torch.ones(len(own), dtype=torch.bool)]
        rows, _, _ = ref.ngram_rows(torch.cat(parts), head.new_zeros(past), torch.zeros(1, dtype=torch.int64), seeds,
                                    orders, slots)
        heads = len(seeds) // len(orders)
        valid = [(self.positions >= order - 1).float().unsqueeze(-1).expand(-1, heads) for order in orders]
        return rows[torch.cat(keep)], torch.cat(valid, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        """Attention of all rows: q [N, H, Dqk], k [N, G, Dqk], v [N, G, Dv] -> [N, H*Dv]; window 0 is none."""
        size, groups = self.head, k.shape[1]
        at = torch.arange(size)
        distance = at.unsqueeze(1) - at
        seen = (distance >= 0) & (distance < window if window else distance >= 0)
        first = ref.attend(q[:size], k[:size], v[:size], seen, scale)
        # [K, G, R*T, .]: the queries of a group's heads below each other.
        heads, count, longest = q.shape[1] // groups, self.count, self.longest
        queries = q[self.places].reshape(count, longest, groups, heads, -1).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(count, groups, heads * longest, -1)
        own_k, own_v = k[self.places].transpose(1, 2), v[self.places].transpose(1, 2)
        far = torch.matmul(queries, k[:size].permute(1, 2, 0)) * scale
        near = torch.matmul(queries, own_k.transpose(-1, -2)) * scale
        own = torch.arange(longest)
        gap = own.unsqueeze(1) - own
        distance = torch.cat([(size + own).unsqueeze(1) - at, gap], 1)
        seen = (distance >= 0) & (distance < window if window else distance >= 0)
        scores = torch.cat([far, near], -1).masked_fill(~seen.repeat(heads, 1), float("-inf"))
        weights = torch.softmax(scores, -1)
        out = torch.matmul(weights[..., :size], v[:size].transpose(0, 1)) + torch.matmul(weights[..., size:], own_v)
        out = out.reshape(count, groups, heads, longest, -1).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
        return torch.cat([first, out[self.back]])


def hidden(model: Needle, packing: Packing) -> list[Tensor]:
    """Lane-averaged hidden states of all rows: L + 1 tensors [N, C], the embedding first."""
    g = model.geometry
    cos, sin = model.angles(packing.positions)

    def taps(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
        padded = torch.cat([x, x.new_zeros(1, x.shape[-1])])
        y = weight[0] * x
        for j in range(1, weight.shape[0]):
            y = y + weight[j] * padded[packing.earlier(j * dilation)]
        return y

    keys = values = None
    if model.engram is not None:
        e = model.engram
        keys, values = e(*packing.ngrams(e.seeds, e.orders, e.slots))
        values = taps(values, e.taps, e.dilation)
    _, stream = model.embed(packing.tokens)
    out = [stream.mean(-2)]
    for index, layer in enumerate(model.layers):
        window = 0 if index in g.global_layers else g.sliding_window

        def attend(q: Tensor, k: Tensor, v: Tensor, window: int = window) -> Tensor:
            return packing.attend(q, k, v, window, g.qk_head_dim**-0.5)

        stream = layer(stream, cos, sin, model.memory(index, keys, values), taps, attend)
        out.append(stream.mean(-2))
    return out
