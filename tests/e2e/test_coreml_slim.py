"""A Core ML specification holds nothing twice: constants, values that nothing reads, shapes and types on the way."""

from __future__ import annotations

import re

import numpy as np
import pytest

from needle_export.targets.coreml.evaluate.spec import Stored
from needle_export.targets.coreml.names import block_of
from tests.support.coreml_builds import package, uses

pytest.importorskip("coremltools")

BUILDS = [(w, "ios18") for w in ("fp32", "fp16", "int4", "palette4", "cq2")] + [("fp16", "ios17")]

#: What is found by its name: matrices by what they hold, and the last ops of blocks.
FOUND = re.compile(r"(rows|folded|codes)_o.*|stream_\d+_\d+(_\d)?")


@pytest.fixture(params=BUILDS, ids=["-".join(b) for b in BUILDS])
def every_function(request, packages):
    weights, system = request.param
    dist = packages.get(weights, os=system)[0]
    names = sorted(p.name for p in dist.glob("*.mlpackage"))
    return [f for name in names for f in package(dist, name).functions.values()]


def content(value):
    """What makes two constants one."""
    declared = (value.type.dtype, value.type.shape)
    if isinstance(value, Stored):
        return *declared, value.offset
    return *declared, value.value if isinstance(value.value, str) else np.asarray(value.value).tobytes()


def test_no_two_constants_of_a_function_are_equal(every_function):
    for function in every_function:
        held = [content(op.inputs["val"][0]) for op in uses(function, "const")]
        assert len(set(held)) == len(held) > 50


def test_everything_that_is_made_is_read(every_function):
    for function in every_function:
        read = {name for op in function.ops for given in op.inputs.values() for name in given if isinstance(name, str)}
        for op in function.ops:
            made = {name for name, _ in op.outputs}
            assert op.type == "write_state" or made & (read | set(function.outputs)), op.name


def test_shapes_and_types_are_changed_once(every_function):
    """No reshape of a reshape, and nothing is widened right behind its narrowing."""
    for function in every_function:
        makers = {name: op for op in function.ops for name, _ in op.outputs}
        for op in uses(function, "reshape", "cast"):
            before = makers.get(op.inputs["x"][0])
            assert before is None or before.type != op.type, op.name
        twice = [(op.type, *op.inputs["x"], op.outputs[0][1]) for op in uses(function, "reshape", "cast")]
        assert len(set(map(str, twice))) == len(twice)


def test_names_are_short_and_unique_however_they_are_capitalised(every_function):
    for function in every_function:
        made = [name for op in function.ops for name, _ in op.outputs]
        names = [*made, *function.inputs, *function.states]
        assert len({name.lower() for name in names}) == len(names)
        assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names)
        free = [name for name in made if name not in function.outputs and not FOUND.fullmatch(name)]
        inside = [name for name in free if block_of(name.partition("_")[0]) >= 0]
        assert len(inside) > len(free) / 2
        # A block's letter and two characters; results of one op that has several end in a number.
        assert max(len(name.partition("_")[0]) for name in inside) <= 3
        constants = [name for op in uses(function, "const") for name, _ in op.outputs if not FOUND.fullmatch(name)]
        assert max(map(len, constants)) <= 3 and max(map(len, free)) <= 24
