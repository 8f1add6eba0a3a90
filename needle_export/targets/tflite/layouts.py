"""How constants in half precision lie in a file, as the names of what widens them say."""

from __future__ import annotations

import re

from needle_export.targets.claims import tensor_name

#: A vector in any shape; rows that are multiplied entry by entry; taps of a convolution as rows, the latest first.
FLAT, EACH, TAPS = "flat", "each", "taps"

#: The converter appends a running number to a name that it meets again.
_LAYOUT = re.compile(rf"(.*\)) ({FLAT}|{EACH}|{TAPS})\d*")


def location(name: str, layout: str) -> str:
    """What a constant is called in the file: the name of a matrix, and its layout if it isn't [O, I]."""
    return tensor_name(name, False) + (f" {layout}" if layout else "")


def split_layout(name: str) -> tuple[str, str]:
    """The name of a tensor without its layout, and that."""
    match = _LAYOUT.fullmatch(name)
    return (name, "") if match is None else (match.group(1), match.group(2))
