"""What a finished file says of a tensor with a scale for each run of its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """A tensor's quantisation by blocks.

    Attributes:
        scales: the tensor of its graph that holds them.
        zero_points: the same, or -1.
        size: columns of a block.
        axis: that quantisation is along, of the tensor.
    """

    scales: int
    zero_points: int
    size: int
    axis: int


def blocks_of(tensor: Any) -> Blocks | None:
    """How a tensor of the file is quantised by blocks, or None if it isn't."""
    from ai_edge_litert import schema_py_generated as schema

    own = tensor.Quantization()
    if own is None or own.DetailsType() != schema.QuantizationDetails.BlockwiseQuantization:
        return None
    table, found = own.Details(), schema.BlockwiseQuantization()
    found.Init(table.Bytes, table.Pos)
    return Blocks(found.Scales(), found.ZeroPoints(), found.BlockSize(), own.QuantizedDimension())


def scale_buffers(model: Any) -> frozenset[int]:
    """Buffers of a model that hold scales of blocks."""
    found = set()
    for graph in (model.Subgraphs(i) for i in range(model.SubgraphsLength())):
        for tensor in (graph.Tensors(i) for i in range(graph.TensorsLength())):
            blocks = blocks_of(tensor)
            if blocks is not None:
                found.add(graph.Tensors(blocks.scales).Buffer())
    return frozenset(found)
