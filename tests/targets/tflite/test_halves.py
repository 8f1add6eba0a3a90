"""What 4-bit files hold in halves beside matrices: which constants, under which names, and what stays float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("litert_converter")

from litert_converter.mlir import ir
from litert_torch.backend import export_utils

from needle_export.config.rules import Rule, Rules
from needle_export.graph.program import CONSTANT, Part, Weight
from needle_export.targets.claims import parse_name
from needle_export.targets.tflite import halves
from needle_export.targets.tflite.layouts import location, split_layout
from needle_export.targets.tflite.store import WeightStore

NORM = "stack/layers/block/ZCRMSNorm_0/scale"
VALUES = np.linspace(-2, 2, 8, dtype=np.float32)


def weight(name: str, values: np.ndarray = VALUES, folded: bool = False, role: str = "norms") -> Weight:
    return Weight(name, torch.from_numpy(values), (Part(NORM, role, 3, values.size),), folded)


@pytest.mark.parametrize(("name", "folded", "layout", "wanted"), [
    ("net.layers.3.mlp.d2", False, "flat", ("layers.3.mlp.d2", "flat")),
    ("net.layers.3.mlp.d1.cut", False, "flat", ("layers.3.mlp.d1[:,:8]", "flat")),
    ("net.layers.3.norm_in.scale.add", True, "flat", ("layers.3.norm_in.scale", "flat")),
    ("net.layers.3.pre_mlp_norm.scale.add_97", True, "flat", ("layers.3.pre_mlp_norm.scale", "flat")),
    ("net.layers.3.post_norm.scale.add_94.gated", True, "flat", ("layers.3.post_norm.scale", "flat")),
    ("net.final_norm.scale.add_501", True, "flat", ("final_norm.scale", "flat")),
    ("net.layers.3.attention.qk_norm.scaled", True, "flat", ("layers.3.attention.q_norm.scale+k_norm.scale", "each")),
    ("net.layers.3.mlp.w1a[:,:24]", False, "", ("layers.3.mlp.w1a[:,:24]", "")),
    # Whose values the reference doesn't know.
    ("net.layers.3.norm_in.scale.add_83.gated", True, "flat", None),
    ("net.layers.3.post_norm.scale.add_94", True, "flat", None),
    ("net.layers.3.attention.qk_norm", True, "flat", None),
    ("net.layers.3.mlp.d2.other", True, "flat", None),
])
def test_names(name: str, folded: bool, layout: str, wanted: tuple[str, str] | None) -> None:
    found = halves.named(weight(name, folded=folded), layout)
    assert found == wanted
    if found is not None:
        claim = parse_name(location(found[0], ""))
        # As the converter calls a second one.
        suffix = "17" if found[1] else ""
        named, how = split_layout(location(*found) + suffix)
        assert how == found[1] and parse_name(named) == claim


def stored(rules: Rules, given: Weight, values: np.ndarray) -> tuple[str, str, bool]:
    """How a store holds a vector: dtype, reason, and whether its halves are what an op reads."""
    with export_utils.create_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            store = WeightStore(rules)
            store.plain(given, values)
    (found,) = store.stored.values()
    return found.dtype, found.kept_float, found.as_read


D2 = "net.layers.3.mlp.d2"


def test_which_vectors_are_halves() -> None:
    four = Rules("int4")
    assert stored(four, weight(D2), VALUES) == ("float16", halves.VECTOR, True)
    for scheme in ("fp16", "int8"):
        dtype, reason, as_read = stored(Rules(scheme), weight(D2), VALUES)
        assert (dtype, as_read) == ("float32", False) and reason.startswith("small")
    assert stored(Rules("fp32"), weight(D2), VALUES) == ("float32", "", False)
    # By its own rule, in a file of another.
    assert stored(Rules("int8", (Rule("norms", "int4"),)), weight(D2), VALUES)[0] == "float16"
    assert stored(Rules("int4", (Rule("norms", "int8"),)), weight(D2), VALUES)[0] == "float32"
    assert stored(four, weight("net.frequencies", role=CONSTANT), VALUES) == ("float32", halves.FOLDED, False)
    assert stored(four, weight("net.x", folded=True), VALUES) == ("float32", halves.FOLDED, False)
    assert stored(four, weight("heads.confidence.gain", VALUES.reshape(2, 4)), VALUES)[1] == halves.HEAD


def test_what_halves_cannot_hold_stays_float32() -> None:
    large = VALUES.copy()
    large[3] = 65520
    assert stored(Rules("int4"), weight(D2, large), large) == ("float32", halves.LARGE, False)
    large[3] = 65504
    assert stored(Rules("int4"), weight(D2, large), large)[0] == "float16"
