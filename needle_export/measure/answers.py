"""How good answers are: counts over queries whose right calls are known, and how sure such shares are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from needle_export.generate.assistant import Answer
from needle_export.generate.calls import Call, same_calls

#: Of the normal distribution, between -Z and Z of which lie 95 %.
Z = 1.959963984540054


@dataclass
class Tally:
    """Counts of answers.

    Attributes:
        queries: all of them.
        exact: the calls are the right ones, in the same order, with arguments equal as JSON values.
        names: the tools called are the right ones, in the same order, whatever the arguments.
        to_nothing: queries that call for nothing.
        nothing: answers that call nothing.
        rightly_nothing: both.
        invalid: ended, and aren't valid calls of the tools.
        cut: reached a limit before they ended.
    """

    queries: int = 0
    exact: int = 0
    names: int = 0
    to_nothing: int = 0
    nothing: int = 0
    rightly_nothing: int = 0
    invalid: int = 0
    cut: int = 0

    def add(self, right: Sequence[Call], answer: Answer) -> None:
        """Count an answer; one that was cut calls nothing that counts, whatever its beginning says."""
        calls = answer.calls if answer.finished else None
        self.queries += 1
        self.exact += same_calls(right, calls)
        self.names += calls is not None and [c.name for c in calls] == [c.name for c in right]
        self.to_nothing += not right
        self.nothing += calls is not None and not calls
        self.rightly_nothing += not right and calls is not None and not calls
        self.invalid += answer.finished and (calls is None or bool(answer.problem))
        self.cut += not answer.finished


@dataclass
class Agreement:
    """Counts of an artifact's answers beside the float reference's.

    Attributes:
        queries: all of them.
        calls: both call the same; of two that aren't calls, the tokens are the same.
        tokens: every token is the same.
    """

    queries: int = 0
    calls: int = 0
    tokens: int = 0

    def add(self, answer: Answer, reference: Answer) -> None:
        """Count a pair of answers to one query."""
        tokens = answer.tokens == reference.tokens and answer.finished == reference.finished
        both = answer.finished and reference.finished
        self.queries += 1
        self.calls += tokens or (both and same_calls(answer.calls, reference.calls))
        self.tokens += tokens


def wilson(count: int, of: int) -> tuple[float, float]:
    """Ends of the 95 % interval of a share, after Wilson (1927): honest near 0 and 1 and for few.

    With p = count / n and z of the normal distribution: (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n).

    Raises:
        ValueError: nothing was counted.
    """
    if of < 1 or not 0 <= count <= of:
        raise ValueError(f"{count} of {of} is no share")
    share, square = count / of, Z * Z / of
    middle = (share + square / 2) / (1 + square)
    reach = Z * math.sqrt(share * (1 - share) / of + square / (4 * of)) / (1 + square)
    # Exactly at the ends, where rounding would leave some dust.
    low, high = middle - reach, middle + reach
    return (0.0 if count == 0 else max(0.0, low)), (1.0 if count == of else min(1.0, high))
