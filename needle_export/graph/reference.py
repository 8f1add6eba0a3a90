"""The fused operations, each as the plain PyTorch it stands for.

The model is written with these functions, so a traced model contains exactly their ATen graphs. The
same functions are the eager kernels of the fused ops (:mod:`needle_export.graph.ops`) and, traced
alone, the patterns that the fusion passes look for: one definition, three uses.

Dimension letters: B batch, T new positions, S cache rows, C model width, H query heads, G key/value
heads, R = H/G, Dqk query/key width, Dv value width, n lanes, K taps, N n-gram tables; of probe heads: M rows
(the embedding and every block), P probes a row, Q queries, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Seed and multiplier of the n-gram hash, 32-bit unsigned (FNV-1a's prime).
HASH_SEED = 0x9E3779B9
HASH_PRIME = 0x01000193
_U32 = 0xFFFFFFFF

#: Running maximum of a probe that has read nothing, and the score of padding. Both lie below any real score, and so
#: far apart that padding weighs exactly 0 even before the first token.
PROBE_START = -1e9
PROBE_PADDING = -2e9


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis.

    Args:
        x: [..., D].
        scale: [D] or anything that broadcasts against ``x``.
        eps: added to the mean square.

    Returns:
        ``x / sqrt(mean(x^2) + eps) * scale``, [..., D].
    """
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + eps) * scale


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding over half-split pairs (i, i + D/2).

    Args:
        x: [T, H, D].
        cos, sin: [T, D/2].

    Returns:
        [T, H, D].
    """
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


def hadamard(x: Tensor, group: int) -> Tensor:
    """Groups of the last axis times the normalised Walsh-Hadamard matrix, which is symmetric and its own inverse.

    Args:
        x: [..., D].
        group: a power of two that divides D.

    Returns:
        [..., D].
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < group:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    turn = (matrix / group**0.5).to(x.dtype)
    parts = x.reshape(*x.shape[:-1], -1, group)
    return torch.matmul(parts, turn).reshape(x.shape)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Sinkhorn's alternating normalisation in the log domain, rows first, columns last.

    Args:
        logits: [..., n, n].
        iterations: how many (rows, columns) pairs; the model needs exactly 20, as the scaling has not
            converged by then.

    Returns:
        [..., n, n], every column summing to 1.
    """
    log_k = logits
    for _ in range(iterations):
        log_k = log_k - torch.logsumexp(log_k, dim=-1, keepdim=True)
        log_k = log_k - torch.logsumexp(log_k, dim=-2, keepdim=True)
    return torch.exp(log_k)


def causal_taps(x: Tensor, history: Tensor, taps: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution that carries its own past.

    Args:
        x: [T, C].
        history: [(K-1) * dilation, C], the rows before ``x``, oldest first.
        taps: [K, C]; tap j weighs the row ``j * dilation`` positions back.
        dilation: distance between taps.

    Returns:
        The filtered rows [T, C] and the next history.
    """
    rows, count = x.shape[0], history.shape[0]
    padded = torch.cat([history, x], dim=0)
    y = taps[0] * x
    for j in range(1, taps.shape[0]):
        y = y + taps[j] * padded.narrow(0, count - j * dilation, rows)
    return y, padded.narrow(0, rows, count)


