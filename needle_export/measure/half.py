"""Whether a runtime that computes in half precision gives the reference's results as well as half precision can.

No bound on single logits follows from a program there: an op's result is rounded to 11 bits, the runtime chooses in
which order it sums and in which format, and a device may choose otherwise than the next. So results are judged as a
whole. The two limits leave room for that and none for a fault: see the constants.
"""

from __future__ import annotations

from needle_export.measure.parity import Measured

#: Share of forced decode steps whose best token must be the reference's. Half precision decides between two logits that
#: are as good as equal, and a checkpoint drawn at random has many such pairs; a trained one has fewer.
LEAST_ARGMAX = 0.9

#: Signal to error over all logits, decibels. At 30 the error is a thirtieth of the logits, root mean square. Our
#: evaluator loses less when it rounds every result (``parity.rounded.sqnr_db`` of a report), and what is left between
#: the two is for sums in other orders and formats. Of a lost state or a wrong mask nothing near 30 is left:
#: tests/e2e/test_coreml_apple.py has both.
LEAST_SQNR_DB = 30.0


def argmax_share(measured: Measured) -> float:
    """Share of decode steps whose best token is the reference's; 1 where none was compared."""
    return measured.argmax_equal / measured.steps if measured.steps else 1.0


def judge_half(measured: Measured) -> str | None:
    """What half precision doesn't explain, or None."""
    if measured.sqnr_db < LEAST_SQNR_DB:
        return (
            f"{measured.sqnr_db:.1f} dB of signal to error, less than {LEAST_SQNR_DB:g}, isn't half precision's doing"
        )
    if argmax_share(measured) < LEAST_ARGMAX:
        return (
            f"{measured.argmax_equal} of {measured.steps} next tokens are the reference's, less than"
            f" {LEAST_ARGMAX:.0%} of them"
        )
    return None


def in_words(measured: Measured) -> str:
    """The comparison for a report's notes."""
    return (
        f"{measured.argmax_equal} of {measured.steps} next tokens equal, SQNR {measured.sqnr_db:.1f} dB, largest logit"
        f" error {measured.max_abs:.2g}"
    )
