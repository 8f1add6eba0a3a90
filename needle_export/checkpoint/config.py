"""From a checkpoint's saved configuration to a geometry.

Two kinds of omission mean different things. Fields that every version of the format had take the
default of today; fields that came later mean "the mechanism is off" when a saved configuration lacks
them, because the checkpoint was written before they existed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from needle_export.checkpoint.dimensions import (
    HEAD_NAMES,
    HEAD_OUT_DIMS,
    Geometry,
    HeadGeometry,
    default_engram_heads,
)
from needle_export.errors import BadInput

_INT_DEFAULTS = {
    "vocab_size": 16384, "d_model": 768, "num_heads": 12, "num_kv_heads": 2, "num_layers": 20,
    "max_seq_len": 4096, "pad_token_id": 0, "embedding_dim": 128,
    "embedding_probes": 4, "embedding_queries": 4, "confidence_probes": 4, "confidence_queries": 4,
    "router_probes": 4, "router_queries": 4, "engram_heads": 0, "engram_slots": 18432,
    "mhc_lanes": 4, "kv_window": 0, "kv_bits": 8,
    # Absent from a saved configuration means off, whatever a new model would get.
    "qk_head_dim": 0, "v_head_dim": 0, "sliding_window": 0, "engram_seed_heads": 0,
    "qkv_conv_taps": 0, "out_vocab": 0,
}
_TUPLE_DEFAULTS: dict[str, tuple[int, ...]] = {
    "engram_orders": (2, 3), "engram_layers": (3, 7, 11, 15, 19),
    "global_layers": (), "ladder_widths": (), "ladder_order": (),
}
_AUDIO_FIELDS = ("enc_layers", "dec_layers", "languages", "mels", "stem_stages")
_AUDIO_TENSORS = ("encoder/", "stem/", "pe_gate")


def geometry_from_config(config: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> Geometry:
    """The validated geometry of a checkpoint.

    Args:
        config: the saved configuration; fields unknown to the family are ignored.
        tensor_shapes: names and shapes of the file's tensors; a probe head exists when its tensors do.

    Raises:
        BadInput: naming the field, for a value of the wrong type or outside its range, and for a
            Needle 2 or a Whistle (audio) configuration.
    """
    _refuse_other_models(config, tensor_shapes)
    ints = {key: _int(config, key, default) for key, default in _INT_DEFAULTS.items()}
    tuples = {key: _ints(config, key, default) for key, default in _TUPLE_DEFAULTS.items()}
    theta = config.get("rope_theta", 100000.0)
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise BadInput(f"rope_theta is {_shown(theta)}, not a number", where="rope_theta")
    for key in ("d_model", "num_heads"):
        if ints[key] < 1:
            raise BadInput(f"{key} is {ints[key]}, below 1", where=key)
    orders = tuples["engram_orders"]
    if not orders:
        raise BadInput("engram_orders is empty", where="engram_orders")
    legacy_width = ints["d_model"] // ints["num_heads"]
    heads = ints["engram_heads"] or default_engram_heads(ints["d_model"], len(orders))
    if heads < 1:
        raise BadInput(f"engram_heads is {heads}, below 1", where="engram_heads")
    # Block numbers past the depth name no block: a model cut from a deeper default keeps them.
    layers = ints["num_layers"]
    geometry = Geometry(
        vocab_size=ints["vocab_size"], out_vocab=ints["out_vocab"], d_model=ints["d_model"],
        num_heads=ints["num_heads"], num_kv_heads=ints["num_kv_heads"], num_layers=layers,
        qk_head_dim=ints["qk_head_dim"] or legacy_width, v_head_dim=ints["v_head_dim"] or legacy_width,
        max_seq_len=ints["max_seq_len"], rope_theta=_as_float(theta), mhc_lanes=ints["mhc_lanes"],
        sliding_window=ints["sliding_window"],
        global_layers=tuple(sorted({layer for layer in tuples["global_layers"] if layer < layers})),
        qkv_conv_taps=ints["qkv_conv_taps"], engram_orders=orders, engram_heads=heads,
        engram_slots=ints["engram_slots"], engram_sub_dim=ints["d_model"] // (len(orders) * heads),
        engram_seed_heads=ints["engram_seed_heads"], engram_layers=tuples["engram_layers"],
        ladder_order=tuples["ladder_order"], split_permutations=bool(tuples["ladder_widths"]),
        kv_window=ints["kv_window"], kv_bits=ints["kv_bits"], pad_token_id=ints["pad_token_id"],
        heads=_heads(ints, tensor_shapes),
    )
    geometry.validate()
    return geometry


def _refuse_other_models(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    audio = [key for key in _AUDIO_FIELDS if key in config]
    audio += [name for name in shapes if name.startswith(_AUDIO_TENSORS)]
    if audio:
        raise BadInput(f"this is a Whistle (audio) model: it has {audio[0]}", where="config",
                       fix="give a Needle 3 text checkpoint")
    if "attn_dim" in config and "qk_head_dim" not in config:
        raise BadInput("this is a Needle 2 checkpoint: it has attn_dim and no qk_head_dim", where="config",
                       fix="give a Needle 3 checkpoint")


def _heads(ints: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> tuple[HeadGeometry, ...]:
    present = {name.partition("/")[0] for name in shapes}
    return tuple(
        HeadGeometry(name, ints[f"{name}_probes"], ints[f"{name}_queries"],
                     HEAD_OUT_DIMS.get(name, ints["embedding_dim"]))
        for name in HEAD_NAMES if f"{name}_head" in present)


def _int(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{key} is {_shown(value)}, not a whole number", where=key)
    return value


def _ints(config: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = config.get(key, default)
    if not isinstance(value, (list, tuple)):
        raise BadInput(f"{key} is {_shown(value)}, not a list of whole numbers", where=key)
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise BadInput(f"{key} holds {_shown(item)}, not a whole number", where=key)
        if item < 0:
            raise BadInput(f"{key} holds {item}, below 0", where=key)
    return tuple(value)


def _as_float(value: float) -> float:
    # An integer too long for a float must be reported like any other value out of range.
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
