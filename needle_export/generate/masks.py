"""Which tokens a state of an automaton admits: the vocabulary's bytes as a trie, walked for all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from needle_export.generate.automaton import Automaton


class Masks:
    """Masks over a vocabulary by state; each is computed once.

    Args:
        automaton: whose states they are of.
        pieces: the bytes of each token; a token without bytes is never admitted.
    """

    def __init__(self, automaton: Automaton, pieces: Sequence[bytes]) -> None:
        raise NotImplementedError

    def admitted(self, state: int) -> NDArray[np.bool_]:
        """Which tokens [V] the automaton admits as a whole in a state."""
        raise NotImplementedError
