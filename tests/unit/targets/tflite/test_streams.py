"""The stream behind each block is read from the last op that is named after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from needle_export.targets.tflite.streams import read_streams, stream_tensors


class Interpreter:
    """Tensors by subgraph, as (name, value); a value is found under its number only."""

    def __init__(self, *graphs: list[tuple[str, Any]]) -> None:
        self.graphs = graphs

    def get_tensor_details(self, subgraph_index: int) -> list[dict[str, Any]]:
        return [{"name": name, "index": 10 + at} for at, (name, _) in enumerate(self.graphs[subgraph_index])]

    def get_tensor(self, index: int, subgraph: int) -> Any:
        return self.graphs[subgraph][index - 10][1]


def value(*shape: int, start: float = 0) -> np.ndarray:
    return (start + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def test_the_last_op_of_a_block_counts_whatever_the_order() -> None:
    graph = [("stream_01_9", 0), ("stream_01_120", 1), ("stream_01_30", 2), ("stream_00_7", 3), ("layers.2/mul_8", 4)]
    assert stream_tensors(Interpreter(graph), 0) == {1: 11, 0: 13}


@pytest.mark.parametrize("name", ["", "stream", "stream_x_1", "stream_00", "my_stream_00_1", "stream_00_1;other"])
def test_other_names_are_no_streams(name: str) -> None:
    assert stream_tensors(Interpreter([(name, 0)]), 0) == {}


def test_every_signature_has_its_own() -> None:
    chunk = value(8, 4, 6)
    two = Interpreter([("stream_00_5", chunk[0])], [("stream_00_3", chunk), ("stream_12_9", chunk)])
    assert stream_tensors(two, 0) == {0: 10} and stream_tensors(two, 1) == {0: 10, 12: 11}


def test_padding_is_cut_off_and_a_single_row_has_one() -> None:
    chunk, row = value(8, 4, 6), value(4, 6)
    streams = read_streams(Interpreter([("stream_02_5", chunk)]), 0, 3, 8)
    assert list(streams) == [2] and np.array_equal(streams[2], chunk[:3])
    streams = read_streams(Interpreter([("stream_02_5", row)]), 0, 1, 1)
    assert np.array_equal(streams[2], row[None])
