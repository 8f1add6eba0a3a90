"""The streams between blocks, read out of an interpreter that keeps all tensors: for finding a faulty block."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: As ``builder.STREAM`` names them: block, then a running number; the last op of a block holds its stream.
_NAME = re.compile(r"stream_(\d+)_(\d+)")


def stream_tensors(interpreter: Any, subgraph: int) -> dict[int, int]:
    """Tensor index of the stream behind each block that shows it."""
    found: dict[int, tuple[int, int]] = {}
    for detail in interpreter.get_tensor_details(subgraph_index=subgraph):
        match = _NAME.fullmatch(detail["name"])
        if match:
            block, number = int(match.group(1)), int(match.group(2))
            found[block] = max(found.get(block, (-1, -1)), (number, detail["index"]))
    return {block: index for block, (_, index) in found.items()}


def read_streams(interpreter: Any, subgraph: int, rows: int, bucket: int) -> dict[int, NDArray[np.float32]]:
    """The stream behind each block of a call with ``rows`` tokens in a signature of ``bucket``: [rows, n, C]."""
    streams = {}
    for block, index in stream_tensors(interpreter, subgraph).items():
        value = interpreter.get_tensor(index, subgraph)
        streams[block] = value.reshape(bucket, -1, value.shape[-1])[:rows]
    return streams
