"""needle-export schemes: what a target can hold is what build takes, and everything else has a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.config.options import (
    CACHE_FORMS,
    CACHES,
    OLD_SYSTEM_SCHEMES,
    OWN_OPS_SCHEMES,
    SCHEMES,
    TARGETS,
    WEIGHTS,
    BuildOptions,
)
from needle_export.config.schemes import ALL
from needle_export.config.schemes import CACHES as FORMATS
from needle_export.errors import UsageError
from tests.cli.conftest import Run


def test_every_scheme_is_held_or_has_a_reason() -> None:
    assert [s.name for s in ALL] == list(WEIGHTS) and len(set(WEIGHTS)) == len(WEIGHTS)
    for scheme in ALL:
        assert set(scheme.targets) == set(TARGETS)
        for target, held in scheme.targets.items():
            assert bool(held.form) != bool(held.why_not), (scheme.name, target)
            assert held.form or not held.inputs


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_listed_is_what_build_takes(run: Run, target: str) -> None:
    listed = json.loads(run("schemes", "--target", target, "--json").stdout)["schemes"]
    for scheme in listed:
        told = scheme["targets"].pop(target)
        assert not scheme["targets"]
        if told["form"]:
            assert BuildOptions("c", Path("out"), target=target, weights=scheme["name"]).weights == scheme["name"]
        else:
            with pytest.raises(UsageError, match=f"no {scheme['name']}: {told['why_not']}"):
                BuildOptions("c", Path("out"), target=target, weights=scheme["name"])
    assert tuple(s["name"] for s in listed) == WEIGHTS
    assert run("schemes", "--target", "nope").exit_code == 2


@pytest.mark.parametrize("target", TARGETS)
def test_caches_that_are_listed_are_what_build_takes(run: Run, target: str) -> None:
    listed = json.loads(run("schemes", "--target", target, "--json").stdout)["caches"]
    assert tuple(c["name"] for c in listed) == CACHE_FORMS == tuple(c.name for c in FORMATS)
    held = {c["name"]: c["targets"].pop(target) for c in listed}
    assert not any(c["targets"] for c in listed)
    for name, told in held.items():
        assert bool(told["form"]) != bool(told["why_not"]) and not told["inputs"]
        if told["form"]:
            assert BuildOptions("c", Path("out"), target=target, cache=name).cache == name
        else:
            with pytest.raises(UsageError, match=f"no caches of {name}: {told['why_not']}"):
                BuildOptions("c", Path("out"), target=target, cache=name)
    own = BuildOptions("c", Path("out"), target=target).cache
    assert own == CACHES[target][0] == {"coreml": "fp16"}.get(target, "fp32")


def test_the_table(run: Run) -> None:
    page = run("schemes")
    assert page.exit_code == 0 and page.stdout.startswith("\nWeight schemes\n")
    words = " ".join(page.stdout.split())
    assert all(name in words for name in (*WEIGHTS, *TARGETS)) and "no: no kernel" in words
    assert "Caches" in words and all(name in words for name in CACHE_FORMS)
    narrow = run("schemes", "--target", "coreml").stdout
    assert "coreml" in narrow and "onnx " not in narrow.splitlines()[2]
    assert set(WEIGHTS) - set(SCHEMES["coreml"]) == {"int2"}


def test_the_numbers_of_forms_are_those_that_targets_use() -> None:
    integers = pytest.importorskip("needle_export.targets.onnx.integers")
    store = pytest.importorskip("needle_export.targets.coreml.store")
    held = {(s.name, t): h.form + h.inputs for s in ALL for t, h in s.targets.items()}
    assert integers.BITS == {"int8": 8, "int4": 4, "int2": 2} and set(integers.BITS) == set(OWN_OPS_SCHEMES)
    for name in OWN_OPS_SCHEMES:
        assert held[name, "onnx"].count(f"{integers.BLOCK} columns") == 2 and "opset 24 only" in held[name, "onnx"]
    assert f"for {store.BLOCK} columns" in held["int4", "coreml"]
    assert f"for {store.GROUP} rows" in held["palette4", "coreml"]
    needs = {s.name for s in ALL if "from iOS 18 on" in s.targets["coreml"].form}
    assert needs == set(SCHEMES["coreml"]) - set(OLD_SYSTEM_SCHEMES)
