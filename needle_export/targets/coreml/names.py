"""Short names for what lies in a package.

A name is written three times and more: as an op's, as its result's, and wherever that is read. In full words they would
be a third of the specification. They are unique in a function, however letters are capitalised, and none is a word of
MIL's own text (fp16, int8).
"""

from __future__ import annotations

import re
import string

_LETTERS = string.ascii_lowercase
_MORE = string.digits + _LETTERS

#: Letters for the block, then a number that begins with a digit.
_IN_BLOCK = re.compile(r"([a-z]+)\d[0-9a-z]*")


def block_name(layer: int) -> str:
    """What ops of a block begin with: a for the first, z for the 26th, then aa."""
    return _letters(layer + 1)


def block_of(name: str) -> int:
    """The block of an op that is called so, or -1."""
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return -1
    count = 0
    for letter in match.group(1):
        count = 26 * count + _LETTERS.index(letter) + 1
    return count - 1


def number_name(count: int) -> str:
    """1, 2 .. as 0 to 9, then 00 to 9z, then 000 to 9zz: a digit, so that a block's letters end there."""
    left, size = count - 1, 1
    while left >= 10 * 36 ** (size - 1):
        left -= 10 * 36 ** (size - 1)
        size += 1
    found = ""
    for _ in range(size - 1):
        left, last = divmod(left, 36)
        found = _MORE[last] + found
    return f"{left}{found}"


def constant_name(count: int) -> str:
    """Of the 1st, 2nd .. constant that isn't found by its name: c and letters alone, as no op is called."""
    return f"c{_letters(count)}"


def _letters(count: int) -> str:
    """a to z, then aa to zz and so on, for 1, 2 .."""
    found = ""
    while count:
        count, last = divmod(count - 1, 26)
        found = _LETTERS[last] + found
    return found
