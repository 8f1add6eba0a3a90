"""Damaged containers: each is refused in one sentence that names the field, or loads; nothing else."""

from __future__ import annotations

import dataclasses
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.container import (
    HEADER_BYTES,
    HEADER_FIELDS,
    RECORD_BYTES,
    RECORD_FIELDS,
    RECORD_FORMAT,
    read_container,
)
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import make_sample
from needle_export.errors import BadInput
from tests.support.containers import TERNARY, container_bytes, tokenizer_blob
from tests.support.geometries import ALL_HEADS

GEOMETRY = dataclasses.replace(SMALL, num_layers=2, global_layers=(1,), heads=ALL_HEADS)
DIRECTORY = HEADER_BYTES + 4 * 28
MAX_U32, MAX_U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


@pytest.fixture(scope="module")
def good() -> bytes:
    return container_bytes(GEOMETRY, make_sample(GEOMETRY, 0), tokenizer=tokenizer_blob())


def patched(good: bytes, position: int, replacement: bytes) -> bytes:
    return good[:position] + replacement + good[position + len(replacement):]


def variations(value: int, maximum: int) -> list[int]:
    return sorted({0, 1, maximum, (value + 1) & maximum, (value - 1) & maximum} - {value})


def outcome(data: bytes, path: Path) -> str:
    """What reading does: "" when it loads, else the sentence; asserts time, memory and kind of failure."""
    path.write_bytes(data)
    tracemalloc.start()
    started = time.perf_counter()
    try:
        checkpoint = read_checkpoint(path)
    except BadInput as error:
        sentence = error.sentence
        checkpoint = None
    finally:
        elapsed = time.perf_counter() - started
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert elapsed < 1, "slow"
    assert peak <= 2 * len(data) + 65536, "large"
    if checkpoint is not None:
        for name in checkpoint.tensors:
            assert checkpoint.tensors[name].shape == checkpoint.store.shapes()[name]
        return ""
    assert "\n" not in sentence and path.name in sentence and len(sentence) < 400
    return sentence


def header_cases() -> Iterator[tuple[str, int]]:
    for index, field in enumerate(HEADER_FIELDS):
        yield field, index


@pytest.mark.parametrize(("field", "index"), list(header_cases()))
def test_each_header_word(field: str, index: int, good: bytes, tmp_path: Path) -> None:
    value = struct.unpack_from("<I", good, 4 * index)[0]
    for wrong in variations(value, MAX_U32):
        sentence = outcome(patched(good, 4 * index, struct.pack("<I", wrong)), tmp_path / "m.cact")
        if sentence and field != "tag":
            # A wrong count or width may first show in a record that it no longer fits.
            assert field in sentence or "record" in sentence or "header field" in sentence, sentence


HARMLESS = {"kv_window", "kv_bits", "max_seq_len", "sliding_window", "out_vocab", "engram_seed_heads",
            "global_mask_lo", "global_mask_hi", "rope_theta", "engram_orders[0]", "engram_orders[1]",
            "engram_sites[0]", "num_heads", "num_kv_heads"}


def test_words_that_decide_shapes_are_refused_when_they_change(good: bytes, tmp_path: Path) -> None:
    loads = set()
    for field, index in header_cases():
        value = struct.unpack_from("<I", good, 4 * index)[0]
        for wrong in (value + 1, value - 1):
            data = patched(good, 4 * index, struct.pack("<I", wrong & MAX_U32))
            if not outcome(data, tmp_path / "m.cact"):
                loads.add(field)
    unused = {f"engram_orders[{i}]" for i in (2, 3)} | {f"engram_sites[{i}]" for i in range(1, 16)}
    assert loads <= HARMLESS | unused


def sizes_of(field: int) -> tuple[int, str, int]:
    """Byte offset in a record, struct code and maximum of one of its fields."""
    codes = RECORD_FORMAT[1:]
    return struct.calcsize("<" + codes[:field]), codes[field], (1 << 8 * struct.calcsize(codes[field])) - 1


