"""One sequence over a package, whoever runs its functions: how tokens become calls, and states the reference's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import UsageError
from needle_export.targets.base import Floats, Tokens
from needle_export.targets.coreml.host import Host


class Sequence(ABC):
    """What is the same in every runtime; a subclass makes the calls and holds the states.

    Args:
        contract: of the package, decoded.
        real: type of masks and caches; None takes what the package wants.
    """

    def __init__(self, contract: Mapping[str, Any], real: Any = None) -> None:
        self.host = Host(contract, real)
        self.context = self.host.context
        self.max_chunk = max(self.host.buckets, default=1)

    def reset(self) -> None:
        """Forget the sequence."""
        self.host.reset()
        self._forget()

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]; logits [T, V].

        Raises:
            UsageError: they don't fit into the context.
        """
        if self.host.position + len(tokens) > self.context:
            raise UsageError(
                f"{self.host.position + len(tokens)} tokens don't fit in a context of {self.context}",
                fix="build with a larger --context",
            )
        parts, start = [], 0
        for count, bucket in self._plan(len(tokens)):
            chunk = tokens[start : start + count]
            results = self._call(bucket, self.host.inputs(chunk, bucket))
            if not self.host.stateful:
                self.host.keep(results, count)
            self.host.advance(chunk)
            parts.append(np.asarray(results["logits"][:count], np.float32))
            start += count
        return np.concatenate(parts) if parts else np.zeros((0, self.host.vocab), np.float32)

    def state(self) -> dict[str, NDArray[Any]]:
        """State by name in the reference's layout: caches [rows in use, G, D], histories [R, C]."""
        held: dict[str, NDArray[np.float32]] = {}
        found: dict[str, NDArray[Any]] = {}
        for s in self.host.contract["state"]:
            if s["kind"] == "tokens":
                found[s["name"]] = self.host.history.copy()
                continue
            port = s["port"]
            if port not in held:
                held[port] = np.asarray(self._held(port) if self.host.stateful else self.host.caches[port], np.float32)
            value = held[port]
            if s["kind"] in ("keys", "values"):
                groups = value.shape[0]
                rows = value.reshape(groups, -1, s["width"])[:, : min(self.host.position, s["rows"])]
                found[s["name"]] = np.ascontiguousarray(rows.swapaxes(0, 1))
            else:
                found[s["name"]] = (value[s["index"]] if s["index"] >= 0 else value).copy()
        return found

    def _plan(self, count: int) -> list[tuple[int, int]]:
        """How tokens are read: (tokens, bucket) in order."""
        return self.host.plan(count)

    @abstractmethod
    def _call(self, bucket: int, given: dict[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Run the function of a bucket once; its outputs by name."""

    @abstractmethod
    def _held(self, port: str) -> NDArray[Any]:
        """A state as the runtime keeps it, of a package with states."""

    @abstractmethod
    def _forget(self) -> None:
        """Set the runtime's states to zero."""
