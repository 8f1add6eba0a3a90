"""The part of a report that says where bytes are: by role, by tensor and block, and what a download of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OVERHEAD = "overhead"
"""What no weight of the model takes: graph, names, padding, constants."""


@dataclass(frozen=True)
class TensorBytes:
    """What one tensor of the checkpoint takes in an artifact's files, its scales included.

    Attributes:
        name, role: of the tensor.
        bytes: of all of it.
        by_layer: bytes of each block as built, from the first; empty outside the stack. They make up ``bytes``, but for
            what serves several blocks at once.
    """

    name: str
    role: str
    bytes: int
    by_layer: tuple[int, ...]

    def __post_init__(self) -> None:
        check_naturals({"bytes": self.bytes, **{f"layer {i}": n for i, n in enumerate(self.by_layer)}})
        if sum(self.by_layer) > self.bytes:
            raise ValueError(f"its blocks make {sum(self.by_layer)} bytes, more than {self.bytes}")


@dataclass(frozen=True)
class Size:
    """Where the bytes of an artifact's files are: by role of the weight and by tensor, and everything else.

    Attributes:
        total_bytes: all files.
        compressed_bytes: the same files packed as a zip archive packs them, each as deflate of level 6 or stored,
            whichever is smaller; without the archive's own headers.
        by_role: weights by role; the sums of ``tensors``.
        overhead_bytes: graph, names, padding, constants.
        tensors: the checkpoint's tensors, the largest first.
    """

    total_bytes: int
    compressed_bytes: int
    by_role: dict[str, int]
    overhead_bytes: int
    tensors: tuple[TensorBytes, ...]

    def __post_init__(self) -> None:
        check_naturals(self.by_role)
        check_naturals({"total_bytes": self.total_bytes, "overhead_bytes": self.overhead_bytes,
                        "compressed_bytes": self.compressed_bytes})
        parts = sum(self.by_role.values()) + self.overhead_bytes
        if parts != self.total_bytes:
            raise ValueError(f"the roles and the overhead make {parts} bytes, not {self.total_bytes}")
        if self.compressed_bytes > self.total_bytes:
            raise ValueError(f"compressed_bytes is {self.compressed_bytes}, more than the files' {self.total_bytes}")
        roles: dict[str, int] = {}
        for tensor in self.tensors:
            roles[tensor.role] = roles.get(tensor.role, 0) + tensor.bytes
        if roles != self.by_role:
            raise ValueError(f"the tensors make {roles}, not the roles' bytes")
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor is listed twice")


def check_naturals(values: Mapping[str, int]) -> None:
    """Raises ValueError for a count below zero, by name."""
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} is {value}, below zero")
