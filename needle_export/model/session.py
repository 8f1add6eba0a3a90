"""The reference as a decoding session: what an artifact's runner does, by the cached step in float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needle_export.errors import UsageError
from needle_export.model.network import Needle
from needle_export.model.state import empty_state, state_specs

#: Longest chunk of a prompt; a ring shortens it to its own length.
MAX_CHUNK = 128

Saved = tuple[int, dict[str, Tensor]]
"""A place to come back to: position and state."""


class ReferenceSession:
    """One sequence in the reference model.

    Args:
        net: the model, at the depth asked for.
        context: positions that the caches hold.
        threads: of torch while it runs.

    Raises:
        UsageError: the model can't have such a context.
    """

    def __init__(self, net: Needle, context: int, threads: int = 1) -> None:
        self.net = net
        self.context = context
        self.threads = threads
        self._specs = state_specs(net.geometry, context)
        self.max_chunk = min([context, MAX_CHUNK, *(s.shape[0] for s in self._specs if s.ring)])
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = 0
        self._state = empty_state(self._specs)

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V].

        Raises:
            UsageError: they don't fit into the context.
        """
        if self.position + len(tokens) > self.context:
            raise UsageError(f"{self.position + len(tokens)} tokens don't fit in a context of {self.context}",
                             fix="build with a larger --context")
        parts = [np.zeros((0, self.net.geometry.head_vocab), np.float32)]
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            parts += self._chunks(tokens)
        finally:
            torch.set_num_threads(before)
        return np.concatenate(parts)

    def _chunks(self, tokens: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        with torch.inference_mode():
            for start in range(0, len(tokens), self.max_chunk):
                chunk = torch.from_numpy(np.array(tokens[start : start + self.max_chunk], np.int64))
                logits, self._state = self.net.step(chunk, torch.tensor([self.position]), self._state, self.context)
                self.position += len(chunk)
                yield logits.numpy()

    def save(self) -> Saved:
        """The sequence so far; a step makes new tensors and changes none, so nothing is copied."""
        return self.position, self._state

    def restore(self, saved: Saved) -> None:
        """Go back to a sequence that was saved here."""
        self.position, self._state = saved
