"""Small geometries that reach what the published one doesn't; shared by several tests."""

from __future__ import annotations

import dataclasses

from needle_export.checkpoint.geometry import SMALL, Geometry, HeadGeometry

ALL_HEADS = (HeadGeometry("embedding", 2, 3, 32), HeadGeometry("confidence", 4, 4, 1),
             HeadGeometry("router", 3, 2, 3))

VARIANTS: dict[str, Geometry] = {
    "small": SMALL,
    "no_taps": dataclasses.replace(SMALL, qkv_conv_taps=0),
    "no_engram": dataclasses.replace(SMALL, engram_layers=()),
    "no_window": dataclasses.replace(SMALL, sliding_window=0, global_layers=()),
    "no_heads": dataclasses.replace(SMALL, heads=()),
    "all_heads": dataclasses.replace(SMALL, heads=ALL_HEADS),
    "out_vocab": dataclasses.replace(SMALL, out_vocab=200),
    "orders": dataclasses.replace(SMALL, engram_orders=(1, 2, 4), engram_heads=1, engram_sub_dim=32,
                                  engram_seed_heads=3),
    "odd_width": dataclasses.replace(SMALL, d_model=100, engram_heads=3, engram_sub_dim=16),
    "lanes": dataclasses.replace(SMALL, mhc_lanes=3, num_kv_heads=1, qk_head_dim=32, v_head_dim=32),
    "split": dataclasses.replace(SMALL, d_model=64, engram_sub_dim=16, split_permutations=True),
    "deep": SMALL.with_layers(7),
}
