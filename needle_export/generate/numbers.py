"""Automata of numbers within bounds: decimal digits compared with the bounds' digits as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from needle_export.generate.fragments import Fragment, explore

#: The largest step, in units of its last decimal, whose multiples are enforced: each remainder takes states.
MAX_STEP = 1000

_DIGITS = b"0123456789"


@dataclass(frozen=True)
class Bound:
    """A bound that is no less than 0: digits before and behind the point, without zeros that add nothing."""

    whole: str
    part: str
    exclusive: bool


@dataclass(frozen=True)
class Range:
    """Numbers that a schema admits.

    Attributes:
        least, most: bounds, or None; exact.
        above, below: whether the bound itself is left out.
        step: that numbers are multiples of, or None.
        whole: whether they are integers, written without a point.
    """

    least: Fraction | None = None
    most: Fraction | None = None
    above: bool = False
    below: bool = False
    step: Fraction | None = None
    whole: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing bounds it, so that an exponent may stand behind it."""
        return not self.whole and self.least is None and self.most is None and self.step is None


#: Where in a number: sign of it, digits before the point (counted up to what matters), digits behind it or -1, how it
#: compares with the lower and the upper bound, the remainder of its digits, what has been read of an exponent.
_State = tuple[str, int, int, int, int, int, int]


def number(within: Range) -> Fragment | None:
    """The automaton of the numbers in a range, or None where there is none.

    They are written as JSON writes them. Negative zero isn't among them, and an exponent (of two digits at most) only
    where nothing bounds the number.
    """
    sides = {"+": _side(within, +1), "-": _side(within, -1)}

    def steps(state: _State) -> Iterator[tuple[int, _State]]:
        if state[0] == "?":
            if sides["-"] is not None:
                yield ord("-"), ("-", 0, -1, 0, 0, 0, 0)
            if sides["+"] is not None:
                yield from sides["+"].steps(("+", 0, -1, 0, 0, 0, 0))
            return
        side = sides[state[0]]
        assert side is not None
        yield from side.steps(state)

    def accepts(state: _State) -> bool:
        side = sides.get(state[0])
        return side is not None and side.accepts(state)

    return explore(("?", 0, -1, 0, 0, 0, 0), lambda s: [(b, b, t) for b, t in steps(s)], accepts)


def _side(within: Range, sign: int) -> _Side | None:
    """The magnitudes of one sign, or None where there is none."""
    low, high = (within.least, within.most) if sign > 0 else (within.most, within.least)
    open_low, open_high = (within.above, within.below) if sign > 0 else (within.below, within.above)
    low, high = (None if low is None else sign * low), (None if high is None else sign * high)
    if high is not None and (high < 0 or (sign < 0 and high == 0)):
        return None
    if low is None or low < 0 or (sign < 0 and low == 0):
        low, open_low = Fraction(0), sign < 0
    step = within.step
    if within.whole and step is not None:
        step = Fraction(step.numerator)  # the whole ones among its multiples
    return _Side(_bound(low, open_low), None if high is None else _bound(high, open_high), step, within)


def _bound(value: Fraction, exclusive: bool) -> Bound:
    whole, rest = divmod(value, 1)
    digits = ""
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    return Bound(str(whole), digits, exclusive)


class _Side:
    """Magnitudes between two bounds, digit by digit."""

    def __init__(self, low: Bound, high: Bound | None, step: Fraction | None, within: Range) -> None:
        self.low, self.high, self.whole, self.plain = low, high, within.whole, within.plain
        self.places, self.step = (0, 0) if step is None else _scaled(step)
        bounds = [low] if high is None else [low, high]
        self.longest = max(len(b.whole) for b in bounds) + 1
        self.deepest = max(1, self.places + 1 if self.step else 0, *(len(b.part) for b in bounds))

    def steps(self, state: _State) -> Iterator[tuple[int, _State]]:
        sign, before, behind, low, high, rest, exponent = state
        if exponent:
            yield from self._exponent(state)
            return
        zero = before < 0  # a leading zero is the only digit before the point
        if behind < 0:
            if not zero:
                for byte in _DIGITS:
                    digit = byte - 48
                    at = -1 if before == 0 and digit == 0 else min(before + 1, self.longest)
                    yield byte, (sign, at, -1, _whole(low, self.low, before, digit),
                                 _whole(high, self.high, before, digit), self._rest(rest, digit), 0)
            if before and not self.whole:
                count = 1 if zero else before
                yield ord("."), (sign, 1, 0, _settled(low, self.low, count), _settled(high, self.high, count), rest, 0)
        else:
            for byte in _DIGITS:
                digit = byte - 48
                if self.step and behind >= self.places:
                    if digit:
                        continue
                    after = rest
                else:
                    after = self._rest(rest, digit)
                yield byte, (sign, 1, min(behind + 1, self.deepest), _part(low, self.low, behind, digit),
                             _part(high, self.high, behind, digit), after, 0)
        if self.plain and self.accepts(state):
            yield from ((byte, (sign, 0, 0, 0, 0, 0, 1)) for byte in b"eE")

    def accepts(self, state: _State) -> bool:
        _, before, behind, low, high, rest, exponent = state
        if exponent:
            return exponent > 2
        if not before or behind == 0:
            return False
        if behind < 0:
            count = abs(before)
            low, high, behind = _settled(low, self.low, count), _settled(high, self.high, count), 0
        if self.step and rest * 10 ** max(0, self.places - behind) % self.step:
            return False
        if low == 0 and behind < len(self.low.part):
            low = -1
        if low < 0 or (low == 0 and self.low.exclusive):
            return False
        if self.high is None:
            return True
        if high == 0 and behind < len(self.high.part):
            high = -1
        return high < 0 or (high == 0 and not self.high.exclusive)

    def _exponent(self, state: _State) -> Iterator[tuple[int, _State]]:
        """Read so far: 1 the letter, 2 the sign too, 3 a digit, 4 two."""
        sign, read = state[0], state[6]
        if read == 1:
            yield from ((byte, (sign, 0, 0, 0, 0, 0, 2)) for byte in b"+-")
        if read < 4:
            yield from ((byte, (sign, 0, 0, 0, 0, 0, max(read, 2) + 1)) for byte in _DIGITS)

    def _rest(self, rest: int, digit: int) -> int:
        return (rest * 10 + digit) % self.step if self.step else 0


def _scaled(step: Fraction) -> tuple[int, int]:
    """A step as a whole number of its last decimals: how many decimals, and the number."""
    places = 0
    while step.denominator != 1:
        step, places = step * 10, places + 1
    return places, step.numerator


def is_decimal(value: Fraction) -> bool:
    """Whether a number has finitely many decimals."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def step_fits(step: Fraction) -> bool:
    """Whether multiples of a step can be enforced."""
    return is_decimal(step) and _scaled(step)[1] <= MAX_STEP


def _sign(difference: int) -> int:
    return (difference > 0) - (difference < 0)


def _whole(so_far: int, bound: Bound | None, before: int, digit: int) -> int:
    """A comparison after a further digit before the point, of as many leading digits of the bound."""
    if bound is None or before >= len(bound.whole):
        return so_far
    return so_far or _sign(digit - int(bound.whole[before]))


def _settled(so_far: int, bound: Bound | None, count: int) -> int:
    """A comparison once all digits before the point are known."""
    return 0 if bound is None else _sign(count - len(bound.whole)) or so_far


def _part(so_far: int, bound: Bound | None, behind: int, digit: int) -> int:
    if bound is None or so_far:
        return so_far
    return _sign(digit - (int(bound.part[behind]) if behind < len(bound.part) else 0))
