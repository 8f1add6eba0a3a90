"""The manifest: round trip, strictness, and docs/manifest.md, which says all about it and nothing that isn't so."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from needle_export.errors import BadInput
from needle_export.report.manifest import (
    FORMAT,
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    Generation,
    Manifest,
    ManifestFile,
    Prompt,
    PromptPart,
    SpecialIds,
    TokenizerInfo,
    dump_manifest,
    listed_by_manifest,
    load_manifest,
)
from tests.support.reports import make_artifact, make_report
from tests.unit.report.test_documented import inner_paths

DOC = (Path(__file__).parents[3] / "docs" / "manifest.md").read_text(encoding="utf-8")


def make_manifest(**changes: Any) -> Manifest:
    report = make_report()
    artifact = make_artifact()
    given: dict[str, Any] = {
        "format": FORMAT, "schema": MANIFEST_SCHEMA, "tool": report.tool, "checkpoint": report.checkpoint,
        "target": "onnx", "weights": "int4", "cache": "fp32", "context": 64, "status": artifact.status,
        "files": (ManifestFile("a/model.bin", "model", 3, "0" * 64), ManifestFile("loop.py", "decoder", 1, "1" * 64)),
        "io": {"inputs": []},
        "tokenizer": TokenizerInfo("tokenizer.model", "sentencepiece", "beside", None, 20, False, True, False),
        "special_ids": SpecialIds(0, 1, 2, 3, {"<think>": 6}),
        "prompt": Prompt((2,), (), (PromptPart("a", None), PromptPart(None, "query")), "<", ">"),
        "generation": Generation("greedy", 256, (5, 1)), "runtimes": artifact.runtimes, "versions": {"numpy": "2"},
    }  # fmt: skip
    return Manifest(**{**given, **changes})


def raw_manifest() -> Any:
    return json.loads(dump_manifest(make_manifest()))


def write(folder: Path, raw: Any) -> Path:
    (folder / MANIFEST_NAME).write_text(raw if isinstance(raw, str) else json.dumps(raw), encoding="utf-8")
    return folder


@pytest.mark.parametrize("tokenizer", [make_manifest().tokenizer, None])
def test_a_manifest_survives_json(tmp_path: Path, tokenizer: TokenizerInfo | None) -> None:
    manifest = make_manifest(tokenizer=tokenizer)
    (tmp_path / MANIFEST_NAME).write_bytes(dump_manifest(manifest))
    assert load_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(new=1), "this key isn't part of a manifest"),
        (lambda m: m.pop("prompt"), "prompt"),
        (lambda m: m.update(schema=2), "schema 2, and this version reads 1"),
        (lambda m: m.update(format="other"), "isn't a manifest of needle-export"),
        (lambda m: m["files"][0].update(name="../x"), "inside the report's folder"),
        (lambda m: m["files"][0].update(role="mine"), "files[0].role"),
        (lambda m: m["files"].append(m["files"][0]), "a file is listed twice"),
        (lambda m: m["prompt"]["request"][0].update(insert="query"), "either a text or something to insert"),
        (lambda m: m["prompt"]["request"][1].update(insert="name"), "prompt.request[1].insert"),
        (lambda m: m["generation"].update(method="beam"), "generation.method"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Any, said: str) -> None:
    raw = raw_manifest()
    change(raw)
    with pytest.raises(BadInput) as refusal:
        load_manifest(write(tmp_path, raw))
    assert said in refusal.value.sentence and MANIFEST_NAME in refusal.value.sentence


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", '{"format": 1}'])
def test_another_file_is_no_manifest(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    for read in (load_manifest, listed_by_manifest):
        with pytest.raises(BadInput, match=MANIFEST_NAME):
            read(tmp_path)


def test_files_of_another_schema_are_known(tmp_path: Path) -> None:
    assert listed_by_manifest(tmp_path) == frozenset()
    with pytest.raises(BadInput, match="there is no such manifest"):
        load_manifest(tmp_path)
    raw = copy.deepcopy(raw_manifest())
    raw.update(schema=99, more={})
    assert listed_by_manifest(write(tmp_path, raw)) == {"a/model.bin", "loop.py", MANIFEST_NAME}


def test_every_key_is_documented_and_no_other() -> None:
    keys = DOC.split("\n## Keys\n")[1].split("\n## ")[0]
    table = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", keys, re.MULTILINE))
    paths = {f.name for f in dataclasses.fields(Manifest)} | {
        path
        for name, hint in get_type_hints(Manifest).items()
        if name != "checkpoint"
        for path in inner_paths(hint, name)
    }
    assert set(table) | {"tool"} == paths
    # Of a part of a prompt one of two is null.
    nullable = {path for path, kind in table.items() if "null" in kind}
    hints = {f"{name}.{key}": hint for name, cls in (("tokenizer", TokenizerInfo), ("prompt", Prompt))
             for key, hint in get_type_hints(cls).items()}  # fmt: skip
    for path, hint in hints.items():
        assert (type(None) in get_args(hint)) == (path in nullable), path


def test_the_example_of_files_is_what_lies_there() -> None:
    named = set(re.findall(r"^\| `([^`]+)` \|", DOC.split("\n## ")[0], re.MULTILINE))
    assert named == {"manifest.json", "tokenizer.model", "tokenizer.bin", "loop.py", "decoder.py"}
