"""TOML files into frozen values: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from needle_export.config.shipped import shipped
from needle_export.config.strict import Strict, read_toml, validate
from needle_export.errors import BadInput


class Leaf(Strict):
    weight: int
    label: str = ""


class Branch(Strict):
    leaf: Leaf
    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, Leaf] | None = None
    amount: str | float | None = None


class Root(Strict):
    name: str
    branch: Branch | None = None
    branches: tuple[Branch, ...] = ()
    sizes: tuple[int, ...] = ()


GOOD = {"name": "r", "branch": {"leaf": {"weight": 1}}}


def refusal(raw: dict[str, object]) -> BadInput:
    with pytest.raises(BadInput) as caught:
        validate(Root, raw, "f.toml")
    return caught.value


def test_a_good_table_is_frozen() -> None:
    made = validate(Root, {**GOOD, "sizes": [1, 2]}, "f.toml")
    assert made.sizes == (1, 2) and made.branch is not None and made.branch.leaf == Leaf(weight=1)
    with pytest.raises(pydantic.ValidationError):
        made.name = "other"  # type: ignore[misc]  # that it can't be set is what is tested


@pytest.mark.parametrize(("raw", "where", "fix"), [
    ({"nmae": "r"}, "nmae", "did you mean name?"),
    ({"name": "r", "xyz": 1}, "xyz", "choose from name, branch, branches, sizes"),
    ({"name": "r", "branch": {"leaf": {"weight": 1}, "leafs": 1}}, "branch.leafs", "did you mean leaf?"),
    ({"name": "r", "branch": {"leaf": {"weight": 1, "lable": "x"}}}, "branch.leaf.lable", "did you mean label?"),
    ({"name": "r", "branches": [{"leaf": {"weight": 1}}, {"leaf": {"wieght": 1, "weight": 1}}]},
     "branches[2].leaf.wieght", "did you mean weight?"),
    ({"name": "r", "branch": {"leaf": {"weight": 1}, "leaves": [{"weight": 1, "labl": ""}]}},
     "branch.leaves[1].labl", "did you mean label?"),
    ({"name": "r", "branch": {"leaf": {"weight": 1}, "by_name": {"a": {"weight": 1, "labels": ""}}}},
     "branch.by_name.a.labels", "did you mean label?"),
])
def test_an_unknown_key_is_named_with_the_nearest(raw: dict[str, object], where: str, fix: str) -> None:
    error = refusal(raw)
    assert error.where == f"f.toml: {where}" and error.fix == fix
    assert error.what == "there is no such key"


@pytest.mark.parametrize(("raw", "where"), [
    ({}, "name"),
    ({"name": 1}, "name"),
    ({"name": "r", "sizes": [1, "2"]}, "sizes[2]"),
    ({"name": "r", "sizes": [1.5]}, "sizes[1]"),
    ({"name": "r", "branch": {"leaf": {"weight": True}}}, "branch.leaf.weight"),
    ({"name": "r", "branch": {"leaf": {"weight": "1"}}}, "branch.leaf.weight"),
    ({"name": "r", "branch": {"leaf": {"weight": 1}, "amount": []}}, "branch.amount"),
    ({"name": "r", "branch": 3}, "branch"),
])
def test_nothing_is_converted(raw: dict[str, object], where: str) -> None:
    error = refusal(raw)
    assert error.where == f"f.toml: {where}" and "\n" not in error.sentence and "pydantic" not in error.sentence


def test_dates_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("name = 2026-01-01\n")
    with pytest.raises(BadInput, match="dates and times"):
        read_toml(Root, path)


@pytest.mark.parametrize(("content", "said"), [
    (b"name = ", "isn't valid TOML"),
    (b"\xff\xfe", "isn't UTF-8"),
    (b"#" * (1 << 20) + b"\n", "far too large"),
    (b"x = " + b"[" * 5000 + b"]" * 5000, "isn't valid TOML"),
    (b"name = 'a'\nname = 'b'", "isn't valid TOML"),
])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "f.toml"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_toml(Root, path)
    assert said in caught.value.what and caught.value.where == str(path) and caught.value.exit_code == 3


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such file"):
        read_toml(Root, tmp_path / "absent.toml")
    with pytest.raises(BadInput, match="can't be read"):
        read_toml(Root, tmp_path)


def test_shipped_folders_have_files() -> None:
    for kind in ("devices", "recipes"):
        assert shipped(kind).is_dir()
    assert list(shipped("devices").glob("*.toml"))
