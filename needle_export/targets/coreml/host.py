"""What a host computes for a Needle package in Core ML: n-gram rows, slots, masks, and how a prompt is cut.

Needs numpy only, and the JSON that rides in the package under ``needle.contract``. This file lies beside every package;
NeedleHost.swift does the same. A step is::

    host = Host(json.loads(model.user_defined_metadata["needle.contract"]))
    for count, bucket in host.plan(len(prompt)):
        chunk, prompt = prompt[:count], prompt[count:]
        outputs = function_for(bucket).predict(host.inputs(chunk, bucket), state)
        host.advance(chunk)

``function_for(1)`` is ``decode``, others are ``prefill_<bucket>``. In a package without states (iOS 17) the host keeps
the caches as well: ``host.inputs`` then holds them, and ``host.keep(outputs, count)`` comes before ``advance``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Multiplier of the n-gram hash, which is 32-bit FNV-1a.
PRIME = 0x01000193

#: A tail of a prompt that fills less than this share of the smallest fitting bucket is decoded token by token.
TAIL_SHARE = 8


class Host:
    """One sequence.

    Args:
        contract: of the package, decoded.
        real: dtype of masks and other floating-point inputs, as the package wants it.
    """

    def __init__(self, contract: Mapping[str, Any], real: Any = None) -> None:
        self.contract = contract
        self.context, self.vocab = int(contract["context"]), int(contract["vocab"])
        self.buckets = sorted(int(b) for b in contract["buckets"])
        self.rows, self.ring, self.align = (int(contract[k]) for k in ("rows", "ring", "align"))
        self.stateful = bool(contract["stateful"])
        self.real = np.dtype(real or contract.get("real", "float16"))
        self.caches: dict[str, NDArray[Any]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = 0
        self.history = np.zeros(max([1, *self.contract["ngrams"].get("orders", ())]) - 1, np.int64)
        if not self.stateful:
            ports = {s["port"]: s["shape"] for s in self.contract["state"] if s["port"]}
            self.caches = {name: np.zeros(shape, self.real) for name, shape in ports.items()}

    def plan(self, count: int) -> list[tuple[int, int]]:
        """How ``count`` tokens are read from here: (tokens, bucket) in order; bucket 1 is ``decode``.

        A chunk is one write into a cache: it starts where a whole row of keys starts, ends within a full cache, and
        doesn't run over a ring's end. Where no bucket fits, a token is decoded.
        """
        steps: list[tuple[int, int]] = []
        at = self.position
        while count:
            fitting = [b for b in self.buckets if self._fits(at, b)]
            whole = [b for b in fitting if b >= count]
            if not fitting or count == 1 or (whole and count * TAIL_SHARE <= whole[0]):
                take, bucket = 1, 1
            else:
                bucket = whole[0] if whole else fitting[-1]
                take = min(count, bucket)
            steps.append((take, bucket))
            at += take
            count -= take
        return steps

    def _fits(self, at: int, bucket: int) -> bool:
        if not self.stateful:
            return True
        return (
            at % self.align == 0
            and (not self.rows or at + bucket <= self.rows)
            and (not self.ring or at % self.ring + bucket <= self.ring)
        )

    def inputs(self, tokens: Sequence[int] | NDArray[Any], bucket: int) -> dict[str, NDArray[Any]]:
        """Inputs of one call with up to ``bucket`` tokens; those behind are padding."""
        padded = np.zeros(bucket, np.int32)
        padded[: len(tokens)] = tokens
        given: dict[str, NDArray[Any]] = {
            "tokens": padded,
            "position": np.array([self.position], np.int32),
        }
        if bucket > 1:
            given["count"] = np.array([len(tokens)], np.int32)
        if self.stateful:
            given["slots"] = np.array([self.position, self.position % self.ring if self.ring else 0], np.int32)
        if self.rows:
            given["mask"] = self._mask(self._full(bucket))
        if self.ring:
            given["ring_mask"] = self._mask(self._rings(bucket))
        if self.contract["ngrams"]:
            given["ngram_rows"], given["ngram_valid"] = self.ngrams(padded)
        return {**given, **self.caches}

    def _mask(self, seen: NDArray[np.bool_]) -> NDArray[Any]:
        return np.where(seen, 0.0, float(self.contract["masked"])).astype(self.real)

    def _full(self, bucket: int) -> NDArray[np.bool_]:
        """Which rows of a full cache each new token sees, [T, S], or [T, S + T] where new rows lie behind it."""
        queries = self.position + np.arange(bucket)[:, None]
        rows = np.arange(self.rows)[None]
        if self.stateful:
            return np.asarray(rows <= queries)
        new = self.position + np.arange(bucket)[None]
        return np.concatenate([np.broadcast_to(rows < self.position, (bucket, self.rows)), new <= queries], 1)

    def _rings(self, bucket: int) -> NDArray[np.bool_]:
        """Which rows of a ring each new token sees, [T, W], or [T, W + T] where new rows lie behind it."""
        size, queries = self.ring, self.position + np.arange(bucket)[:, None]
        rows = np.arange(size)[None]
        if self.stateful and bucket == 1:
            return np.asarray((rows <= self.position) | (self.position >= size))
        last = self.position - 1
        held = last - (last - rows) % size
        new = self.position + np.arange(bucket)[None]
        old = (held >= 0) & (queries - held < size)
        return np.concatenate([np.broadcast_to(old, (bucket, size)), (new <= queries) & (queries - new < size)], 1)

    def ngrams(self, tokens: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Rows of the n-gram tables, [T, N], and 0 where an n-gram would begin before the start, [T, N]."""
        facts = self.contract["ngrams"]
        seeds, orders = np.asarray(facts["seeds"], np.uint64), facts["orders"]
        heads = len(seeds) // len(orders)
        known = np.concatenate([self.history, tokens.astype(np.int64)]).astype(np.uint64)
        start = len(self.history)
        at = self.position + np.arange(len(tokens))
        rows, valid = [], []
        for index, order in enumerate(orders):
            acc = np.broadcast_to(seeds[index * heads : (index + 1) * heads], (len(tokens), heads)).copy()
            for back in range(order):
                token = known[start - back : start - back + len(tokens), None]
                acc = ((acc ^ token) * np.uint64(PRIME)) & np.uint64(0xFFFFFFFF)
            acc ^= acc >> np.uint64(15)
            rows.append(acc % np.uint64(facts["slots"]))
            valid.append(np.repeat((at >= order - 1)[:, None], heads, axis=1))
        return np.concatenate(rows, 1).astype(np.int32), np.concatenate(valid, 1).astype(self.real)

    def keep(self, outputs: Mapping[str, NDArray[Any]], count: int) -> None:
        """Write what a call of a package without states gave into the caches."""
        at = self.position + np.arange(count)
        for s in self.contract["state"]:
            if s["kind"] in ("keys", "values"):
                held = self.caches[s["port"]]
                held[:, at % s["rows"]] = outputs[f"{s['name']}_rows"][:, :count]
        for port in {s["port"] for s in self.contract["state"] if s["kind"] in ("taps", "engram")}:
            self.caches[port][...] = outputs[f"{port}_next"]

    def advance(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """The tokens of a call are behind us."""
        known = np.concatenate([self.history, np.asarray(tokens, np.int64)])
        self.history = known[len(known) - len(self.history) :]
        self.position += len(tokens)
