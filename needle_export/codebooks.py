"""Which weights of a program are stored in codebook form, and their codes: a container's own, or made from floats."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.checkpoint.cq import index_bits
from needle_export.config.rules import Rules
from needle_export.errors import UsageError
from needle_export.graph.program import Part, Weight
from needle_export.weights.codes import Codes, joined
from needle_export.weights.cq import codebook, encode

#: Bits of the schemes that make codes from floats.
FROM_FLOATS = {"cq4": 4, "cq2": 2}

#: The scheme that takes them from a container.
IMPORTED = "codebook"

#: The exporter's group, as far as it divides a row; and the least group of the format.
_GROUP, _LEAST = 128, 8

_SITES = "engrams/"


class Codebooks:
    """Codes of weights by what they are made of.

    Args:
        checkpoint: at the depth of the build.
        rules: which scheme every weight has.

    Raises:
        UsageError: codes are to be taken from a file that has none.
    """

    def __init__(self, checkpoint: Checkpoint, rules: Rules) -> None:
        self.rules = rules
        self._packed = checkpoint.packed
        floats = "the container holds it as floats"
        self._lost = f"an adapter was merged into it, or {floats}" if checkpoint.adapters else floats
        self._sites = range(len(checkpoint.geometry.engram_layers))
        if IMPORTED in rules.schemes and not self._packed:
            raise UsageError("this checkpoint holds no codebooks to import", where=checkpoint.source.path_name,
                             fix=f"give a .cact container, or make codes from floats with {', '.join(FROM_FLOATS)}")

    def __bool__(self) -> bool:
        return any(s == IMPORTED or s in FROM_FLOATS for s in self.rules.schemes)

    def format_of(self, parts: Sequence[Part]) -> str:
        """The number format of a weight: what may be merged with what. Codes of different widths may not."""
        scheme = self.rules.of(parts)
        if scheme != IMPORTED:
            return scheme
        found = {c.form for p in parts for c in self.imported(p.source, p.role, p.layer) or ()}
        return "+".join([scheme, *sorted(found)])

    def format(self, source: str, role: str, layer: int) -> str:
        """As :meth:`format_of`, of a tensor by name, or of its share of a block."""
        return self.format_of([Part(source, role, layer, 1)])

    def of(self, weight: Weight) -> list[Codes] | str | None:
        """Of a kernel [I, O], or [S, I, O] for S sites, or a table [R, D]: for each site.

        Returns:
            None where the scheme isn't one of codes; why it stays float where it is.
        """
        scheme = self.rules.of_matrix(weight.parts)
        if scheme != IMPORTED and scheme not in FROM_FLOATS:
            return None
        if weight.folded:
            return "constants were folded into it, so its values are not the checkpoint's"
        if not all(_codable(p.source) for p in weight.parts):
            return "the format has no codes for it: containers hold it in half precision"
        if scheme == IMPORTED:
            return self._imported(weight.parts)
        bits, value = FROM_FLOATS[scheme], weight.value
        table = weight.parts[0].source.endswith("/embedding")
        matrices = [value] if table else [m.t() for m in (value if value.dim() == 3 else value.unsqueeze(0))]
        group = math.gcd(_GROUP, matrices[0].shape[1])
        if group < _LEAST:
            return f"its rows don't divide into groups of {_LEAST} or more columns"
        found = []
        for matrix in matrices:
            data = np.ascontiguousarray(matrix.float().numpy())
            found.append(Codes(bits, *encode(data, bits, group), codebook(bits, group)))
        return found

    def imported(self, source: str, role: str, layer: int) -> list[Codes] | None:
        """The container's codes of a tensor, of each of its sites, or None."""
        found = self._imported([Part(source, role, layer, 1)])
        return None if isinstance(found, str) else found

    def _imported(self, parts: Sequence[Part]) -> list[Codes] | str:
        """As the container has them, or why not."""
        names = [self._names(p) for p in parts]
        if any(n not in self._packed for row in names for n in row):
            return f"the checkpoint has no codes of it: {self._lost}"
        packed = [[self._packed[n] for n in row] for row in names]
        if any(p.in_pad != p.shape[1] for row in packed for p in row):
            return f"its rows aren't whole groups of {packed[0][0].group} columns"
        codes = [[Codes(index_bits(p.bits), p.indices(), p.norms, p.codebook, True) for p in row]
                 for row in packed]
        below = [list(site) for site in zip(*codes, strict=True)]
        if parts[0].source.endswith("/embedding"):
            below = [[c for row in codes for c in row]]
        if any(len({c.form for c in several}) > 1 for several in below):
            return "its sites have codes of several widths"
        return [joined(several) for several in below]

    def _names(self, part: Part) -> list[str]:
        """The container's names of one part, for each site."""
        if part.source.startswith(_SITES):
            return [f"engrams_{site}/{part.source.removeprefix(_SITES)}" for site in self._sites]
        return [part.source if part.layer < 0 else f"{part.source}#{part.layer}"]


def _codable(source: str) -> bool:
    """Whether the format has codes for a tensor: for tables, projections and lanes; the MLP stays in half precision."""
    return source.endswith(("/embedding", "_proj/kernel")) or "/mhc_phi_" in source
