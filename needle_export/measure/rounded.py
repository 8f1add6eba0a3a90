"""What rounding every op to its declared type costs, by running an artifact whose runtime can do both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import VerificationFailed
from needle_export.measure.parity import Case, finite, kl, sqnr_db

#: Forced decode steps after the shortest prompt.
STEPS = 24

#: Ops that are named in the report.
_NAMED = 5


class Finding(Protocol):
    """Elements that an op made and that are no numbers any more."""

    @property
    def op_name(self) -> str:
        """Of the op."""

    @property
    def function(self) -> str:
        """That it is in."""

    @property
    def kind(self) -> str:
        """``overflow``, ``nan`` or ``underflow``."""

    @property
    def count(self) -> int:
        """Of elements."""


class RoundedSession(Protocol):
    """A runner that rounds as it goes and says what got lost."""

    @property
    def findings(self) -> Iterable[Finding]:
        """Of all calls so far."""

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V]."""


def measure_rounded(session: RoundedSession, case: Case, advance: Callable[[int], None]) -> dict[str, Any]:
    """Run a prompt and up to ``STEPS`` forced tokens behind it, and compare with the reference.

    Args:
        case: with all logit columns.
        advance: is told of each step.

    Returns:
        ``max_abs``, ``sqnr_db``, ``kl``, ``steps``, ``argmax_equal``: of the forced steps against the reference, or of
        the prompt where there are none.

    Raises:
        VerificationFailed: a value overflowed or became NaN; names the ops.
    """
    end = min(len(case.tokens), case.prompt + STEPS)
    session.reset()
    prompt = session.feed(case.tokens[: case.prompt])
    steps = []
    for index in range(case.prompt, end):
        steps.append(session.feed(case.tokens[index : index + 1]))
        advance(1)
    lost: Counter[str] = Counter()
    for finding in session.findings:
        if finding.kind != "underflow":
            lost[f"{finding.kind} in {finding.function}: {finding.op_name}"] += finding.count
    if lost:
        named = "; ".join(f"{where} ({count} elements)" for where, count in lost.most_common(_NAMED))
        more = f"; and {len(lost) - _NAMED} more ops" if len(lost) > _NAMED else ""
        raise VerificationFailed(f"half precision isn't enough: {named}{more}", fix="build with --weights fp32")
    # Where the context has no room behind the prompt, the prompt itself is what there is.
    first = case.prompt if steps else 0
    got, want = np.concatenate(steps or [prompt]), case.logits[first:end]
    error = float(((got - want).astype(np.float64) ** 2).sum())
    signal = float((want.astype(np.float64) ** 2).sum())
    return {
        "max_abs": float(np.abs(got - want).max()),
        "sqnr_db": finite(sqnr_db(signal, error)),
        "kl": float(kl(want, got).mean()),
        "steps": len(got),
        "argmax_equal": int((got.argmax(-1) == case.best[first:end]).sum()),
    }
