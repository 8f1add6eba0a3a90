"""What a stored matrix says that it holds: the name that it is found by in a finished artifact.

Of what was known when an artifact was written only this name is left, and whether it is true is for the comparison to
find out.
"""

from __future__ import annotations

import re

from needle_export.targets.matrices import RowsOf

#: ``rows(a.b.x+y[0:96].1)``: rows 0 to 95 of the second matrices in a.b.x and a.b.y; ``rows(a.b.x[:,:24])``: the first
#: 24 columns; ``codes(a.b.x)``: the indices of such rows in codebook form. TFLite's converter appends a running number
#: to a name that it meets again, and drops one that ends in a colon.
_NAME = re.compile(r"(rows|folded|codes)\((.+?)(?:\[(\d*):(\d*)(?:,:(\d+))?\])?(?:\.(\d+))?\)\d*")


#: A kernel whose taps lie apart, with zeros between them.
_EVERY = re.compile(r"(.*) every (\d+)")

#: What stands in an identifier for what can't.
_ESCAPES = {"_": "_", ".": "d", "+": "p", "[": "l", "]": "r", ":": "c", ",": "k", "(": "o", ")": "e", " ": "s"}
_PLAIN = {code: plain for plain, code in _ESCAPES.items()}


def tensor_name(name: str, folded: bool) -> str:
    """What the constant of a matrix is called; :func:`parse_name` understands it.

    Args:
        name: of the weight: its parameters' common path once, their last parts with + between, rows and site.
        folded: whether constants went into the values.
    """
    return f"{'folded' if folded else 'rows'}({name})"


def coded_name(name: str) -> str:
    """As :func:`tensor_name`, of the indices of a matrix in codebook form."""
    return f"codes({name})"


def norms_name(name: str) -> str:
    """What the norms of a matrix in codebook form are called; nothing finds them by it but a reader of the file."""
    return f"norms({name})"


def is_coded(name: str) -> bool:
    """Whether a constant is called as indices are."""
    return name.startswith("codes(")


def is_norms(name: str) -> bool:
    """Whether a constant is called as the norms of such a matrix are."""
    return name.startswith("norms(")


def parse_name(name: str) -> tuple[RowsOf, bool] | None:
    """What a constant's name says that it holds, and whether constants went into it; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind, paths, start, stop, columns, site = match.groups()
    first, *others = paths.split("+")
    parameters = (first, *(_beside(first, leaf) for leaf in others))
    claim = RowsOf(
        parameters,
        int(site or -1),
        int(start or 0),
        int(stop) if stop else None,
        int(columns) if columns else None,
    )
    return claim, kind == "folded"


def _beside(path: str, leaf: str) -> str:
    """A path with its last parts replaced by as many others: beside a.b.x, y is a.b.y; beside a.q.x, k.x is a.k.x."""
    return ".".join([*path.split(".")[: -1 - leaf.count(".")], leaf])


def kernel_name(name: str, folded: bool, every: int) -> str:
    """As :func:`tensor_name`, of the taps of a convolution that are ``every`` positions apart."""
    return tensor_name(name, folded) + (f" every {every}" if every > 1 else "")


def split_every(name: str) -> tuple[str, int]:
    """The name without the steps between taps, and these."""
    match = _EVERY.fullmatch(name)
    return (name, 1) if match is None else (match.group(1), int(match.group(2)))


def identifier(name: str) -> str:
    """A name in letters, digits and underscores, where a format takes no others."""
    return "".join(f"_{_ESCAPES[c]}" if c in _ESCAPES else c for c in name)


def from_identifier(text: str) -> str:
    """The inverse of :func:`identifier`; an identifier of something else becomes some other text."""
    return re.sub(r"_([_dplrckoes])", lambda match: _PLAIN[match.group(1)], text)
