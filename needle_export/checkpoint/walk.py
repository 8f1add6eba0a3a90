"""The fixed order of a container's records, and the way from records back to named tensors.

A container names nothing: the n-th record is what the geometry says comes n-th. Matrices lie [out, in],
the transpose of the parameter tree's kernels, and layers are separate records that the tree stacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from needle_export.checkpoint.cq import PackedTensor
from needle_export.checkpoint.dimensions import COND_RANK, HEAD_NAMES, Geometry, HeadGeometry
from needle_export.checkpoint.layout import ATTENTION, BLOCK, MLP, head_shapes, tensor_shapes
from needle_export.checkpoint.store import Array, Entry, TensorStore
from needle_export.weights.cq import TERNARY

HEAD_CODES = dict(enumerate(HEAD_NAMES, start=1))
"""Codes of the probe heads in a container's list of heads."""

MANIFEST = "heads.manifest"
PERMUTATIONS = ("hada_p1", "hada_p2")


class Form(Enum):
    """How a record's array becomes a part of its tensor."""

    PLAIN = "plain"  # a vector or small array, kept as it is
    KERNEL = "kernel"  # [out, in], transposed in the tree
    TABLE = "table"  # rows as in the tree, its leading axes flattened
    LANES = "lanes"  # all layers' transposed lane matrices below each other
    AUXILIARY = "auxiliary"  # no tensor of the tree: permutations, the list of heads


@dataclass(frozen=True)
class Slot:
    """One place in the order: the tensor it belongs to, which layer of it, and the record's shape."""

    tensor: str
    shape: tuple[int, ...]
    form: Form
    layer: int | None = None

    @property
    def label(self) -> str:
        """The place in words, for messages."""
        return self.tensor if self.layer is None else f"{self.tensor} of layer {self.layer}"

    @property
    def quantizable(self) -> bool:
        """Whether the record may be a codebook matrix."""
        return self.form in (Form.KERNEL, Form.TABLE, Form.LANES)


Content = PackedTensor | Array


def body_slots(geometry: Geometry) -> list[Slot]:
    """Records from the embedding through the final norm."""
    g = geometry
    slots = [Slot("embedding/embedding", (g.vocab_size, g.d_model), Form.TABLE)]
    for layer in range(g.num_layers):
        slots += _layer_slots(g, layer)
    layers, n = g.num_layers, g.mhc_lanes
    for name, shape in (("a_pre", (layers,)), ("a_post", (layers,)), ("a_res", (layers,)),
                        ("b_pre", (layers, n)), ("b_post", (layers, n)), ("b_res", (layers, n, n))):
        slots.append(Slot(f"stack/mhc_{name}", shape, Form.PLAIN))
    for name, width in (("phi_pre", n), ("phi_post", n), ("phi_res", n * n)):
        slots.append(Slot(f"stack/mhc_{name}", (layers * width, n * g.d_model), Form.LANES))
    slots += [Slot(name, (g.hada_n,), Form.AUXILIARY) for name in PERMUTATIONS]
    for site in range(len(g.engram_layers)):
        prefix = f"engrams_{site}"
        slots += [
            Slot(f"{prefix}/embedding", (g.engram_tables * g.engram_slots, g.engram_sub_dim), Form.TABLE),
            Slot(f"{prefix}/key_proj/kernel", (g.d_model, g.engram_width), Form.KERNEL),
            Slot(f"{prefix}/value_proj/kernel", (g.d_model, g.engram_width), Form.KERNEL),
            Slot(f"{prefix}/taps", (g.engram_conv_taps, g.d_model), Form.PLAIN),
        ]
    slots.append(Slot("stack/final_norm/scale", (g.d_model,), Form.PLAIN))
    return slots


def _layer_slots(g: Geometry, layer: int) -> list[Slot]:
    q_width, k_width = g.num_heads * g.qk_head_dim, g.num_kv_heads * g.qk_head_dim
    v_width, o_width = g.num_kv_heads * g.v_head_dim, g.num_heads * g.v_head_dim
    a, b = g.hada_blocks

    def plain(name: str, *shape: int) -> Slot:
        return Slot(name, shape, Form.PLAIN, layer)

    def kernel(name: str, out: int, in_dim: int) -> Slot:
        return Slot(f"{ATTENTION}/{name}/kernel", (out, in_dim), Form.KERNEL, layer)

    slots = [plain(f"{BLOCK}/ZCRMSNorm_0/scale", g.d_model), kernel("q_proj", q_width, g.d_model),
             kernel("k_proj", k_width, g.d_model), kernel("v_proj", v_width, g.d_model)]
    if g.qkv_conv_taps:
        slots += [plain(f"{ATTENTION}/{name}", g.qkv_conv_taps, width)
                  for name, width in (("q_taps", q_width), ("k_taps", k_width), ("v_taps", v_width))]
    slots += [plain(f"{ATTENTION}/q_norm/scale", g.qk_head_dim),
              plain(f"{ATTENTION}/k_norm/scale", g.qk_head_dim),
              kernel("gate_proj", o_width, g.d_model), kernel("out_proj", g.d_model, o_width),
              plain(f"{BLOCK}/post_attn_norm/scale", g.d_model), plain(f"{BLOCK}/attn_gate", 1),
              plain(f"{BLOCK}/pre_hada_norm/scale", g.d_model)]
    slots += [plain(f"{MLP}/{name}", g.hada_n) for name in ("d1", "d2", "b2", "d3", "d4")]
    for factor in ("w1", "w2", "w3"):
        slots += [plain(f"{MLP}/{factor}a", a, a), plain(f"{MLP}/{factor}b", b, b)]
    slots += [plain(f"{MLP}/cond_v", g.d_model, COND_RANK), plain(f"{MLP}/cond_u", COND_RANK, g.hada_n)]
    return slots


