"""The numbers of a model, their rules, and how a saved configuration gives them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from needle_export.checkpoint.geometry import (
    PUBLISHED,
    ROLES,
    SMALL,
    Geometry,
    HeadGeometry,
    geometry_from_config,
    optional_shapes,
    parameter_count,
    role_of,
    tensor_shapes,
)
from needle_export.checkpoint.layout import check_tensors
from needle_export.errors import BadInput
from tests.support.geometries import VARIANTS


def test_the_published_model_in_numbers() -> None:
    assert parameter_count(PUBLISHED) == 121_019_861
    assert parameter_count(PUBLISHED, trained=False) == 121_021_910
    assert (PUBLISHED.hada_n, PUBLISHED.hada_blocks) == (1024, (32, 32))
    assert (PUBLISHED.engram_tables, PUBLISHED.engram_width, PUBLISHED.engram_dilation) == (6, 768, 3)
    assert PUBLISHED.conv_channels == 576 + 96 + 128
    assert PUBLISHED.head_vocab == 8192
    tables = sum(math.prod(shape) for name, shape in tensor_shapes(PUBLISHED).items()
                 if name.startswith("engrams_") and name.endswith("embedding"))
    assert tables == 70_778_880


def test_small_has_every_mechanism() -> None:
    assert SMALL.hada_n == 128 != SMALL.d_model
    assert SMALL.global_layers == (SMALL.num_layers - 1,) and SMALL.sliding_window == 16
    assert SMALL.engram_layers and SMALL.qkv_conv_taps and SMALL.heads
    assert (SMALL.qk_head_dim, SMALL.v_head_dim) == (48, 64)


@pytest.mark.parametrize("geometry", [PUBLISHED, *VARIANTS.values()])
def test_config_round_trip(geometry: Geometry) -> None:
    geometry.validate()
    config = json.loads(json.dumps(geometry.to_config()))
    assert geometry_from_config(config, tensor_shapes(geometry)) == geometry
    assert json.loads(json.dumps(geometry.as_dict()))["hada_n"] == geometry.hada_n


@pytest.mark.parametrize("layers", range(1, 25))
def test_depths(layers: int) -> None:
    published = PUBLISHED.with_layers(layers)
    assert published.engram_layers == tuple(i for i in range(layers) if i % 4 == 3)
    assert published.global_layers == tuple(i for i in range(layers) if i % 5 == 4)
    small = SMALL.with_layers(layers)
    assert small.num_layers == layers
    assert small.engram_layers == tuple(range(1, layers, 2))


@pytest.mark.parametrize("layers", [0, -1, 2000])
def test_impossible_depths(layers: int) -> None:
    with pytest.raises(BadInput, match="num_layers"):
        SMALL.with_layers(layers)


@pytest.mark.parametrize(("field", "value"), [
    ("vocab_size", 0), ("vocab_size", 1 << 30), ("out_vocab", 257), ("out_vocab", -1), ("d_model", 1),
    ("num_heads", 0), ("num_heads", 5), ("num_kv_heads", 3), ("num_layers", 0), ("qk_head_dim", 47),
    ("qk_head_dim", 0), ("v_head_dim", 0), ("max_seq_len", 0), ("rope_theta", 0.0),
    ("rope_theta", float("nan")), ("rope_theta", float("inf")), ("mhc_lanes", 0), ("mhc_lanes", 65),
    ("sliding_window", -1), ("global_layers", (3,)), ("global_layers", (1, 0)), ("global_layers", (-1,)),
    ("qkv_conv_taps", -1), ("engram_orders", ()), ("engram_orders", (0,)), ("engram_orders", (17,)),
    ("engram_heads", 0), ("engram_slots", 0), ("engram_slots", 1 << 31), ("engram_sub_dim", 25),
    ("engram_seed_heads", -1), ("engram_layers", (0, 0)), ("engram_layers", (3,)), ("ladder_order", (0, 1)),
    ("ladder_order", (0, 1, 1)), ("kv_window", -1), ("kv_bits", 17), ("pad_token_id", 256),
    ("heads", (HeadGeometry("mood", 1, 1, 1),)), ("heads", (HeadGeometry("router", 1, 1, 2),)),
    ("heads", (HeadGeometry("router", 1, 1, 3), HeadGeometry("confidence", 1, 1, 1))),
    ("heads", (HeadGeometry("embedding", 0, 1, 1),)),
])
def test_validation_names_the_field(field: str, value: Any) -> None:
    expected = {"num_heads": "num_kv_heads|num_heads", "heads": "heads|mood|router|embedding_probes"}
    with pytest.raises(BadInput, match=expected.get(field, field)):
        dataclasses.replace(SMALL, **{field: value}).validate()


@pytest.mark.parametrize(("field", "value"), [
    ("vocab_size", "256"), ("d_model", 96.0), ("num_layers", None), ("num_layers", True), ("kv_bits", []),
    ("rope_theta", "1e5"), ("rope_theta", True), ("rope_theta", 10**400), ("global_layers", 2),
    ("global_layers", [2.0]), ("global_layers", [-1]), ("engram_layers", "1"), ("engram_orders", [[2]]),
    ("engram_orders", []), ("ladder_widths", 48), ("ladder_order", [0, 1, "2"]), ("d_model", 0),
    ("num_heads", 0), ("num_heads", -4), ("engram_heads", -1), ("num_layers", 10**12),
    ("confidence_probes", 0), ("embedding_dim", "x"),
])
def test_config_types_are_checked(field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=field):
        geometry_from_config(SMALL.to_config() | {field: value}, tensor_shapes(SMALL))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(BadInput) as caught:
        geometry_from_config(SMALL.to_config() | {"d_model": "x" * 10000}, {})
    assert len(caught.value.sentence) < 200


def test_omitted_fields() -> None:
    geometry = geometry_from_config({}, {})
    assert (geometry.vocab_size, geometry.d_model, geometry.num_layers) == (16384, 768, 20)
    assert geometry.engram_layers == (3, 7, 11, 15, 19) and geometry.mhc_lanes == 4
    # Late fields mean "off", and head widths then share d_model evenly.
    assert (geometry.sliding_window, geometry.global_layers, geometry.qkv_conv_taps) == (0, (), 0)
    assert (geometry.qk_head_dim, geometry.v_head_dim) == (64, 64)
    assert geometry.engram_heads == 3 and geometry.heads == ()


def test_unknown_fields_and_surplus_global_layers_are_ignored() -> None:
    config = SMALL.to_config() | {"dtype": "bfloat16", "weight_bits": "", "novelty": [1], "attn_dim": 3,
                                  "global_layers": [2, 4, 9]}
    assert geometry_from_config(config, tensor_shapes(SMALL)) == SMALL


def test_heads_exist_when_their_tensors_do() -> None:
    shapes = tensor_shapes(VARIANTS["all_heads"])
    config = VARIANTS["all_heads"].to_config()
    some = {name: shape for name, shape in shapes.items() if not name.startswith("confidence")}
    assert [head.name for head in geometry_from_config(config, some).heads] == ["embedding", "router"]
    assert geometry_from_config(config, {}).heads == ()


@pytest.mark.parametrize("field", ["enc_layers", "languages", "mels"])
def test_other_models_are_refused(field: str) -> None:
    with pytest.raises(BadInput, match="Whistle"):
        geometry_from_config(SMALL.to_config() | {field: 1}, {})
    with pytest.raises(BadInput, match="Whistle"):
        geometry_from_config(SMALL.to_config(), {"stem/w": (1,)})
    with pytest.raises(BadInput, match="Needle 2"):
        geometry_from_config({"attn_dim": 768}, {})


def test_roles() -> None:
    by_role: dict[str, set[str]] = {role: set() for role in ROLES}
    geometry = VARIANTS["all_heads"]
    for name in tensor_shapes(geometry) | optional_shapes(geometry):
        by_role[role_of(name)].add(name.rsplit("/", 2)[-2] if name.endswith(("kernel", "scale"))
                                   else name.rsplit("/", 1)[-1])
    assert by_role["routing"] == {"q_proj", "k_proj", "q_taps", "k_taps"}
    assert by_role["content"] == {"v_proj", "gate_proj", "out_proj", "v_taps", "attn_gate"}
    assert by_role["memory"] == {"embedding", "key_proj", "value_proj", "taps"}
    assert by_role["norms"] == {"ZCRMSNorm_0", "post_attn_norm", "pre_hada_norm", "q_norm", "k_norm",
                                "final_norm"}
    assert by_role["vocabulary"] == {"embedding"}
    assert len(by_role["mixing"]) == 13 and len(by_role["lanes"]) == 9
    assert "calibration" in by_role["heads"]
    assert role_of("stack/layers/block/self_attn/q_proj/kernel#7") == "routing"
    for unknown in ("stack", "stack/x", "stack/layers/block/x", "stack/layers/block/self_attn/x", "mtp_0/x"):
        with pytest.raises(KeyError):
            role_of(unknown)


def test_check_tensors() -> None:
    shapes = dict(tensor_shapes(SMALL))
    check_tensors(SMALL, shapes | {"mtp_x": (1, 2)})
    with pytest.raises(BadInput, match=r"embedding/embedding.*missing"):
        check_tensors(SMALL, {name: shape for name, shape in shapes.items() if name != "embedding/embedding"})
    with pytest.raises(BadInput, match=r"final_norm.*shape"):
        check_tensors(SMALL, shapes | {"stack/final_norm/scale": (97,)})
    with pytest.raises(BadInput, match=r"stack/extra.*no place"):
        check_tensors(SMALL, shapes | {"stack/extra": (97,)})
    with pytest.raises(BadInput, match=r"router_head/calibration.*shape"):
        every = VARIANTS["all_heads"]
        check_tensors(every, tensor_shapes(every) | {"router_head/calibration": (4,)})
