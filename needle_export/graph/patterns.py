"""What the fusion pass looks for: each fused op's reference, traced alone, with its attributes left open.

A pattern is traced like the model is, at the same T. Attributes that show in the graph as literals are
traced as sentinels, values that occur nowhere else, and read off where the sentinel stands.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from needle_export.graph import reference as ref

#: A dimension that is T, the number of new positions.
T = "T"

Dims = tuple[int | str, ...]


@dataclass(frozen=True)
class Pattern:
    """One form of a fused op.

    Attributes:
        op: name of the fused op and of its reference.
        inputs: tensor arguments in order; dims and dtype of an example.
        fixed: attributes that shape the graph, by name.
        open: attributes that stand in the graph as a literal, with the sentinel to trace.
        infer: attributes that follow from the matched inputs' shapes.
        order: argument names in schema order.
    """

    op: str
    inputs: Mapping[str, tuple[Dims, torch.dtype]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, Any] = field(default_factory=dict)
    infer: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda _: {}
    order: tuple[str, ...] = ()

    def trace(self, rows: int | None) -> fx.Graph:
        """The pattern's graph at T = rows, or at a symbolic T (None); traced once a process."""
        infer_defaults = {"dilation": 1} if self.op == "causal_taps" else {}
        attributes = {**infer_defaults, **self.fixed, **self.open}
        key = repr((self.op, self.inputs, attributes, rows))
        if key not in _TRACED:
            _TRACED[key] = _trace(self, attributes, rows)
        return _TRACED[key]


_TRACED: dict[str, fx.Graph] = {}


class _Call(nn.Module):
    def __init__(self, pattern: Pattern, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.pattern, self.attributes = pattern, attributes

    def forward(self, tensors: list[Tensor]) -> Any:
        values = {**dict(zip(self.pattern.inputs, tensors, strict=True)), **self.attributes}
        return getattr(ref, self.pattern.op)(*(values[n] for n in self.pattern.order))


def _trace(pattern: Pattern, attributes: Mapping[str, Any], rows: int | None) -> fx.Graph:
    length = 7 if rows is None else rows
    example, dynamic = [], []
    dim = torch.export.Dim("T", min=2, max=16)
    for dims, dtype in pattern.inputs.values():
        shape = tuple(length if d == T else int(d) for d in dims)
        example.append(torch.ones(shape, dtype=dtype))
        dynamic.append({i: dim for i, d in enumerate(dims) if d == T})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(
            _Call(pattern, attributes),
            (example,),
            dynamic_shapes=(dynamic,) if rows is None and any(dynamic) else None,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    graph: fx.Graph = exported.graph
    for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], pattern.inputs, strict=True):
        node.meta["input"] = name
    return graph


def _f(*dims: int | str) -> tuple[Dims, torch.dtype]:
    return dims, torch.float32


def _i(*dims: int | str) -> tuple[Dims, torch.dtype]:
    return dims, torch.int64


_EPS = {"eps": 0.0123456}


def patterns(taps: tuple[int, ...], orders: tuple[int, ...], lanes: int, probed: bool = False) -> list[Pattern]:
    """All patterns of a step of a model with these convolution lengths, n-gram orders and lanes.

    The order matters: a later pattern may contain what an earlier one has already fused.

    Args:
        probed: whether the step reads its positions into the pools of a probe head.
    """
    found = [
        Pattern(
            "sinkhorn",
            {"logits": _f(T, lanes, lanes)},
            fixed={"iterations": 20},
            order=("logits", "iterations"),
        ),
    ]
    for ring in (False, True):
        found.append(
            Pattern(
                "cached_attention",
                {
                    "q": _f(T, 4, 6),
                    "k": _f(T, 2, 6),
                    "v": _f(T, 2, 10),
                    "k_cache": _f(16, 2, 6),
                    "v_cache": _f(16, 2, 10),
                    "position": _i(1),
                },
                fixed={"ring": ring},
                open={"scale": 0.0123456},
                order=("q", "k", "v", "k_cache", "v_cache", "position", "scale", "ring"),
            )
        )
    for count in sorted({c for c in taps if c > 1}):
        found.append(
            Pattern(
                "causal_taps",
                {"x": _f(T, 5), "history": _f(count - 1, 5), "taps": _f(count, 5)},
                infer=lambda v: {"dilation": v["history"].shape[0] // (v["taps"].shape[0] - 1)},
                order=("x", "history", "taps", "dilation"),
            )
        )
    found += [
        Pattern("rotary", {"x": _f(T, 3, 6), "cos": _f(T, 3), "sin": _f(T, 3)}, order=("x", "cos", "sin")),
        Pattern("rms_norm", {"x": _f(T, 5), "scale": _f(5)}, open=_EPS, order=("x", "scale", "eps")),
        Pattern("kronecker", {"x": _f(T, 12), "a": _f(3, 3), "b": _f(4, 4)}, order=("x", "a", "b")),
        Pattern(
            "scaled_linear",
            {"x": _f(T, 5), "weight": _f(5, 3), "bias": _f(3), "alpha": _f()},
            order=("x", "weight", "bias", "alpha"),
        ),
        Pattern("lane_read", {"stream": _f(T, lanes, 5), "gates": _f(T, lanes)}, order=("stream", "gates")),
        Pattern(
            "lane_write",
            {"stream": _f(T, lanes, 5), "mix": _f(T, lanes, lanes), "gates": _f(T, lanes), "y": _f(T, 5)},
            open={"gain": 0.0123456},
            order=("stream", "mix", "gates", "y", "gain"),
        ),
    ]
    # Only a model with an engram has these: sought elsewhere, every near miss would be reported as one.
    if orders:
        found.append(
            Pattern("row_dot", {"a": _f(T, 5), "b": _f(T, 5)}, open={"scale": 0.0123456}, order=("a", "b", "scale"))
        )
        found.append(
            Pattern(
                "ngram_rows",
                {
                    "tokens": _i(T),
                    "history": _i(max(orders) - 1),
                    "position": _i(1),
                    "seeds": _i(2 * len(orders)),
                },
                fixed={"orders": list(orders)},
                open={"slots": 7919},
                order=("tokens", "history", "position", "seeds", "orders", "slots"),
            )
        )
    if probed:
        found.append(_PROBE_ABSORB)
    return found


_PROBE_ABSORB = Pattern(
    "probe_absorb",
    {
        "cells": _f(3, T, 5),
        "probes": _f(3, 2, 5),
        "count": _i(1),
        "best": _f(3, 2, 1),
        "total": _f(3, 2, 1),
        "pool": _f(3, 2, 5),
    },
    open={"scale": 0.0123456},
    order=("cells", "probes", "count", "best", "total", "pool", "scale"),
)


def head_patterns() -> list[Pattern]:
    """Patterns of the program that answers from a probe head's pools."""
    return [
        Pattern(
            "probe_answer",
            {
                "total": _f(3, 2, 1),
                "pool": _f(3, 2, 5),
                "gain": _f(3, 2),
                "query": _f(4, 5),
                "row_bias": _f(4, 3, 2),
                "kernel": _f(20, 7),
                "bias": _f(7),
            },
            fixed={"unit": unit},
            open={"scale": 0.0654321, **_EPS},
            order=("total", "pool", "gain", "query", "row_bias", "kernel", "bias", "scale", "eps", "unit"),
        )
        # The longer form first: the shorter one is its beginning.
        for unit in (True, False)
    ]