@pytest.mark.parametrize("field", range(len(RECORD_FIELDS)), ids=RECORD_FIELDS)
def test_each_directory_field(field: int, good: bytes) -> None:
    offset, code, maximum = sizes_of(field)
    records = struct.unpack_from("<I", good, 4)[0]
    refused = loaded = 0
    for record in range(records):
        position = DIRECTORY + record * RECORD_BYTES + offset
        value = struct.unpack_from("<" + code, good, position)[0]
        for wrong in variations(value, maximum):
            data = patched(good, position, struct.pack("<" + code, wrong))
            started = time.perf_counter()
            try:
                read_container(np.frombuffer(data, np.uint8))
                loaded += 1
            except BadInput as error:
                refused += 1
                assert "record" in error.where or "header field" in error.where or error.where in (
                    "tokenizer", "codebooks"), error.sentence
            assert time.perf_counter() - started < 1
    name = RECORD_FIELDS[field]
    if name == "pad":
        assert refused == 0
    elif name in ("group_size", "bits"):
        # Only codebook matrices use them; elsewhere they are padding.
        assert refused > 100
    else:
        # dtype may turn raw bytes into an empty array, and so on; but nearly all must be refused.
        assert loaded <= 2, (refused, loaded)


@pytest.mark.parametrize("field", ["shape[0]", "shape[1]", "offset", "nbytes", "group_size"])
def test_directory_fields_allocate_little(field: str, good: bytes, tmp_path: Path) -> None:
    offset, code, maximum = sizes_of(RECORD_FIELDS.index(field))
    for record in (0, 1, 2, 40):
        position = DIRECTORY + record * RECORD_BYTES + offset
        value = struct.unpack_from("<" + code, good, position)[0]
        for wrong in [*variations(value, maximum), maximum >> 1, value * 2, 1 << 20]:
            outcome(patched(good, position, struct.pack("<" + code, wrong & maximum)), tmp_path / "m.cact")


def test_truncation_anywhere(good: bytes, tmp_path: Path) -> None:
    lengths = {*range(16), *range(16, len(good), 1009), DIRECTORY, DIRECTORY - 1, len(good) - 1}
    for length in sorted(lengths):
        assert outcome(good[:length], tmp_path / "m.cact")


def field_position(record: int, field: str) -> int:
    return DIRECTORY + record * RECORD_BYTES + sizes_of(RECORD_FIELDS.index(field))[0]


def test_blobs_past_the_end_of_the_file(good: bytes, tmp_path: Path) -> None:
    tokenizer = struct.unpack_from("<I", good, 4)[0] - 1
    position = field_position(tokenizer, "nbytes")
    nbytes = struct.unpack_from("<Q", good, position)[0]
    for wrong in (nbytes + 1, MAX_U64, 1 << 40):
        sentence = outcome(patched(good, position, struct.pack("<Q", wrong)), tmp_path / "m.cact")
        assert f"record {tokenizer} field nbytes" in sentence and "past the end" in sentence
    plain = container_bytes(GEOMETRY, make_sample(GEOMETRY, 0))
    assert "past the end" in outcome(plain[:-1], tmp_path / "m.cact")


def test_blobs_that_share_bytes(good: bytes, tmp_path: Path) -> None:
    first, second = (struct.unpack_from("<Q", good, field_position(record, "offset"))[0] for record in (2, 3))
    for record, wrong in ((3, first), (3, second - 64)):
        data = patched(good, field_position(record, "offset"), struct.pack("<Q", wrong))
        assert "inside another tensor" in outcome(data, tmp_path / "m.cact")
    for record, wrong in ((3, second + 64), (2, second)):
        data = patched(good, field_position(record, "offset"), struct.pack("<Q", wrong))
        assert "field offset" in outcome(data, tmp_path / "m.cact")


def test_the_untouched_container_loads(good: bytes, tmp_path: Path) -> None:
    assert outcome(good, tmp_path / "m.cact") == ""


