"""needle-export schemes: what a target can hold is what build takes, and everything else has a reason."""

from __future__ import annotations

import json

import pytest

from needle_export.config.options import SCHEMES, TARGETS, WEIGHTS, BuildOptions
from needle_export.config.schemes import ALL
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
            assert BuildOptions("c", "out", target=target, weights=scheme["name"]).weights == scheme["name"]  # type: ignore[arg-type]  # a path isn't needed
        else:
            with pytest.raises(UsageError, match=f"no {scheme['name']}: {told['why_not']}"):
                BuildOptions("c", "out", target=target, weights=scheme["name"])  # type: ignore[arg-type]  # as above
    assert tuple(s["name"] for s in listed) == WEIGHTS
    assert run("schemes", "--target", "nope").exit_code == 2


def test_the_table(run: Run) -> None:
    page = run("schemes")
    assert page.exit_code == 0 and page.stdout.startswith("\nWeight schemes\n")
    words = " ".join(page.stdout.split())
    assert all(name in words for name in (*WEIGHTS, *TARGETS)) and "no: no kernel" in words
    narrow = run("schemes", "--target", "coreml").stdout
    assert "coreml" in narrow and "onnx " not in narrow.splitlines()[2]
    assert SCHEMES["coreml"] == WEIGHTS
