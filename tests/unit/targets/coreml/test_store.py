"""A weight that half precision can't hold is refused by name, in every scheme that would store it so."""

from __future__ import annotations

import pytest
import torch

from needle_export.config.rules import Rules
from needle_export.errors import Unsupported
from needle_export.graph.program import Part, Weight

pytest.importorskip("coremltools")


def weight(value: float, *sizes: int) -> Weight:
    data = torch.zeros(sizes)
    data[..., 0] = value
    return Weight("net.some", data, (Part("stack/some", "mixing", 3, data.numel()),))


@pytest.mark.parametrize("scheme", ["fp16", "int8", "int4", "palette4"])
def test_a_matrix_beyond_half_precision(scheme: str) -> None:
    from needle_export.targets.coreml.store import WeightStore

    large = weight(1e9, 128, 128)
    with pytest.raises(Unsupported) as refused:
        WeightStore(Rules(scheme), True).matrix(large, large.value.numpy())
    assert refused.value.where == "stack/some" and "beyond half precision" in refused.value.what
    assert refused.value.fix == "build with --weights fp32" and refused.value.exit_code == 5


def test_a_vector_beyond_half_precision() -> None:
    from needle_export.targets.coreml.store import WeightStore

    # The largest half is 65,504; from 65,520 on a number rounds to infinity.
    large = weight(65520.0, 4)
    with pytest.raises(Unsupported, match="a value is beyond half precision"):
        WeightStore(Rules("fp16"), True).plain(large, large.value.numpy())
