"""docs/report.md says all about the schema, and nothing that isn't so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from needle_export.inspection import AdapterFacts, FileFacts, ModelFacts
from needle_export.measure.ledger import HeadShape, Rung
from needle_export.report.schema import SCHEMA, Artifact, CheckpointInfo, Report

DOC = (Path(__file__).parents[3] / "docs" / "report.md").read_text()


def key_paths(cls: type, prefix: str = "") -> set[str]:
    """Every key of a dataclass and those below it: a list adds [], a dictionary with free keys .*"""
    found = set()
    for name, hint in get_type_hints(cls).items():
        found.add(f"{prefix}{name}")
        found |= inner_paths(hint, f"{prefix}{name}")
    return found


def inner_paths(hint: Any, path: str) -> set[str]:
    if dataclasses.is_dataclass(hint):
        return key_paths(hint, f"{path}.")
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return inner_paths(args[0], f"{path}[]")
    if origin is dict:
        return inner_paths(args[1], f"{path}.*")
    return set().union(*(inner_paths(arg, path) for arg in args if arg is not type(None))) if args else set()


def documented(section: str) -> dict[str, str]:
    """Keys of a section's table, with their types."""
    text = DOC.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE))


def test_every_key_of_the_report_is_documented_and_no_other() -> None:
    top = {path for path in key_paths(Report) if not path.startswith(("checkpoint.", "artifacts[]."))}
    assert {*documented("The report"), "tool"} == top
    assert set(documented("checkpoint")) == key_paths(CheckpointInfo)
    assert set(documented("artifacts[]")) == key_paths(Artifact)


def test_what_may_be_null_is_documented() -> None:
    def nullable(cls: type, prefix: str = "") -> set[str]:
        found = set()
        for name, hint in get_type_hints(cls).items():
            if type(None) in get_args(hint):
                found.add(f"{prefix}{name}")
            for inner in (hint, *get_args(hint)):
                if dataclasses.is_dataclass(inner):
                    found |= nullable(inner, f"{prefix}{name}.")
        return found

    said = {key.replace("[]", "").replace(".*", "") for key, kind in documented("artifacts[]").items()
            if "or null" in kind}
    assert said == nullable(Artifact)
    assert not [kind for kind in documented("checkpoint").values() if "null" in kind]


def test_every_key_of_inspect_is_documented() -> None:
    text = DOC.split("\n## inspect --json\n")[1].split("\n## ")[0]
    for cls in (FileFacts, ModelFacts, AdapterFacts, HeadShape, Rung):
        for field in dataclasses.fields(cls):
            assert re.search(rf"\b{field.name}\b", text), field.name


def test_the_documented_version_is_this_one() -> None:
    assert f"version of this schema, {SCHEMA} |" in DOC
