"""Codes are read back from finished packages, and a change of any part of them is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("coremltools")

from needle_export.targets.claims import coded_name, identifier
from needle_export.targets.coreml.contract import FILE_NAME
from needle_export.targets.coreml.evaluate import load_package
from needle_export.targets.coreml.target import CoremlTarget
from tests.support.coded_builds import Coded, unpacked
from tests.support.coreml_tamper import RECORD
from tests.targets.coreml.packages import WEIGHTS, operations, read_spec, write_spec

TENSOR = "stack/layers/block/self_attn/out_proj/kernel"
OUT = "layers.1.attention.out_proj"


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    return Coded(tmp_path_factory.mktemp("coded"))


@pytest.fixture
def fault(coded, tmp_path):
    return lambda how: coded.fault("coreml", tmp_path / "copy", lambda folder: how(folder / FILE_NAME))


def function_of(package):
    return load_package(package).functions["decode"]


def maker(function, name):
    start = identifier(coded_name(name))
    return next(o for o in function.ops if o.name.startswith(start))


def parts(package, name):
    """Indices, levels and norms of a matrix, as constants with offsets."""
    function = function_of(package)
    made = {n: o for o in function.ops for n, _ in o.outputs}

    def value(given):
        return made[given].inputs["val"][0] if isinstance(given, str) else given

    table = maker(function, name)
    product = next(o for o in function.ops if o.type == "matmul" and table.outputs[0][0] in o.inputs["y"])
    times = next(o for o in function.ops if o.type == "mul" and product.outputs[0][0] in o.inputs["x"])
    cast = made[times.inputs["y"][0]]
    return value(table.inputs["indices"][0]), value(table.inputs["lut"][0]), value(cast.inputs["x"][0])


def flip(package, value, at):
    array = np.memmap(package / WEIGHTS, "u1", "r+", value.offset + RECORD, value.type.bytes)
    array[at] ^= 1
    array.flush()


def test_every_matrix_in_codes_is_compared(coded):
    found = coded.compared("coreml")
    assert found.faults == []
    _, reference, made = coded.get("coreml")
    codes = {key for key, wanted in reference.items() if wanted.dtype.startswith("codes") and wanted.used[0]}
    assert codes and codes <= set(found.covered) and all(found.covered[key].all() for key in codes)
    held = sum(w.bytes for w in made.weights if w.dtype.startswith(("codebook", "cq")))
    assert held <= found.bytes


def test_what_is_read_is_what_the_container_holds(coded):
    read = {str(m.claim): m for m in CoremlTarget().read_matrices(coded.get("coreml")[0]) if m.form.startswith("codes")}
    for claim, name in ((OUT, f"{TENSOR}#1"), ("embedding", "embedding/embedding")):
        levels, norms = unpacked(coded.checkpoint, name)
        assert np.array_equal(read[claim].values, levels) and np.array_equal(read[claim].scales, norms)
    # Looked up and multiplied by, in every function.
    assert len(read["embedding"].places) >= 2


def test_a_flipped_index_is_found(fault):
    found = fault(lambda package: flip(package, parts(package, OUT)[0], 4 * 5 + 1))
    assert re.match(rf"{TENSOR} of block 1 \(content\): 1 of 96 rows differ, row 5 first, where 1 of 256 values", found)


def test_a_changed_norm_is_found(fault):
    found = fault(lambda package: flip(package, parts(package, OUT)[2], 2 * (96 * 3 + 7)))
    assert re.match(rf"{TENSOR} of block 1 .*: 1 of 96 rows differ, row 7 first, whose norm of columns 24 ", found)


def test_a_changed_table_of_levels_is_found(fault):
    found = fault(lambda package: flip(package, parts(package, OUT)[1], 4 * 7))
    assert re.match(r"\S+ .*rows differ, row \d+ first, where \d+ of \d+ values", found)


def test_two_matrices_in_each_others_place_are_found(fault):
    def exchange(package, kinds):
        pairs = list(zip(parts(package, OUT), parts(package, OUT.replace("1", "0", 1)), strict=True))
        places = {}
        for kind in kinds:
            one, other = (value.offset for value in pairs[kind])
            places |= {one: other, other: one}
        model = read_spec(package)
        for name in model.mlProgram.functions:
            for each in operations(model, name):
                for value in _files(each):
                    value.offset = places.get(value.offset, value.offset)
        write_spec(package, model)

    found = fault(lambda package: exchange(package, (0, 2)))
    assert re.match(rf"{TENSOR} of block \d .*: 96 of 96 rows .* which holds row 0 of {TENSOR}", found)


def test_norms_of_another_matrix_are_found(fault):
    def change(package):
        model = read_spec(package)
        mine, other = (parts(package, OUT.replace("1", layer, 1))[2].offset for layer in "10")
        for each in operations(model, "decode"):
            for value in _files(each):
                value.offset = other if value.offset == mine else value.offset
        write_spec(package, model)

    found = fault(change)
    assert TENSOR in found and "whose norm of columns 0 and on is" in found


def _files(operation):
    """Where an operation's constants lie in the weight file."""
    values = [*operation.attributes.values()]
    values += [a.value for given in operation.inputs.values() for a in given.arguments if a.HasField("value")]
    return [v.blobFileValue for v in values if v.HasField("blobFileValue")]
