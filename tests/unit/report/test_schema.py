"""The report's JSON: round trip, strictness, and what the values refuse."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.errors import BadInput
from needle_export.report.schema import (
    REPORT_NAME,
    SCHEMA,
    FileInfo,
    Fusion,
    Nodes,
    StateBytes,
    dump_report,
    listed_files,
    load_report,
    parse_report,
)
from needle_export.report.sizes import Size, TensorBytes
from tests.support.reports import make_artifact, make_report, make_size

Raw = dict[str, Any]


def raw_report() -> Raw:
    raw: Raw = json.loads(dump_report(make_report()))
    return raw


def parse(raw: object) -> object:
    return parse_report(json.dumps(raw).encode(), "r.json")


def test_a_report_survives_json() -> None:
    report = make_report(make_artifact(), make_artifact(latency=None, weights="fp16"))
    assert parse_report(dump_report(report)) == report


def test_the_bytes_do_not_depend_on_the_order_of_dictionaries() -> None:
    a = make_report(options={"a": 1, "b": {"c": 2, "d": 3}})
    b = make_report(options={"b": {"d": 3, "c": 2}, "a": 1})
    assert dump_report(a) == dump_report(b)
    assert dump_report(a).endswith(b"}\n")
    assert dump_report(a).startswith(b'{\n "schema": 5,\n "tool"')


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    report = make_report(options={"f": np.float32(0.5), "i": np.int64(3), "d": np.float64(2.5)})
    assert json.loads(dump_report(report))["options"] == {"f": 0.5, "i": 3, "d": 2.5}


@pytest.mark.parametrize("value", [math.inf, math.nan, np.float32("inf")])
def test_numbers_that_json_lacks_are_refused_by_name(value: float) -> None:
    report = make_report(make_artifact(parity={"prefill": [{"sqnr_db": value}]}))
    with pytest.raises(ValueError, match=r"artifacts\[0\]\.parity\.prefill\[0\]\.sqnr_db"):
        dump_report(report)


@pytest.mark.parametrize("value", [{1: 2}, b"bytes", {1, 2}])
def test_values_without_a_json_form_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"options\.x"):
        dump_report(make_report(options={"x": value}))


def paths_of(value: object, path: str = "") -> list[tuple[str, list[str | int]]]:
    """Every key of a JSON object that the schema fixes, as (text, steps)."""
    free = {"geometry", "options", "budgets", "parity", "io", "versions", "by_role", "by_part", "by_op"}
    named = {"fusion", "signatures"}  # free names, and what stands below them is fixed
    found: list[tuple[str, list[str | int]]] = []

    def walk(node: object, text: str, steps: list[str | int]) -> None:
        if isinstance(node, dict):
            for key, item in node.items():
                here = f"{text}.{key}" if text else key
                found.append((here, [*steps, key]))
                if key in named:
                    for name, inner in item.items():
                        walk(inner, f"{here}.{name}", [*steps, key, name])
                elif key not in free:
                    walk(item, here, [*steps, key])
        elif isinstance(node, list):
            for index, item in enumerate(node):
                walk(item, f"{text}[{index}]", [*steps, index])

    walk(value, path, [])
    return found


ALL_PATHS = paths_of(raw_report())


def parent_of(raw: Raw, steps: list[str | int]) -> Any:
    node: Any = raw
    for step in steps[:-1]:
        node = node[step]
    return node


@pytest.mark.parametrize(("text", "steps"), ALL_PATHS, ids=[text for text, _ in ALL_PATHS])
def test_every_missing_key_is_named(text: str, steps: list[str | int]) -> None:
    raw = raw_report()
    del parent_of(raw, steps)[steps[-1]]
    with pytest.raises(BadInput) as caught:
        parse(raw)
    if text != "schema":  # without it, it is no report at all
        assert caught.value.where == f"r.json: {text}"
        assert "missing" in caught.value.what


@pytest.mark.parametrize(("text", "steps"), ALL_PATHS, ids=[text for text, _ in ALL_PATHS])
def test_every_value_of_a_wrong_type_is_named(text: str, steps: list[str | int]) -> None:
    raw = raw_report()
    old = parent_of(raw, steps)[steps[-1]]
    parent_of(raw, steps)[steps[-1]] = [] if not isinstance(old, list) else {}
    with pytest.raises(BadInput) as caught:
        parse(raw)
    if text != "schema":
        assert caught.value.where == f"r.json: {text}"
        assert caught.value.what.startswith("needs ")


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    raw = raw_report()
    raw["artifacts"][0]["size"]["total_byte"] = 1
    with pytest.raises(BadInput, match=r"artifacts\[0\]\.size\.total_byte: .*did you mean total_bytes\?"):
        parse(raw)


def change(*steps: str | int, to: object) -> Callable[[Raw], None]:
    def apply(raw: Raw) -> None:
        parent_of(raw, list(steps))[steps[-1]] = to
    return apply


ARTIFACT = ("artifacts", 0)


@pytest.mark.parametrize(("spoil", "message"), [
    (change(*ARTIFACT, "status", to="verified"), "artifacts[0].status: needs 'verified-on-runtime' or"),
    (change(*ARTIFACT, "latency", "kind", to="guessed"), "latency.kind: needs 'measured' or 'estimated'"),
    (change(*ARTIFACT, "size", "total_bytes", to=1), "artifacts[0].size: the roles and the overhead make"),
    (change(*ARTIFACT, "size", "overhead_bytes", to=-1), "overhead_bytes is -1, below zero"),
    (change(*ARTIFACT, "size", "by_role", "routing", to=True), "routing: needs a whole number, not true"),
    (change(*ARTIFACT, "size", "by_role", "routing", to=1.0), "routing: needs a whole number, not 1.0"),
    (change(*ARTIFACT, "size", "compressed_bytes", to=2149), "compressed_bytes is 2149, more than the files' 2148"),
    (change(*ARTIFACT, "size", "compressed_bytes", to=-1), "compressed_bytes is -1, below zero"),
    (change(*ARTIFACT, "size", "tensors", 0, "bytes", to=538), "artifacts[0].size: the tensors make"),
    (change(*ARTIFACT, "size", "tensors", 0, "by_layer", 0, to=4000), "tensors[0]: its blocks make"),
    (change(*ARTIFACT, "size", "tensors", 0, "by_layer", 0, to=-1), "layer 0 is -1, below zero"),
    (change(*ARTIFACT, "files", to=[]), "artifacts[0]: the files have 0 bytes, but size says"),
    (change(*ARTIFACT, "files", 0, "name", to="../x"), "isn't the name of a file inside"),
    (change(*ARTIFACT, "files", 0, "sha256", to="ABC"), "isn't a SHA-256"),
    (change(*ARTIFACT, "nodes", "decode", to=31), "by_op makes 30 nodes, but decode has 31"),
    (change(*ARTIFACT, "state_bytes", "total_bytes", to=1), "the parts make 700 bytes, not 1"),
    (change(*ARTIFACT, "signatures", "decode", "partitions", to=-1), "signatures.decode: partitions is -1, below"),
    (change(*ARTIFACT, "signatures", "decode", "left", 0, "splits", to=-2), "left[0]: splits is -2, below zero"),
    (change(*ARTIFACT, "runtimes", 0, "reproduced", to=1), "runtimes[0].reproduced: needs true or false, not 1"),
    (change(*ARTIFACT, "gpu_lint", 0, "count", to="2"), "gpu_lint[0].count: needs a whole number, not"),
    (change(*ARTIFACT, "latency", "load_ms", to=10**400), "load_ms: needs a number of sensible size"),
    (change("checkpoint", "random", to=0), "checkpoint.random: needs true or false, not 0"),
    (change("checkpoint", "layers", to=None), "checkpoint.layers: needs a whole number, not null"),
    (change("schema", to=3), "the report has schema 3, and this version reads 5"),
    (change("schema", to=6), "the report has schema 6, and this version reads 5"),
    (change("schema", to=True), "this isn't a report of needle-export"),
])
def test_values_that_cannot_be_are_named(spoil: Callable[[Raw], None], message: str) -> None:
    raw = raw_report()
    spoil(raw)
    with pytest.raises(BadInput) as caught:
        parse(raw)
    assert message in str(caught.value)
    assert str(caught.value).startswith("r.json")


def test_none_is_allowed_only_where_something_may_be_unknown() -> None:
    raw = raw_report()
    for key in ("load_ms", "first_ms", "decode", "peak_rss_bytes"):
        raw["artifacts"][0]["latency"][key] = None
    raw["artifacts"][0]["nodes"]["prefill"] = None
    for key in ("loaded", "reproduced", "max_abs"):
        raw["artifacts"][0]["runtimes"][0][key] = None
    raw["artifacts"][0]["fusion"]["attention"]["left"][0]["layer"] = None
    parse(raw)
    broken = copy.deepcopy(raw)
    broken["artifacts"][0]["nodes"]["decode"] = None
    with pytest.raises(BadInput, match=r"nodes\.decode"):
        parse(broken)


@pytest.mark.parametrize("data", [
    b"", b"{", b"[]", b"null", b'"schema"', b"\xff\xfe", b'{"schema": NaN}', b"[" * 100_000,
    b'{"schema": 3, "schema": 3}', b'{"schema": ' + b"1" * 5000 + b"}", b'{"coverage": 1}',
])
def test_what_is_no_report_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(BadInput) as caught:
        parse_report(data, "r.json")
    assert "\n" not in str(caught.value)
    assert caught.value.where.startswith("r.json")


def test_a_report_is_found_in_its_folder_or_by_its_name(tmp_path: Path) -> None:
    report = make_report()
    (tmp_path / REPORT_NAME).write_bytes(dump_report(report))
    assert load_report(tmp_path) == load_report(tmp_path / REPORT_NAME) == report


def test_a_report_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such report"):
        load_report(tmp_path)
    (tmp_path / REPORT_NAME).mkdir()
    with pytest.raises(BadInput, match="can't be read"):
        load_report(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as handle:
        handle.truncate(1 << 40)  # sparse: costs no disk, and must cost no memory
    with pytest.raises(BadInput, match="far too large"):
        load_report(huge)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\0b",
                                  REPORT_NAME])
def test_file_names_stay_inside_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="inside the report's folder"):
        FileInfo(name, 0, "0" * 64)
    FileInfo("model.mlpackage/Data/weights.bin", 0, "0" * 64)


def test_a_tensor_may_be_listed_once_only() -> None:
    half = TensorBytes("stack/q", "routing", 2, ())
    with pytest.raises(ValueError, match="a tensor is listed twice"):
        Size(4, 4, {"routing": 4}, 0, (half, half))


@pytest.mark.parametrize("schema", [1, 2, SCHEMA, SCHEMA + 1])
def test_files_are_known_whatever_the_schema(tmp_path: Path, schema: int) -> None:
    raw = raw_report()
    raw["schema"] = schema
    del raw["artifacts"][0]["size"], raw["checkpoint"]
    raw["artifacts"][0]["new"] = raw["new"] = {"a": [1]}
    (tmp_path / REPORT_NAME).write_text(json.dumps(raw))
    assert listed_files(tmp_path) == {"model.onnx", "model.onnx.data"}


@pytest.mark.parametrize("spoil", [
    change("tool", to=None), change("tool", "name", to="other"), change("schema", to="2"),
])
def test_files_of_no_report_of_ours_are_not_known(tmp_path: Path, spoil: Callable[[Raw], None]) -> None:
    raw = raw_report()
    spoil(raw)
    (tmp_path / REPORT_NAME).write_text(json.dumps(raw))
    with pytest.raises(BadInput, match="isn't a report of needle-export"):
        listed_files(tmp_path)


@pytest.mark.parametrize("artifacts", [None, 3, {}, [3], [{}], [{"files": 3}], [{"files": [3, {}, {"name": 4}]}]])
def test_a_report_of_ours_without_files_lists_none(tmp_path: Path, artifacts: object) -> None:
    (tmp_path / REPORT_NAME).write_text(json.dumps({**raw_report(), "artifacts": artifacts}))
    assert listed_files(tmp_path) == frozenset()


def test_a_file_may_be_listed_once_only() -> None:
    artifact = make_artifact()
    file = artifact.files[0]
    size = make_size(2 * file.bytes, {})
    with pytest.raises(ValueError, match="twice"):
        dataclasses.replace(artifact, files=(file, file), size=size)


@pytest.mark.parametrize("make", [
    lambda: make_size(-1, {"total_bytes": -1}, 0), lambda: Fusion(-1, 0), lambda: Nodes(None, -1, {}),
    lambda: StateBytes(0, {"a": -1, "b": 1}), lambda: Nodes(0, 0, {"decode": -1, "x": 1}),
])
def test_counts_are_not_negative(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="below zero"):
        make()