def test_random_damage_never_escapes(good: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    head = DIRECTORY + struct.unpack_from("<I", good, 4)[0] * RECORD_BYTES
    for _ in range(200):
        data = bytearray(good)
        for position in rng.integers(0, head, 4):
            data[position] = rng.integers(0, 256)
        outcome(bytes(data), tmp_path / "m.cact")


def test_other_generations_and_models(good: bytes, tmp_path: Path) -> None:
    needle2 = patched(good, 0, struct.pack("<I", 0x05E12A83))
    assert "Needle 2" in outcome(needle2, tmp_path / "m.cact")
    later = patched(good, 0, struct.pack("<I", 0x05E12A85))
    assert "generation" in outcome(later, tmp_path / "m.cact")
    manifest = np.array([3246, 1, *range(11)], np.float32)
    tensors = make_sample(GEOMETRY, 0)
    whistle = container_bytes(GEOMETRY, tensors, tail=((2, (13,), manifest.tobytes()),))
    assert "Whistle" in outcome(whistle, tmp_path / "m.cact")
    extra = container_bytes(GEOMETRY, tensors, tail=((1, (4,), bytes(8)),), tokenizer=tokenizer_blob())
    assert "num_tensors" in outcome(extra, tmp_path / "m.cact")
    two = container_bytes(GEOMETRY, tensors, tail=((4, (), tokenizer_blob()),), tokenizer=tokenizer_blob())
    assert "raw bytes" in outcome(two, tmp_path / "m.cact")


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    data = container_bytes(GEOMETRY, make_sample(GEOMETRY, 0), tokenizer=tokenizer_blob(257))
    assert "257 pieces" in outcome(data, tmp_path / "m.cact")


def test_codebooks_must_rise(good: bytes, tmp_path: Path) -> None:
    for bits, index in ((2, 0), (2, 3), (3, 5), (4, 20), (4, 27)):
        for value in (float("nan"), float("inf"), 0.99, -0.99, 2.0):
            data = patched(good, HEADER_BYTES + 4 * index, struct.pack("<f", value))
            sentence = outcome(data, tmp_path / "m.cact")
            edge = (index in (3, 27) and value == 0.99) or (index == 0 and value == -0.99)
            assert edge or f"the {bits}-bit codebook" in sentence


def test_permutations_must_be_permutations(tmp_path: Path) -> None:
    geometry = dataclasses.replace(GEOMETRY, heads=())
    data = container_bytes(geometry, make_sample(geometry, 0))
    permutation = np.random.RandomState(11).permutation(128).astype(np.float32).tobytes()
    position = data.index(permutation)
    for value in (-1.0, 0.5, 128.0, float("nan"), float("inf")):
        sentence = outcome(patched(data, position, struct.pack("<f", value)), tmp_path / "m.cact")
        assert "hada_p1" in sentence and "permutation" in sentence
    other = np.random.RandomState(4).permutation(128)
    path = tmp_path / "custom.cact"
    path.write_bytes(patched(data, position, other.astype(np.float32).tobytes()))
    checkpoint = read_checkpoint(path)
    np.testing.assert_array_equal(checkpoint.permutations[0], other)
    assert not checkpoint.geometry.split_permutations


def test_the_fourth_ternary_code_is_refused(tmp_path: Path) -> None:
    data = container_bytes(GEOMETRY, make_sample(GEOMETRY, 0), bits=TERNARY)
    offset = struct.unpack_from("<Q", data, DIRECTORY + 20)[0]
    for shift in range(0, 8, 2):
        crumbs = bytes([data[offset] & ~(3 << shift) | 2 << shift])
        assert "ternary" in outcome(patched(data, offset, crumbs), tmp_path / "m.cact")


def test_the_list_of_heads(tmp_path: Path) -> None:
    data = container_bytes(GEOMETRY, make_sample(GEOMETRY, 0))
    position = data.index(np.array([1, 2, 3], np.float16).tobytes() + bytes(58), DIRECTORY)
    for codes in ((1, 2, 4), (1, 3, 2), (0, 2, 3), (2, 2, 3), (1, 2.5, 3), (1, 2, float("nan"))):
        damaged = patched(data, position, np.array(codes, np.float16).tobytes())
        assert "probe heads" in outcome(damaged, tmp_path / "m.cact")


def test_an_embedding_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    data = container_bytes(GEOMETRY, make_sample(GEOMETRY, 0))
    records = struct.unpack_from("<I", data, 4)[0]
    for index in range(records):
        fields = struct.unpack_from(RECORD_FORMAT, data, DIRECTORY + index * RECORD_BYTES)
        if fields[0] == 1 and fields[3:5] == (32, 0):
            damaged = patched(data, fields[7], np.float16(1).tobytes())
            assert "embedding head has no bias" in outcome(damaged, tmp_path / "m.cact")
            break
    else:
        pytest.fail("the container has no bias record")
