"""Which ops a program may hold at each boundary between stages."""

from __future__ import annotations

import operator

import torch
from torch import fx

from needle_export.errors import Unsupported
from needle_export.graph.ops import NAMES, op
from needle_export.graph.program import Program, layer_of

aten = torch.ops.aten

#: Integer arithmetic on T, and picking one of several results.
_SIZES = frozenset({aten.sym_size.int, operator.add, operator.mul, operator.floordiv, operator.getitem})

_VIEWS = frozenset(
    {
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.permute.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split_with_sizes.default,
        aten.pad.default,
        aten.cat.default,
    }
)

#: What every target must lower, and all that it will be handed.
REWRITTEN = (
    frozenset(op(name) for name in NAMES if name != "hadamard")
    | _SIZES
    | _VIEWS
    | {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.sigmoid.default,
        aten.softmax.int,
        aten.silu.default,
        aten.cos.default,
        aten.sin.default,
        aten.to.dtype,
        aten.arange.default,
        aten.embedding.default,
        aten.index_select.default,
        aten.mean.dim,
        aten.matmul.default,
        aten.linear.default,
    }
)

#: What a step may hold besides where it feeds probe heads: only targets that offer heads are handed such steps.
PROBED = frozenset({aten.stack.default})

#: What a program with weights in codebook form holds besides: only for targets that offer those schemes.
ROTATED = frozenset({op("hadamard")})


def check_traced(program: Program) -> None:
    """A traced program holds ATen ops only.

    Raises:
        Unsupported: naming the node.
    """
    for node in _calls(program):
        if node.target not in _SIZES and getattr(node.target, "namespace", "") != "aten":
            raise _refusal(node, "traced")


def check_rewritten(program: Program) -> None:
    """After the passes a program holds what every target lowers, what heads and codebooks need besides, and no more.

    Raises:
        Unsupported: naming the node.
    """
    for node in _calls(program):
        if node.target not in REWRITTEN | PROBED | ROTATED:
            raise _refusal(node, "rewritten")


def _calls(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]


def _refusal(node: fx.Node, stage: str) -> Unsupported:
    layer = layer_of(node)
    spot = f" in block {layer}" if layer >= 0 else ""
    return Unsupported(f"{node.target}{spot} has no place in a {stage} program", where=node.name)
