"""State in the reference's layout: which rows are cut off, which axes change places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from needle_export.targets.tflite.state import reference_state

GROUPS, ROWS, WIDTH = 2, 4, 3


def loop(position: int) -> Any:
    cache = np.arange(GROUPS * ROWS * WIDTH, dtype=np.float32).reshape(GROUPS, ROWS, WIDTH)
    return SimpleNamespace(
        position=position,
        heads=(),
        inputs={
            "tokens": np.zeros(1, np.int32),
            "position": np.zeros(1, np.int32),
            "k_00": cache,
            "v_00": -cache,
            "taps_00": np.arange(6, dtype=np.float32).reshape(2, 3),
            "token_history": np.array([7, 9], np.int32),
        },
        state=[
            {"name": "k_00", "kind": "keys"},
            {"name": "v_00", "kind": "values"},
            {"name": "taps_00", "kind": "history"},
            {"name": "token_history", "kind": "tokens"},
        ],
    )


@pytest.mark.parametrize(("position", "rows"), [(0, 0), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_caches_are_cut_to_the_rows_in_use_and_have_them_first(position, rows):
    one = loop(position)
    found = reference_state(one)
    assert list(found) == ["k_00", "v_00", "taps_00", "token_history"]
    assert found["k_00"].shape == (rows, GROUPS, WIDTH)
    for row in range(rows):
        for group in range(GROUPS):
            assert (found["k_00"][row, group] == one.inputs["k_00"][group, row]).all()
    assert (found["v_00"] == -found["k_00"]).all()


def test_histories_stay_as_they_are_and_tokens_are_wide():
    one = loop(2)
    found = reference_state(one)
    assert (found["taps_00"] == one.inputs["taps_00"]).all() and found["taps_00"].dtype == np.float32
    assert found["token_history"].tolist() == [7, 9] and found["token_history"].dtype == np.int64


@pytest.mark.parametrize("position", [3, 4, 9])
def test_what_is_handed_out_does_not_change_with_the_loop(position):
    one = loop(position)
    found = reference_state(one)
    before = {name: value.copy() for name, value in found.items()}
    for array in one.inputs.values():
        array[...] = 99
    assert all((found[name] == before[name]).all() for name in before)
