"""Which weights of a program are stored in codebook form, and their codes: a container's own, or made from floats."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from needle_export.checkpoint.checkpoint import Checkpoint
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
        found = {c.form for p in parts for c in self._imported([p]) or ()}
        return "+".join([scheme, *sorted(found)])

    def format(self, source: str, role: str, layer: int) -> str:
        """As :meth:`format_of`, of a tensor by name, or of its share of a block."""
        return self.format_of([Part(source, role, layer, 1)])

    def of(self, weight: Weight) -> list[Codes] | None:
        """Of a kernel [I, O], or [S, I, O] for S sites, or a table [R, D]: for each site; None if it stays float."""
        scheme = self.rules.of_matrix(weight.parts)
        if weight.folded or not all(_codable(p.source) for p in weight.parts):
            return None
        if scheme == IMPORTED:
            return self._imported(weight.parts)
        if scheme not in FROM_FLOATS:
            return None
        bits, value = FROM_FLOATS[scheme], weight.value
        table = weight.parts[0].source.endswith("/embedding")
        matrices = [value] if table else [m.t() for m in (value if value.dim() == 3 else value.unsqueeze(0))]
        group = math.gcd(_GROUP, matrices[0].shape[1])
        if group < _LEAST:
            return None
        found = []
        for matrix in matrices:
            data = np.ascontiguousarray(matrix.float().numpy())
            found.append(Codes(bits, *encode(data, bits, group), codebook(bits, group)))
        return found

    def imported(self, source: str, role: str, layer: int) -> list[Codes] | None:
        """The container's codes of a tensor, of each of its sites, or None."""
        return self._imported([Part(source, role, layer, 1)])

    def _imported(self, parts: Sequence[Part]) -> list[Codes] | None:
        """As the container has them, or None where one of the parts isn't in codes, or its rows aren't whole groups."""
        names = [self._names(p) for p in parts]
        if any(n not in self._packed for row in names for n in row):
            return None
        packed = [[self._packed[n] for n in row] for row in names]
        if any(p.in_pad != p.shape[1] for row in packed for p in row):
            return None
        codes = [[Codes(2 if p.bits == 5 else p.bits, p.indices(), p.norms, p.codebook, True) for p in row]
                 for row in packed]
        if parts[0].source.endswith("/embedding"):
            return [joined([c for row in codes for c in row])]
        return [joined(list(site)) for site in zip(*codes, strict=True)]

    def _names(self, part: Part) -> list[str]:
        """The container's names of one part, for each site."""
        if part.source.startswith(_SITES):
            return [f"engrams_{site}/{part.source.removeprefix(_SITES)}" for site in self._sites]
        return [part.source if part.layer < 0 else f"{part.source}#{part.layer}"]


def _codable(source: str) -> bool:
    """Whether the format has codes for a tensor: for tables, projections and lanes; the MLP stays in half precision."""
    return source.endswith(("/embedding", "_proj/kernel")) or "/mhc_phi_" in source
