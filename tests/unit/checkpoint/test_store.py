"""Tensors made on access."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from needle_export.checkpoint.store import Entry, TensorStore, as_store


def counting(array: np.ndarray) -> tuple[Callable[[], np.ndarray], list[int]]:
    calls: list[int] = []

    def make() -> np.ndarray:
        calls.append(1)
        return array.copy()

    return make, calls


def test_arrays_are_made_on_access_and_shared_while_in_use() -> None:
    make, calls = counting(np.ones((2, 3), np.float16))
    store = TensorStore({"a": Entry((2, 3), "float16", "float16", make)})
    assert store.shapes() == {"a": (2, 3)} and "a" in store and list(store) == ["a"] and len(store) == 1
    assert calls == []
    held = store["a"]
    assert store["a"] is held and len(calls) == 1 and not held.flags.writeable
    del held
    gc.collect()
    assert store["a"].sum() == 6 and len(calls) == 2


def test_a_broken_promise_is_caught() -> None:
    store = TensorStore({"a": Entry((3,), "float16", "float16", lambda: np.ones(3, np.float32)),
                         "b": Entry((4,), "float32", "float32", lambda: np.ones(3, np.float32))})
    for name in ("a", "b"):
        with pytest.raises(AssertionError, match="promised"):
            store[name]
    with pytest.raises(KeyError):
        store["c"]


def test_replacing_and_wrapping() -> None:
    arrays = {"a": np.zeros(2, np.float32), "b": np.ones((), np.float16)}
    store = as_store(arrays)
    assert as_store(store) is store and store.entry("b").stored == "float16"
    changed = store.replaced({"a": None, "c": Entry((1,), "float32", "x", lambda: np.ones(1, np.float32))})
    assert list(changed) == ["b", "c"] and list(store) == ["a", "b"]
    assert changed["c"][0] == 1 and changed["b"] == 1
    assert arrays["a"].flags.writeable, "the caller's own array stays writable"
    assert not store["a"].flags.writeable
