"""The safetensors reader and writer, and what damaged files do to them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.sample import make_sample, write_sample
from needle_export.errors import BadInput, UsageError
from tests.support.geometries import VARIANTS

Header = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.safetensors"
    write_sample(path, SMALL, 0)
    return path.read_bytes()


def split(data: bytes) -> tuple[Header, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8:8 + length]), data[8 + length:]


def joined(header: Header | str | bytes, body: bytes) -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + body


def outcome(data: bytes, path: Path) -> str:
    """What reading does: "" when it loads, else the sentence; asserts time, memory and kind of failure."""
    path.write_bytes(data)
    tracemalloc.start()
    started = time.perf_counter()
    sentence = ""
    try:
        read_checkpoint(path)
    except BadInput as error:
        sentence = error.sentence
        assert "\n" not in sentence and path.name in sentence and len(sentence) < 500
    elapsed = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert elapsed < 1, "slow"
    assert peak <= 2 * len(data) + 131072, "large"
    return sentence


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = make_sample(SMALL, 3)
    write_checkpoint(path, SMALL, tensors, step=5, run={"b": 1}, metadata={"note": "x"})
    found = safetensors.numpy.load_file(path)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)
    metadata = split(path.read_bytes())[0]["__metadata__"]
    assert metadata["format_version"] == "2" and metadata["step"] == "5" and metadata["note"] == "x"


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, good: bytes) -> None:
    write_sample(tmp_path / "again", SMALL, 0)
    assert (tmp_path / "again").read_bytes() == good
    write_sample(tmp_path / "other", SMALL, 1)
    assert (tmp_path / "other").read_bytes() != good


def test_reading_back(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "any-name.bin"
    path.write_bytes(good)
    seen: list[tuple[int, int]] = []
    checkpoint = read_checkpoint(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(good), len(good))
    assert checkpoint.geometry == SMALL and checkpoint.parent_layers == 3 and checkpoint.packed == {}
    assert checkpoint.source.random and checkpoint.source.format == "safetensors"
    assert checkpoint.source.path_name == "any-name.bin" and checkpoint.source.file_bytes == len(good)
    for name, array in make_sample(SMALL, 0).items():
        assert checkpoint.tensors[name].dtype == np.float16
        np.testing.assert_array_equal(checkpoint.tensors[name], array)


def test_reading_maps_instead_of_copying(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(good)
    tracemalloc.start()
    checkpoint = read_checkpoint(path)
    arrays = list(checkpoint.tensors.values())
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < len(good) / 4
    assert not any(array.flags.writeable for array in arrays)
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][...] = 0


def test_unaligned_tensors_are_copied_into_line(tmp_path: Path, good: bytes) -> None:
    header, body = split(good)
    text = json.dumps(header)
    # One space makes every offset in the file odd.
    text += " " * (1 - len(text) % 2)
    (tmp_path / "m").write_bytes(joined(text, body))
    assert len(text) % 2 == 1
    checkpoint = read_checkpoint(tmp_path / "m")
    for name, array in make_sample(SMALL, 0).items():
        assert checkpoint.tensors[name].flags.aligned
        np.testing.assert_array_equal(checkpoint.tensors[name], array)


NAME = "stack/layers/block/attn_gate"


def entry_change(field: str, change: Callable[[Any], Any]) -> Callable[[Header], None]:
    def apply(header: Header) -> None:
        header[NAME][field] = change(header[NAME][field])
    return apply


def offset_change(index: int, change: Callable[[int], Any]) -> Callable[[Header], None]:
    def apply(header: Header) -> None:
        header[NAME]["data_offsets"][index] = change(header[NAME]["data_offsets"][index])
    return apply


NUMBERS: list[Callable[[int], Any]] = [lambda v: 0, lambda v: 1, lambda v: 2**64, lambda v: v + 1,
                                       lambda v: v - 1, lambda v: -1, lambda v: 2**62, lambda v: 10**400,
                                       lambda v: float(v), lambda v: str(v), lambda v: None, lambda v: True]
SHAPES: list[Callable[[Any], Any]] = [
    lambda v: [], lambda v: [0], lambda v: [1], lambda v: [2], lambda v: [4], lambda v: [2**63 - 1] * 8,
    lambda v: [2**32, 2**32], lambda v: [3, 1], lambda v: [1] * 9, lambda v: [-3], lambda v: [3.0],
    lambda v: 3, lambda v: {}, lambda v: [True, 3], lambda v: [0, 2**62]]


@pytest.mark.parametrize("change", [
    *[offset_change(index, number) for index in (0, 1) for number in NUMBERS],
    *[entry_change("shape", shape) for shape in SHAPES],
    *[entry_change("dtype", lambda v, dtype=dtype: dtype)
      for dtype in ("F32", "BF16x", "F64", "I16", "U8", "", "f16", None, 1, [], "F16" * 200)],
    *[entry_change("data_offsets", lambda v, new=new: new)
      for new in ([], [0], [0, 6, 6], {}, None, "06", [6, 0])],
    lambda header: header[NAME].pop("dtype"),
    lambda header: header[NAME].update(extra=1),
    lambda header: header.update({NAME: []}),
    lambda header: header.update({NAME: None}),
    lambda header: header.pop(NAME),
])
def test_damaged_entries_are_refused_by_name(change: Callable[[Header], Any], good: bytes,
                                             tmp_path: Path) -> None:
    header, body = split(good)
    change(header)
    sentence = outcome(joined(header, body), tmp_path / "m.safetensors")
    # Moving a range uncovers or overlaps the neighbour, which is then the one named.
    assert "attn_gate" in sentence or "data_offsets" in sentence


def test_ranges_outside_the_file_and_over_each_other(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for start, stop in ((10**9, 10**9 + 6), (6, 0), (2**62, 2**62 + 6)):
        header, body = split(good)
        header[NAME]["data_offsets"] = [start, stop]
        assert "lie outside" in outcome(joined(header, body), path)
    header, body = split(good)
    header[NAME]["data_offsets"] = [0, 6]
    assert "overlap" in outcome(joined(header, body), path)
    header, body = split(good)
    begin, end = header[NAME]["data_offsets"]
    del header[NAME]
    assert f"gap of {end - begin} bytes" in outcome(joined(header, body), path)


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    tensors = make_sample(SMALL, 0)
    write_checkpoint(tmp_path / "m", SMALL, tensors, dtype="bfloat16")
    checkpoint = read_checkpoint(tmp_path / "m")
    for name, array in tensors.items():
        read = checkpoint.tensors[name]
        assert read.dtype == np.float32 and not np.any(read.view(np.uint32) & 0xFFFF)
        np.testing.assert_allclose(read, array, rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize(("header", "words"), [
    (b"", "isn't a JSON object"),
    (b"[]", "isn't a JSON object"),
    (b"{", "valid JSON"),
    (b'{"a": }', "valid JSON"),
    (b'{"\xff": 1}', "UTF-8"),
    (b'{"a":' + b"[" * 30000 + b"]" * 30000 + b"}", "nested"),
    (b'{"a": {"dtype": "F16"}, "a": 1}', "twice"),
    (b'{"__metadata__": []}', "__metadata__"),
    (b'{"__metadata__": {"format_version": 2}}', "__metadata__"),
    (b'{"__metadata__": {"format_version": "1"}}', "format_version 1"),
    (b'{"__metadata__": {"format_version": "two"}}', "whole number"),
    (b'{"__metadata__": {"format_version": "' + b"9" * 5000 + b'"}}', "whole number"),
    (b"{}", "no format_version"),
    (b'{"__metadata__": {"format_version": "2", "config": "[]"}}', "config"),
    (b'{"__metadata__": {"format_version": "2", "config": "{"}}', "config"),
    (b'{"__metadata__": {"format_version": "2", "config": "{\\"d_model\\": 1e999}"}}', "d_model"),
    (b'{"__metadata__": {"format_version": "2", "config": "\\ud800"}}', "config"),
    (b'{"a\\nb": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', "impossible name"),
    (b'{"": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', "impossible name"),
    (b'{"lora/x/A": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', "adapter"),
    (b'{"n": ' + b"1" * 10000 + b"}", "valid JSON"),
])
def test_damaged_headers(header: bytes, words: str, tmp_path: Path) -> None:
    assert words in outcome(joined(header, b""), tmp_path / "m.safetensors")


@pytest.mark.parametrize("length", [0, 1, 2**64 - 1, 2**63, None])
def test_the_header_length(length: int | None, good: bytes, tmp_path: Path) -> None:
    real = int.from_bytes(good[:8], "little")
    for value in [real + 1, real - 1, len(good) - 8, len(good) - 7] if length is None else [length]:
        assert "header" in outcome(value.to_bytes(8, "little") + good[8:], tmp_path / "m.safetensors")


def test_a_header_beyond_reason_is_not_parsed(tmp_path: Path) -> None:
    for filler in (b"x" * (5 << 20), b"x" * (1 << 17), b"[" * 30000, b'"},{' * 30000):
        data = joined(b'{"a":"' + filler + b'"}', b"")
        assert "header" in outcome(data, tmp_path / "m.safetensors")
    costly = joined(b'{"a":[' + b"{}," * 20000 + b"{}]}", b"")
    path = tmp_path / "m.safetensors"
    path.write_bytes(costly)
    with pytest.raises(BadInput, match="a: the header entry"):
        read_checkpoint(path)
    # The same text in a larger file must stay within twice that file.
    assert "follow" in outcome(joined(b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
                                      + b" " * 60000, bytes(1 << 20)), path)


def test_truncation_and_trailing_bytes(good: bytes, tmp_path: Path) -> None:
    body = int.from_bytes(good[:8], "little") + 8
    for length in [*range(16), *range(16, len(good), 9973), body - 1, body, body + 1, len(good) - 1]:
        assert outcome(good[:length], tmp_path / "m.safetensors")
    assert "1 bytes follow" in outcome(good + b"\0", tmp_path / "m.safetensors")


def test_random_damage_never_escapes(good: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    end = int.from_bytes(good[:8], "little") + 8
    for _ in range(200):
        data = bytearray(good)
        for position in rng.integers(0, end, 3):
            data[position] = rng.integers(0, 256)
        outcome(bytes(data), tmp_path / "m.safetensors")


def with_tensor(good: bytes, name: str, dtype: str = "F16") -> bytes:
    header, body = split(good)
    size = {"F16": 2, "I64": 8}[dtype]
    header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [len(body), len(body) + size]}
    return joined(header, body + bytes(size))


def test_unknown_missing_and_ignored_tensors(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert "no place" in outcome(with_tensor(good, "stack/surprise"), path)
    assert "Whistle" in outcome(with_tensor(good, "encoder/x"), path)
    assert outcome(with_tensor(good, "mtp_0/kernel", "I64"), path) == ""
    assert "mtp_0/kernel" not in read_checkpoint(path).tensors
    header, body = split(good)
    config = json.loads(header["__metadata__"]["config"])
    header["__metadata__"]["config"] = json.dumps(config | {"vocab_size": 255})
    assert "embedding/embedding" in outcome(joined(header, body), path)
    header["__metadata__"]["config"] = json.dumps(config | {"engram_layers": [0, 1]})
    assert "missing" in outcome(joined(header, body), path)


def test_wrong_generation(good: bytes, tmp_path: Path) -> None:
    header, body = split(good)
    config = json.loads(header["__metadata__"]["config"])
    del config["qk_head_dim"]
    header["__metadata__"]["config"] = json.dumps(config | {"attn_dim": 192})
    assert "Needle 2" in outcome(joined(header, body), tmp_path / "m.safetensors")


def test_an_integer_tensor_is_refused(good: bytes, tmp_path: Path) -> None:
    header, body = split(good)
    header[NAME]["dtype"] = "I16"
    assert "I16" in outcome(joined(header, body), tmp_path / "m.safetensors")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for protocol in range(6):
        sentence = outcome(pickle.dumps({"a": np.zeros(3)}, protocol=protocol), path)
        assert "pickle" in sentence if protocol >= 2 else "neither" in sentence
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    assert "zip" in outcome(path.read_bytes(), path)
    assert "GGUF" in outcome(b"GGUF" + bytes(100), path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    assert "pointer" in outcome(pointer, path)
    assert "neither" in outcome(b"hello", path)
    path.write_bytes(b"")
    with pytest.raises(BadInput, match="empty"):
        read_checkpoint(path)
    with pytest.raises(BadInput, match="folder"):
        read_checkpoint(tmp_path)
    with pytest.raises(BadInput, match="no such file"):
        read_checkpoint(tmp_path / "absent")
    with pytest.raises(BadInput, match="regular file"):
        read_checkpoint("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="regular file"):
        read_checkpoint(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BadInput, match="can't be read"):
        read_checkpoint(tmp_path / "loop")
    with pytest.raises(BadInput):
        read_checkpoint("nul\0byte")


def test_values_without_a_float16_form_are_refused(tmp_path: Path) -> None:
    tensors = {name: array.astype(np.float32) for name, array in make_sample(SMALL, 0).items()}
    tensors["embedding/embedding"][3, 4] = 1e5
    path = tmp_path / "m.safetensors"
    with pytest.raises(BadInput, match=r"embedding/embedding.*float16"):
        write_checkpoint(path, SMALL, tensors)
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(path, SMALL, tensors, dtype="float32")
    assert read_checkpoint(path).tensors["embedding/embedding"][3, 4] == np.float32(1e5)
    with pytest.raises(UsageError, match="int8"):
        write_checkpoint(path, SMALL, tensors, dtype="int8")


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_survives_the_file(name: str, tmp_path: Path) -> None:
    write_sample(tmp_path / "m", VARIANTS[name], 2)
    assert read_checkpoint(tmp_path / "m").geometry == VARIANTS[name]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't write there"):
        write_sample(tmp_path / "absent" / "m", SMALL, 0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="couldn't be written"):
        write_sample(tmp_path / "folder", SMALL, 0)
    assert [item.name for item in tmp_path.iterdir()] == ["folder"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.errors import UsageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    write_sample(Path(sys.argv[1]), SMALL, 0)
except UsageError as error:
    assert "couldn't be written" in error.sentence
    raise SystemExit(7)
"""


def test_running_out_of_space_leaves_nothing_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"earlier")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=False)
    assert done.returncode == 7
    assert [item.name for item in tmp_path.iterdir()] == ["m.safetensors"]
    assert path.read_bytes() == b"earlier"
