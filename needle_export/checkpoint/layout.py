"""Which tensors a geometry implies, how large they are, and what each is for.

Names are the parameter tree's keys joined by "/"; tensors below ``stack/layers`` and ``stack/mhc_*``
hold all layers, stacked on axis 0. Linear kernels are [in, out].
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from needle_export.checkpoint.dimensions import COND_RANK, Geometry, HeadGeometry
from needle_export.errors import BadInput

BLOCK = "stack/layers/block"
ATTENTION = f"{BLOCK}/self_attn"
MLP = f"{BLOCK}/hadamard_mlp"

ROLES = ("routing", "content", "memory", "mixing", "lanes", "vocabulary", "heads", "norms")
"""What weights are for; the byte ledger sums by these.

routing decides where to look (q, k), content what may be written (v, gate, out), memory is the engram,
mixing the Monarch MLP, lanes the hyper-connections, vocabulary the tied embedding, heads the probes.
"""

_ATTENTION_ROLES = {
    "q_proj": "routing", "k_proj": "routing", "q_taps": "routing", "k_taps": "routing",
    "v_proj": "content", "gate_proj": "content", "out_proj": "content", "v_taps": "content",
    "q_norm": "norms", "k_norm": "norms",
}


def tensor_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this geometry must have, with its shape, in a stable order.

    Tensors that may be missing are in ``optional_shapes``.
    """
    g = geometry
    layers, d, n = g.num_layers, g.d_model, g.mhc_lanes
    q_width, k_width = g.num_heads * g.qk_head_dim, g.num_kv_heads * g.qk_head_dim
    v_width, o_width = g.num_kv_heads * g.v_head_dim, g.num_heads * g.v_head_dim
    a, b = g.hada_blocks
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/embedding": (g.vocab_size, d),
        f"{BLOCK}/ZCRMSNorm_0/scale": (layers, d),
        f"{ATTENTION}/q_proj/kernel": (layers, d, q_width),
        f"{ATTENTION}/k_proj/kernel": (layers, d, k_width),
        f"{ATTENTION}/v_proj/kernel": (layers, d, v_width),
        f"{ATTENTION}/gate_proj/kernel": (layers, d, o_width),
        f"{ATTENTION}/out_proj/kernel": (layers, o_width, d),
        f"{ATTENTION}/q_norm/scale": (layers, g.qk_head_dim),
        f"{ATTENTION}/k_norm/scale": (layers, g.qk_head_dim),
    }
    if g.qkv_conv_taps:
        for name, width in (("q_taps", q_width), ("k_taps", k_width), ("v_taps", v_width)):
            shapes[f"{ATTENTION}/{name}"] = (layers, g.qkv_conv_taps, width)
    shapes[f"{BLOCK}/attn_gate"] = (layers,)
    shapes[f"{BLOCK}/post_attn_norm/scale"] = (layers, d)
    shapes[f"{BLOCK}/pre_hada_norm/scale"] = (layers, d)
    for name in ("d1", "d2", "b2", "d3", "d4"):
        shapes[f"{MLP}/{name}"] = (layers, g.hada_n)
    for factor in ("w1", "w2", "w3"):
        shapes[f"{MLP}/{factor}a"] = (layers, a, a)
        shapes[f"{MLP}/{factor}b"] = (layers, b, b)
    shapes[f"{MLP}/cond_v"] = (layers, d, COND_RANK)
    shapes[f"{MLP}/cond_u"] = (layers, COND_RANK, g.hada_n)
    for kind, width in (("pre", n), ("post", n), ("res", n * n)):
        shapes[f"stack/mhc_phi_{kind}"] = (layers, n * d, width)
        shapes[f"stack/mhc_b_{kind}"] = (layers, n, n) if kind == "res" else (layers, n)
        shapes[f"stack/mhc_a_{kind}"] = (layers,)
    shapes["stack/final_norm/scale"] = (d,)
    for site in range(len(g.engram_layers)):
        shapes[f"engrams_{site}/embedding"] = (g.engram_tables, g.engram_slots, g.engram_sub_dim)
        shapes[f"engrams_{site}/key_proj/kernel"] = (g.engram_width, d)
        shapes[f"engrams_{site}/value_proj/kernel"] = (g.engram_width, d)
        shapes[f"engrams_{site}/taps"] = (g.engram_conv_taps, d)
    for head in g.heads:
        shapes.update(head_shapes(g, head))
    return shapes


