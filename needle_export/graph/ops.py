"""The fused ops: ``torch.ops.needle.*``, with schema, eager kernel (the reference) and fake kernel.

A fused op is what a target lowers as one thing. Its eager kernel is the plain PyTorch function of
:mod:`needle_export.graph.reference`, so a fused program still runs in torch and must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from needle_export.graph import reference as ref

_FAKES: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, scale, eps: torch.empty_like(x),
    "rotary": lambda x, cos, sin: torch.empty_like(x),
    "sinkhorn": lambda logits, iterations: torch.empty_like(logits),
    "causal_taps": lambda x, history, taps, dilation: (torch.empty_like(x), torch.empty_like(history)),
    "kronecker": lambda x, a, b: x.new_empty((*x.shape[:-1], a.shape[1] * b.shape[1])),
    "ngram_rows": lambda tokens, history, position, seeds, orders, slots: (
        tokens.new_empty((tokens.shape[0], seeds.shape[0])),
        tokens.new_empty((tokens.shape[0], seeds.shape[0]), dtype=torch.float32),
        torch.empty_like(history),
    ),
    "cached_attention": lambda q, k, v, k_cache, v_cache, position, scale, ring: (
        q.new_empty((q.shape[0], q.shape[1] * v.shape[2])),
        torch.empty_like(k_cache),
        torch.empty_like(v_cache),
    ),
    "lane_read": lambda stream, gates: stream.new_empty((*stream.shape[:-2], stream.shape[-1])),
    "lane_write": lambda stream, mix, gates, y, gain: torch.empty_like(stream),
    "scaled_linear": lambda x, weight, bias, alpha: x.new_empty((*x.shape[:-1], weight.shape[1])),
    "row_dot": lambda a, b, scale: a.new_empty((*a.shape[:-1], 1)),
    "add_rms_norm": lambda x, skip, scale, eps: (torch.empty_like(x), torch.empty_like(x)),
    "hadamard": lambda x, group: torch.empty_like(x),
    "probe_absorb": lambda cells, probes, count, best, total, pool, scale: (
        torch.empty_like(best),
        torch.empty_like(total),
        torch.empty_like(pool),
    ),
    "probe_answer": lambda total, pool, gain, query, row_bias, kernel, bias, scale, eps, unit: torch.empty_like(bias),
}

_SCHEMAS: dict[str, str] = {
    "rms_norm": "(Tensor x, Tensor scale, float eps) -> Tensor",
    "rotary": "(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    "sinkhorn": "(Tensor logits, int iterations) -> Tensor",
    "causal_taps": "(Tensor x, Tensor history, Tensor taps, int dilation) -> (Tensor, Tensor)",
    "kronecker": "(Tensor x, Tensor a, Tensor b) -> Tensor",
    "ngram_rows": "(Tensor tokens, Tensor history, Tensor position, Tensor seeds, int[] orders, int slots)"
    " -> (Tensor, Tensor, Tensor)",
    "cached_attention": "(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor position,"
    " float scale, bool ring) -> (Tensor, Tensor, Tensor)",
    "lane_read": "(Tensor stream, Tensor gates) -> Tensor",
    "lane_write": "(Tensor stream, Tensor mix, Tensor gates, Tensor y, float gain) -> Tensor",
    "scaled_linear": "(Tensor x, Tensor weight, Tensor bias, Tensor alpha) -> Tensor",
    "row_dot": "(Tensor a, Tensor b, float scale) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor skip, Tensor scale, float eps) -> (Tensor, Tensor)",
    "hadamard": "(Tensor x, int group) -> Tensor",
    "probe_absorb": "(Tensor cells, Tensor probes, Tensor count, Tensor best, Tensor total, Tensor pool,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    "probe_answer": "(Tensor total, Tensor pool, Tensor gain, Tensor query, Tensor row_bias, Tensor kernel,"
    " Tensor bias, float scale, float eps, bool unit) -> Tensor",
}

NAMES = tuple(_SCHEMAS)

# A Library object keeps its registrations alive for as long as it lives.
_LIBRARY: Any = torch.library.Library("needle", "DEF")  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _fresh(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference with results that never alias its arguments, as torch demands of an op."""

    def kernel(*args: Any) -> Any:
        result = reference(*args)
        if isinstance(result, Tensor):
            return result.clone()
        return tuple(r.clone() for r in result)

    return kernel


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _fresh(getattr(ref, _name)), "CPU")
    torch.library.register_fake(f"needle::{_name}", _FAKES[_name], lib=_LIBRARY)


def op(name: str) -> Any:
    """The overload of a fused op, e.g. ``op("rms_norm")``."""
    return getattr(torch.ops.needle, name).default