def kronecker(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Apply the Kronecker product of two small factors to the last axis.

    Args:
        x: [..., I*J].
        a: [I, K].
        b: [J, L].

    Returns:
        [..., K*L] with ``out[k, l] = sum_ij x[i, j] a[i, k] b[j, l]``.
    """
    z = x.reshape(*x.shape[:-1], a.shape[0], b.shape[0])
    z = torch.matmul(torch.matmul(a.t(), z), b)
    return z.flatten(-2)


def hash_seeds(orders: list[int], heads: int, seed_heads: int) -> list[int]:
    """Initial values of the n-gram hashes, order-major.

    ``seed_heads`` is how many heads an order had when the seeds were dealt (0: ``heads``): a model cut to
    fewer heads keeps the seeds of those it kept.
    """
    stride = seed_heads or heads
    return [(HASH_SEED * (i * stride + h + 1)) & _U32 for i in range(len(orders)) for h in range(heads)]


def ngram_rows(
    tokens: Tensor,
    history: Tensor,
    position: Tensor,
    seeds: Tensor,
    orders: list[int],
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hash the n-grams that end at each new position into table rows.

    Arithmetic is 32-bit unsigned, carried out in int64 (a product wraps modulo 2^64, which leaves the
    low 32 bits right).

    Args:
        tokens: [T] int64.
        history: [max(orders) - 1] int64, the tokens before, oldest first, 0 before the start.
        position: [1] int64, the position of ``tokens[0]``.
        seeds: [N] int64, the hashes' initial values, as :func:`hash_seeds` deals them.
        orders: n-gram lengths, each with N / len(orders) hashes.
        slots: rows of a table.

    Returns:
        rows [T, N] int64 in [0, slots); valid [T, N] float32, 0 where the n-gram would begin before
        the start; the next history.
    """
    rows, count = tokens.shape[0], history.shape[0]
    padded = torch.cat([history, tokens], dim=0)
    shifted = [padded.narrow(0, count - j, rows).unsqueeze(-1) for j in range(max(orders))]
    positions = position + torch.arange(rows, device=tokens.device)
    heads = seeds.shape[0] // len(orders)
    columns, valid = [], []
    for index, order in enumerate(orders):
        acc = seeds.narrow(0, index * heads, heads)
        for j in range(order):
            acc = ((acc ^ shifted[j]) * HASH_PRIME) & _U32
        acc = acc ^ (acc >> 15)
        columns.append(acc % slots)
        valid.append((positions >= order - 1).to(torch.float32).unsqueeze(-1).expand(-1, heads))
    return torch.cat(columns, dim=-1), torch.cat(valid, dim=-1), padded.narrow(0, rows, count)


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Grouped-query attention at unequal widths; q [T,H,Dqk], keys [S,G,Dqk], values [S,G,Dv], visible [T,S]."""
    rows, heads, width = q.shape
    size, groups, out_width = values.shape
    folded = q.permute(1, 0, 2).reshape(groups, heads // groups * rows, width)
    scores = torch.bmm(folded, keys.permute(1, 2, 0)) * scale
    scores = scores.reshape(heads, rows, size).masked_fill(~visible, float("-inf"))
    weights = torch.softmax(scores, dim=-1).reshape(groups, heads // groups * rows, size)
    out = torch.bmm(weights, values.permute(1, 0, 2)).reshape(heads, rows, out_width)
    return out.permute(1, 0, 2).flatten(-2)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    scale: float,
    ring: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over a cache that the new rows are written into.

    Row ``p mod S`` of the cache holds position ``p``. Where the cache may wrap (``ring``), S is the
    window and a chunk must be read before it is written: its rows replace ones that its first queries
    still see.

    Args:
        q: [T, H, Dqk], after rotation.
        k: [T, G, Dqk], after rotation.
        v: [T, G, Dv].
        k_cache: [S, G, Dqk].
        v_cache: [S, G, Dv].
        position: [1] int64, the position of the first new row.
        scale: of the scores.
        ring: whether positions may exceed S; then T must be at most S.

    Returns:
        The attended values [T, H*Dv] and both caches with the new rows in place.
    """
    rows, size = q.shape[0], k_cache.shape[0]
    slots = torch.arange(size, device=q.device)
    positions = position + torch.arange(rows, device=q.device)
    if not ring or rows == 1:
        target = positions % size if ring else positions
        k_next = k_cache.index_copy(0, target, k)
        v_next = v_cache.index_copy(0, target, v)
        visible = slots.unsqueeze(0) <= positions.unsqueeze(1)
        return attend(q, k_next, v_next, visible, scale), k_next, v_next
    last = position - 1
    keys_at = torch.cat([last - (last - slots) % size, positions], dim=0).unsqueeze(0)
    queries_at = positions.unsqueeze(1)
    visible = (keys_at >= 0) & (keys_at <= queries_at) & (queries_at - keys_at < size)
    out = attend(q, torch.cat([k_cache, k], dim=0), torch.cat([v_cache, v], dim=0), visible, scale)
    target = positions % size
    return out, k_cache.index_copy(0, target, k), v_cache.index_copy(0, target, v)


def lane_read(stream: Tensor, gates: Tensor) -> Tensor:
    """Read one vector from the lanes: stream [..., n, C], gates [..., n] -> [..., C]."""
    return torch.matmul(gates.unsqueeze(-2), stream).squeeze(-2)


def lane_write(stream: Tensor, mix: Tensor, gates: Tensor, y: Tensor, gain: float) -> Tensor:
    """Mix the lanes and write one vector back to them.

    Args:
        stream: [..., n, C].
        mix: [..., n, n].
        gates: [..., n].
        y: [..., C].
        gain: of the write.

    Returns:
        ``mix @ stream + gain * gates (outer) y``, [..., n, C].
    """
    return torch.matmul(mix, stream) + (gain * gates).unsqueeze(-1) * y.unsqueeze(-2)


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    """``alpha * (x @ weight) + bias``: x [..., I], weight [I, O], bias [O], alpha scalar -> [..., O]."""
    return alpha * torch.matmul(x, weight) + bias


def add_rms_norm(x: Tensor, skip: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual addition followed by a norm: the norm of ``x + skip`` and the sum itself, both [..., D]."""
    total = x + skip
    return rms_norm(total, scale, eps), total


def row_dot(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Scaled inner product of matching rows: a, b [..., D] -> [..., 1]."""
    return (a * b).sum(-1, keepdim=True) * scale


def probe_absorb(
    cells: Tensor, probes: Tensor, count: Tensor, best: Tensor, total: Tensor, pool: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Read further positions into the pools of a probe head: a softmax over all positions, computed as they come.

    Args:
        cells: [M, T, C], the hidden state of every row at the new positions.
        probes: [M, P, C].
        count: [1] int64, how many of the T positions are real; those behind are padding and change nothing.
        best: [M, P, 1], the largest score so far; ``PROBE_START`` at the start.
        total: [M, P, 1], the sum of the weights ``exp(score - best)`` so far; 0 at the start.
        pool: [M, P, C], the sum of the weighted cells so far; 0 at the start.
        scale: of the scores.

    Returns:
        ``best``, ``total`` and ``pool`` with the new positions; ``pool / total`` is what the softmax picks.
    """
    scores = torch.matmul(probes, cells.transpose(-1, -2)) * scale
    live = torch.arange(cells.shape[1], device=cells.device) < count
    scores = scores.masked_fill(~live, PROBE_PADDING)
    top = torch.maximum(best, scores.amax(-1, keepdim=True))
    kept, weights = torch.exp(best - top), torch.exp(scores - top)
    return top, total * kept + weights.sum(-1, keepdim=True), pool * kept + torch.matmul(weights, cells)


def probe_answer(
    total: Tensor,
    pool: Tensor,
    gain: Tensor,
    query: Tensor,
    row_bias: Tensor,
    kernel: Tensor,
    bias: Tensor,
    scale: float,
    eps: float,
    unit: bool,
) -> Tensor:
    """What a probe head makes of its pools.

    Args:
        total: [M, P, 1] and pool: [M, P, C], as :func:`probe_absorb` leaves them.
        gain: [M, P].
        query: [Q, C].
        row_bias: [Q, M, P].
        kernel: [Q*C, O].
        bias: [O].
        scale: of the queries' scores.
        eps: of the pooled rows' norm.
        unit: whether the result is scaled to unit length.

    Returns:
        [O].
    """
    rows = rms_norm(pool / total, gain.unsqueeze(-1), eps).flatten(0, 1)
    match = torch.matmul(query, rows.t()) * scale + row_bias.flatten(1)
    picked = torch.matmul(torch.softmax(match, dim=-1), rows)
    out = torch.matmul(picked.flatten(), kernel) + bias
    return out / torch.sqrt(torch.sum(out * out) + 1e-12) if unit else out
