"""What the contracts of targets with named entries have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Key of a file's own metadata under which the contract lies.
CONTRACT_KEY = "needle.contract"

#: Name of the entry that reads one token.
DECODE = "decode"


def prefill_name(rows: int) -> str:
    """Name of the entry that reads T = ``rows`` tokens."""
    return f"prefill_{rows}"


def entry_name(rows: int) -> str:
    """Name of the entry that reads T = ``rows`` tokens, one included."""
    return DECODE if rows == 1 else prefill_name(rows)


@dataclass(frozen=True)
class Port:
    """One input, output or state of an entry: its name, shape, dtype and meaning."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    doc: str


def listed(ports: Iterable[Port]) -> list[dict[str, Any]]:
    """Ports as a report has them."""
    return [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "doc": p.doc} for p in ports]
