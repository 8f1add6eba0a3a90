"""What programs are told of number formats: which weight has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from needle_export.config.rules import Rules
from needle_export.graph.program import Part, Weight


class Formats(Protocol):
    """Which weights have which number format; see ``codebooks.Codebooks``."""

    rules: Rules

    def __bool__(self) -> bool:
        """Whether any is in codebook form."""

    def format_of(self, parts: Sequence[Part]) -> str:
        """Of a weight by its parts."""

    def format(self, source: str, role: str) -> str:
        """Of a checkpoint tensor."""

    def of(self, weight: Weight) -> Sequence[Any] | None:
        """A weight's codes, if it has any."""
