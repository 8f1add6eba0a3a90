"""The model as a traceable step, and where each of its parameters comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from needle_export.checkpoint.geometry import role_of
from needle_export.model.network import Needle

_ATTENTION = {
    **{p: f"{p}/kernel" for p in ("q_proj", "k_proj", "v_proj", "gate_proj", "out_proj")},
    **{f"{x}_taps": f"{x}_taps" for x in "qkv"},
    "q_norm.scale": "q_norm/scale",
    "k_norm.scale": "k_norm/scale",
}
_LAYER = {
    "norm_in.scale": "stack/layers/block/ZCRMSNorm_0/scale",
    "post_norm.scale": "stack/layers/block/post_attn_norm/scale",
    "pre_mlp_norm.scale": "stack/layers/block/pre_hada_norm/scale",
    "gate": "stack/layers/block/attn_gate",
}
_TOP = {
    "embedding": "embedding/embedding",
    "final_norm.scale": "stack/final_norm/scale",
    "engram.tables": "engrams/embedding",
    "engram.key_proj": "engrams/key_proj/kernel",
    "engram.value_proj": "engrams/value_proj/kernel",
    "engram.taps": "engrams/taps",
}
_HEAD = {
    **{leaf: leaf for leaf in ("probes", "gain", "query", "row_bias")},
    **{leaf: f"proj/{leaf}" for leaf in ("kernel", "bias")},
}
_PERMUTATIONS = ("mlp.p1", "mlp.p2")


class Step(nn.Module):
    """``Needle.step`` at one context, with the streams that locate a faulty layer."""

    def __init__(self, net: Needle, context: int, heads: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.net = net
        self.context = context
        self.heads = heads

    def forward(
        self, tokens: Tensor, position: Tensor, state: Mapping[str, Tensor], count: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """tokens [T], position [1], count [1] for heads -> logits [T, V], next state, L streams [T, n, C]."""
        return self.net.step_streams(tokens, position, state, self.context, self.heads, count)


class Answer(nn.Module):
    """``Needle.answer`` of one probe head."""

    def __init__(self, net: Needle, head: str) -> None:
        super().__init__()
        self.net = net
        self.head = head

    def forward(self, state: Mapping[str, Tensor]) -> Tensor:
        """State after the last token -> [O]."""
        return self.net.answer(self.head, state)


def parameter_sources(step: Step | Answer) -> dict[str, tuple[str, str, int]]:
    """For each parameter of a step or a head's end: the checkpoint tensor behind it, its role and layer (-1: none).

    Engram tensors of all sites are one parameter each here; their source drops the site's number.
    """
    found: dict[str, tuple[str, str, int]] = {}
    for path, _ in (*step.named_parameters(), *step.named_buffers()):
        name = path.removeprefix("net.")
        layer = -1
        match = re.match(r"layers\.(\d+)\.(.*)", name)
        source: str | None
        if match:
            layer, name = int(match.group(1)), match.group(2)
            source = _layer_source(name)
        elif name.startswith("heads."):
            _, head, leaf = name.split(".")
            source = f"{head}_head/{_HEAD[leaf]}" if leaf in _HEAD else None
        else:
            source = _TOP.get(name)
        if source is not None:
            role = "mixing" if name in _PERMUTATIONS else role_of(source.replace("engrams/", "engrams_0/"))
            found[path] = (source, role, layer)
    return found


def factor_of(path: str) -> str | None:
    """The parameter, one number, that a product with a matrix is multiplied by: a lane's projections have one."""
    block, found, kind = path.rpartition(".lanes.phi_")
    return f"{block}.lanes.a_{kind}" if found else None


def _layer_source(name: str) -> str | None:
    if name in _LAYER:
        return _LAYER[name]
    head, _, leaf = name.partition(".")
    if head == "attention":
        return f"stack/layers/block/self_attn/{_ATTENTION[leaf]}"
    if head == "mlp":
        return f"stack/layers/block/hadamard_mlp/{leaf}"
    if head == "lanes" and leaf != "ones":
        return f"stack/mhc_{leaf}"
    return None
