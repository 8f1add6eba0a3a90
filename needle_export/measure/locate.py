"""Where an artifact leaves the reference: block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.measure.parity import Case, Tokens


class InnerRunner(Protocol):
    """A runner that shows the streams between blocks."""

    max_chunk: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: Tokens) -> Any:
        """Append tokens."""

    def streams(self) -> dict[int, NDArray[np.float32]]:
        """Streams of the last call."""


def locate(
    runner: InnerRunner,
    streams_of: Callable[[Tokens, int], Sequence[NDArray[np.float32]]],
    case: Case,
    tolerance: float,
) -> str:
    """Run an artifact with its streams shown, and say where they first differ from the reference's.

    Args:
        streams_of: the reference's stream behind each block [T, n, C], of so many first tokens at least.
    """
    # One call each: a runner shows the streams of its last call.
    first = min(case.prompt, runner.max_chunk)
    streams = streams_of(case.tokens, first + 1)
    for phase, at in (("prefill", slice(0, first)), ("decode", slice(first, first + 1))):
        if phase == "prefill":
            runner.reset()
        runner.feed(case.tokens[at])
        found = runner.streams()
        for index, stream in enumerate(streams):
            want = stream[at]
            if index not in found:
                continue
            span = max(1.0, float(np.abs(want).max()))
            worst = float(np.abs(found[index].reshape(want.shape) - want).max()) / span
            # Written so that NaN counts as a deviation.
            if not worst <= tolerance:
                return f"in {phase}, block {index} (by {worst:.1e} of the stream's range)"
    return "behind the last block that shows its stream: in the last block, the final norm or the head"
