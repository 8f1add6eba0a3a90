"""Quantities as people write them: a number with its unit, read into one SI number and shown again."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

#: What this package measures, and the unit that its numbers are kept in.
KINDS = {
    "bytes": "byte",
    "time": "second",
    "bandwidth": "byte/second",
    "speed": "token/second",
    "compute": "MAC/second",
    "frequency": "cycle/second",
}

#: An operator or a bracket would be arithmetic to the library, not a unit.
_UNIT = re.compile("[A-Za-zµμ]+(?:/[A-Za-zµμ]+)?")

_EXAMPLES = {
    "bytes": "35.5 MB or 2 MiB",
    "time": "4 ms or 0.5 us",
    "bandwidth": "12.8 GB/s",
    "speed": "250 tokens/s",
    "compute": "40 GMAC/s, of multiply-adds",
    "frequency": "2.4 GHz",
}


def quantity(text: str, kind: str) -> float:
    """A quantity in bytes, seconds, or bytes, tokens, multiply-adds or cycles a second.

    Args:
        text: a number and a unit: ``35.5 MB``, ``4 ms``, ``250 tokens/s``, ``40 GMAC/s``, ``12.8 GB/s``. A unit of its
            own is asked for, so that nothing is ever counted in the wrong one.
        kind: one of :data:`KINDS`.

    Raises:
        ValueError: it isn't one, or is below 0; the text says what would be.
    """
    import pint

    head, _, unit = text.strip().partition(" ")
    try:
        if not _UNIT.fullmatch(unit.strip()):
            raise ValueError
        value = float(_registry().Quantity(float(head), unit.strip()).to(KINDS[kind]).magnitude)
    except (ValueError, pint.errors.PintError):
        raise ValueError(f"{text[:60]!r} is no quantity of {kind}, such as {_EXAMPLES[kind]}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text[:60]!r} is below 0 or not finite")
    return value


@cache
def _registry() -> Any:
    import pint

    # Of its own units only prefixes and times are wanted; what is counted here has no dimension there, and a byte would
    # pass for a token.
    registry: Any = pint.UnitRegistry(None)
    for line in (
        "kilo- = 1e3 = k-", "mega- = 1e6 = M-", "giga- = 1e9 = G-", "tera- = 1e12 = T-",
        "milli- = 1e-3 = m-", "micro- = 1e-6 = µ- = μ- = u-", "nano- = 1e-9 = n-",
        "kibi- = 2**10 = Ki-", "mebi- = 2**20 = Mi-", "gibi- = 2**30 = Gi-",
        "second = [time] = s", "byte = [information] = B = bytes", "token = [text] = _ = tokens",
        "MAC = [arithmetic]", "cycle = [oscillation]", "hertz = cycle / second = Hz",
    ):
        registry.define(line)
    return registry