def head_slots(geometry: Geometry, head: HeadGeometry, stacked_probes: bool) -> list[Slot]:
    """Records of one probe head; ``stacked_probes`` is the earlier layout, probes [L+1, k, C]."""
    shapes = {name.partition("/")[2]: shape for name, shape in head_shapes(geometry, head).items()}
    rows, k, d = shapes["probes"]
    probes = Slot(f"{head.key}/probes", (rows, k, d), Form.PLAIN) if stacked_probes else \
        Slot(f"{head.key}/probes", (rows * k, d), Form.TABLE)
    slots = [probes, Slot(f"{head.key}/gain", shapes["gain"], Form.PLAIN),
             Slot(f"{head.key}/query", shapes["query"], Form.TABLE),
             Slot(f"{head.key}/row_bias", shapes["row_bias"], Form.PLAIN),
             Slot(f"{head.key}/proj/kernel", shapes["proj/kernel"][::-1], Form.KERNEL),
             Slot(f"{head.key}/proj/bias", (head.out_dim,),
                  Form.AUXILIARY if head.name == "embedding" else Form.PLAIN)]
    if head.name == "router":
        slots.append(Slot(f"{head.key}/calibration", (3,), Form.PLAIN))
    return slots


def assemble(geometry: Geometry, contents: Mapping[Slot, Content],
             ) -> tuple[TensorStore, dict[str, PackedTensor]]:
    """Named tensors in tree orientation, and the quantised matrices under their names.

    Quantised parts of stacked tensors are named ``tensor#layer``.
    """
    parts: dict[str, list[tuple[Slot, Content]]] = {}
    for slot, content in contents.items():
        if slot.form is not Form.AUXILIARY:
            parts.setdefault(slot.tensor, []).append((slot, content))
    targets = tensor_shapes(geometry) | {"router_head/calibration": (3,)}
    packed: dict[str, PackedTensor] = {}
    for name, pieces in parts.items():
        for slot, content in pieces:
            packed.update(_packed_parts(geometry, name, slot, content))
    entries = {name: _entry(targets[name], pieces) for name, pieces in parts.items()}
    return TensorStore(entries), packed


def _packed_parts(geometry: Geometry, name: str, slot: Slot, content: Content) -> dict[str, PackedTensor]:
    if not isinstance(content, PackedTensor):
        return {}
    if slot.form is Form.LANES:
        width = content.shape[0] // geometry.num_layers
        return {f"{name}#{layer}": content.rows(layer * width, (layer + 1) * width, f"{name}#{layer}")
                for layer in range(geometry.num_layers)}
    return {content.name: content}


def _entry(shape: tuple[int, ...], pieces: Sequence[tuple[Slot, Content]]) -> Entry:
    """The store entry of a tensor made of one record, or of one record a layer."""
    contents = [content for _, content in pieces]
    formats = {_format_of(content) for content in contents}
    wide = any(isinstance(content, PackedTensor) or content.dtype == np.float32 for content in contents)
    dtype = "float32" if wide else "float16"

    def make() -> Array:
        if pieces[0][0].layer is None:
            # A view stays a view unless the layout or the width has to change.
            return np.ascontiguousarray(_part(*pieces[0], shape), dtype=dtype)
        out = np.empty(shape, dtype)
        for index, (slot, content) in enumerate(pieces):
            out[index] = _part(slot, content, shape[1:])
        return out

    return Entry(shape, dtype, formats.pop() if len(formats) == 1 else "mixed", make)


def _part(slot: Slot, content: Content, shape: tuple[int, ...]) -> Array:
    array: Array = content.dequantize() if isinstance(content, PackedTensor) else content
    if slot.form is Form.KERNEL:
        return array.T
    if slot.form is Form.LANES:
        layers, stream, width = shape
        return array.reshape(layers, width, stream).transpose(0, 2, 1)
    return array.reshape(shape)


def _format_of(content: Content) -> str:
    if isinstance(content, PackedTensor):
        return "ternary" if content.bits == TERNARY else f"cq{content.bits}"
    return content.dtype.name


def content_name(slot: Slot) -> str:
    """The name a quantised record goes by: the tensor's, with ``#layer`` when it is one of several."""
    return slot.tensor if slot.layer is None else f"{slot.tensor}#{slot.layer}"