def head_shapes(geometry: Geometry, head: HeadGeometry) -> dict[str, tuple[int, ...]]:
    """The tensors of one probe head; rows are the embedding, then every block: L + 1."""
    rows, d = geometry.num_layers + 1, geometry.d_model
    shapes: dict[str, tuple[int, ...]] = {
        f"{head.key}/probes": (rows, head.probes, d),
        f"{head.key}/gain": (rows, head.probes),
        f"{head.key}/query": (head.queries, d),
        f"{head.key}/row_bias": (head.queries, rows, head.probes),
        f"{head.key}/proj/kernel": (head.queries * d, head.out_dim),
    }
    if head.name != "embedding":
        shapes[f"{head.key}/proj/bias"] = (head.out_dim,)
    return shapes


def optional_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Tensors that belong to the family but may be missing from a file.

    The embedding head's temperature and bias only serve its training loss, and containers leave them
    out; the router's calibration was added after the first checkpoints.
    """
    names = {head.name for head in geometry.heads}
    shapes: dict[str, tuple[int, ...]] = {}
    if "embedding" in names:
        shapes["embedding_head/log_temp"] = ()
        shapes["embedding_head/bias"] = ()
    if "router" in names:
        shapes["router_head/calibration"] = (3,)
    return shapes


def layer_axis(name: str) -> int | None:
    """The axis of a tensor that runs over layers (or over the L + 1 rows of a probe head), or None."""
    if name.startswith("stack/") and name != "stack/final_norm/scale":
        return 0
    if is_probe_rows(name):
        return 1 if name.endswith("/row_bias") else 0
    return None


def is_probe_rows(name: str) -> bool:
    """Whether a tensor has one entry for each of the L + 1 rows a probe head looks at."""
    head, _, leaf = name.partition("/")
    return head.endswith("_head") and leaf in ("probes", "gain", "row_bias")


def check_tensors(geometry: Geometry, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compares a file's tensors with what the geometry implies; ``mtp_*`` tensors don't count.

    Raises:
        BadInput: naming the first tensor that is missing, misshapen or unknown.
    """
    expected, optional = tensor_shapes(geometry), optional_shapes(geometry)
    for name, shape in expected.items():
        if name not in found:
            raise BadInput("the tensor is missing", where=name,
                           fix="the file is incomplete or its config belongs to another model")
        if tuple(found[name]) != shape:
            raise BadInput(f"the shape is {list(found[name])}, but the config makes it {list(shape)}",
                           where=name)
    for name, shape in found.items():
        if name in expected or is_ignored(name):
            continue
        if name not in optional:
            raise BadInput("this tensor has no place in a Needle 3 model", where=name,
                           fix="give a plain Needle 3 checkpoint")
        if tuple(shape) != optional[name]:
            raise BadInput(f"the shape is {list(shape)} instead of {list(optional[name])}", where=name)


def is_ignored(name: str) -> bool:
    """Whether a tensor serves training only (multi-token prediction)."""
    return name.startswith("mtp_")


def role_of(tensor_name: str) -> str:
    """The role, one of ``ROLES``, of a tensor by its name; a ``#layer`` suffix is allowed.

    Raises:
        KeyError: for a name outside the family.
    """
    parts = tensor_name.partition("#")[0].split("/")
    top, leaf = parts[0], parts[-1]
    if top == "embedding":
        return "vocabulary"
    if top.startswith("engrams_"):
        return "memory"
    if top.endswith("_head"):
        return "heads"
    if top == "stack" and len(parts) > 1:
        if leaf == "scale":
            return "norms"
        if parts[1].startswith("mhc_"):
            return "lanes"
        if "hadamard_mlp" in parts:
            return "mixing"
        if leaf == "attn_gate":
            return "content"
        if "self_attn" in parts[:4]:
            return _ATTENTION_ROLES[parts[4]]
    raise KeyError(tensor_name)


def parameter_count(geometry: Geometry, trained: bool = True) -> int:
    """Parameters of the model; ``trained=False`` adds what a container also stores.

    That is the two permutation vectors of length N and the list of probe heads.
    """
    count = sum(math.prod(shape) for shape in tensor_shapes(geometry).values())
    return count if trained else count + 2 * geometry.hada_n + len(geometry.heads)
