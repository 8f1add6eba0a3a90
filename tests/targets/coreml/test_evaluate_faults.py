"""Damage to a package is told in a sentence, or shows in what it computes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export.errors import BadInput, NeedleExportError, UsageError
from needle_export.targets.coreml.evaluate import Evaluator, load_package
from needle_export.targets.coreml.evaluate.call import UnknownOp
from needle_export.targets.coreml.inspect import describe_package
from tests.targets.coreml.packages import SPEC, WEIGHTS, Array, copied, operations, read_spec, whole, write_spec
from tests.targets.coreml.stepping import X, two_functions


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_functions(tmp_path_factory.mktemp("functions"))


# Damage that shows in results.


def both(path: Path) -> tuple[Array, Array]:
    evaluator = Evaluator(load_package(path))
    evaluator.run("prefill", {"x": X[:4], "slot": whole([0])})
    last = evaluator.run("decode", {"x": X[4:5], "slot": whole([4])})
    return last["out0"], last["out1"]


def test_every_flipped_bit_shows(package: Path, tmp_path: Path) -> None:
    """Of the values' higher bits; the lowest is below what a sum keeps. Every bit of a description is an error."""
    cache, row = both(package)
    path = copied(package, tmp_path / "flipped.mlpackage")
    raw = (path / WEIGHTS).read_bytes()
    records = load_package(path).weights
    (file,) = records.values()
    for record in file.records.values():
        for at in (record.start + 1, record.start + record.bytes - 1):
            (path / WEIGHTS).write_bytes(raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :])
            changed = both(path)
            assert (changed[0] != cache).any() and (changed[1] != row).any()
    for offset in file.records:
        for at in (*range(offset, offset + 4), offset + 4, offset + 8, offset + 16):
            (path / WEIGHTS).write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            with pytest.raises(BadInput, match=r"weight\.bin"):
                load_package(path)


def test_a_dropped_write_shows(package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "dropped.mlpackage")
    model = read_spec(path)
    ops = operations(model, "prefill")
    del ops[next(at for at, op in enumerate(ops) if op.type == "write_state")]
    write_spec(path, model)
    assert (both(path)[0] != both(package)[0]).any()


def test_two_constants_in_each_others_place_show(package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "swapped.mlpackage")
    model = read_spec(path)
    values = [
        op.attributes["val"].blobFileValue
        for op in operations(model, "decode")
        if op.type == "const" and len(op.attributes["val"].type.tensorType.dimensions) == 2
    ]
    values[0].offset, values[1].offset = values[1].offset, values[0].offset
    write_spec(path, model)
    assert np.abs(both(path)[1] - both(package)[1]).max() > 0.1


# Damage that is told.


def test_a_file_cut_short_anywhere_is_told(package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "cut.mlpackage")
    for name in (WEIGHTS, SPEC):
        raw = (path / name).read_bytes()
        for length in {0, 1, 32, 64, 100, len(raw) // 3, len(raw) // 2, len(raw) - 100, len(raw) - 1}:
            (path / name).write_bytes(raw[:length])
            with pytest.raises(BadInput) as caught:
                load_package(path)
            assert Path(name).name in caught.value.sentence and "\n" not in caught.value.sentence
        (path / name).write_bytes(raw)
    load_package(path)


def changed(package: Path, path: Path, change: Any) -> Path:
    model = read_spec(copied(package, path))
    change(model)
    write_spec(path, model)
    return path


def first(model: Any, type: str) -> Any:
    return next(op for op in operations(model, "decode") if op.type == type)


def stored(model: Any) -> Any:
    return next(
        op.attributes["val"]
        for op in operations(model, "decode")
        if op.type == "const" and op.attributes["val"].WhichOneof("value") == "blobFileValue"
    )


def set_offset(model: Any, offset: int) -> None:
    stored(model).blobFileValue.offset = offset


def bad_cases() -> dict[str, tuple[Any, str]]:
    def drop_function(model: Any) -> None:
        del model.mlProgram.functions["prefill"]

    def drop_op(model: Any) -> None:
        ops = operations(model, "decode")
        del ops[next(at for at, op in enumerate(ops) if op.type == "linear")]

    def other_size(model: Any) -> None:
        stored(model).type.tensorType.dimensions[0].constant.size += 1

    def other_type(model: Any) -> None:
        stored(model).type.tensorType.dataType = 11

    def elsewhere(model: Any) -> None:
        stored(model).blobFileValue.fileName = "@model_path/../../weights.bin"

    def unlisted(model: Any) -> None:
        stored(model).blobFileValue.fileName = "@model_path/other/weight.bin"

    def renamed(model: Any) -> None:
        model.description.functions[0].input[0].name = "renamed"

    def short(model: Any) -> None:
        value = next(
            op.attributes["val"].immediateValue.tensor.ints
            for op in operations(model, "decode")
            if op.type == "const" and op.attributes["val"].immediateValue.tensor.ints.values
        )
        del value.values[-1]

    return {
        "outside": (lambda model: set_offset(model, 1 << 40), "where none is described"),
        "between": (lambda model: set_offset(model, 65), "where none is described"),
        "missing function": (drop_function, "no function 'prefill'"),
        "missing op": (drop_op, "which nothing has made yet"),
        "other size": (other_size, "the program declares"),
        "other type": (other_type, "the program declares"),
        "elsewhere": (elsewhere, "outside the package"),
        "unlisted": (unlisted, "the manifest doesn't list"),
        "renamed": (renamed, "aren't those of the program"),
        "short": (short, "elements and is declared"),
    }


@pytest.mark.parametrize("name", sorted(bad_cases()))
def test_a_specification_that_contradicts_itself(name: str, package: Path, tmp_path: Path) -> None:
    change, what = bad_cases()[name]
    path = changed(package, tmp_path / "changed.mlpackage", change)
    with pytest.raises(BadInput, match=what) as caught:
        load_package(path)
    assert "\n" not in caught.value.sentence and "changed.mlpackage" in caught.value.sentence


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("rootModelIdentifier"),
        lambda m: m.update(rootModelIdentifier="another"),
        lambda m: m.pop("itemInfoEntries"),
        lambda m: m.update(itemInfoEntries=[1]),
        lambda m: [entry.update(path="../" + entry["path"]) for entry in m["itemInfoEntries"].values()],
        lambda m: [entry.update(path="nowhere") for entry in m["itemInfoEntries"].values()],
    ],
)
def test_a_wrong_manifest(change: Any, package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "changed.mlpackage")
    manifest = json.loads((path / "Manifest.json").read_text())
    change(manifest)
    (path / "Manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=r"Manifest\.json"):
        load_package(path)


def test_what_isnt_a_package(package: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="isn't a Core ML package"):
        load_package(tmp_path / "nothing.mlpackage")
    path = copied(package, tmp_path / "other.mlpackage")
    (path / "Manifest.json").write_text("{")
    with pytest.raises(BadInput, match="isn't JSON"):
        load_package(path)


def test_a_record_longer_than_the_file(package: Path, tmp_path: Path) -> None:
    path = copied(package, tmp_path / "long.mlpackage")
    raw = bytearray((path / WEIGHTS).read_bytes())
    struct.pack_into("<Q", raw, 64 + 8, 1 << 60)
    (path / WEIGHTS).write_bytes(raw)
    with pytest.raises(BadInput, match="lies outside the file"):
        load_package(path)


def rename_type(model: Any) -> None:
    first(model, "linear").type = "quadratic"


def more_parameters(model: Any) -> None:
    op = first(model, "linear")
    op.inputs["scale"].CopyFrom(op.inputs["bias"])


def other_float(model: Any) -> None:
    first(model, "linear").outputs[0].type.tensorType.dataType = 11


def other_shape(model: Any) -> None:
    first(model, "linear").outputs[0].type.tensorType.dimensions[0].constant.size = 2


def test_ops_that_arent_known_are_errors(package: Path, tmp_path: Path) -> None:
    path = changed(package, tmp_path / "a.mlpackage", rename_type)
    where = r"function 'decode', op 'linear_0(_decode)?' of type 'quadratic': .* doesn't know this type"
    with pytest.raises(UnknownOp, match=where):
        Evaluator(load_package(path)).prepare("decode")
    path = changed(package, tmp_path / "b.mlpackage", more_parameters)
    with pytest.raises(UnknownOp, match="of type 'linear': parameter 'scale' isn't known"):
        Evaluator(load_package(path)).prepare("decode")


def test_declarations_must_hold(package: Path, tmp_path: Path) -> None:
    path = changed(package, tmp_path / "a.mlpackage", other_float)
    with pytest.raises(BadInput, match="element types differ: x float16, weight float16, its output float32"):
        Evaluator(load_package(path)).prepare("decode")
    path = changed(package, tmp_path / "b.mlpackage", other_shape)
    with pytest.raises(BadInput, match=r"gives torch.float32 of sizes \[1, 48\] and declares float16\[2, 48\]"):
        Evaluator(load_package(path)).run("decode", {"x": X[:1], "slot": whole([0])})


def test_inputs_are_checked(package: Path) -> None:
    evaluator = Evaluator(load_package(package))
    with pytest.raises(UsageError, match="needs input 'slot'"):
        evaluator.run("decode", {"x": X[:1]})
    with pytest.raises(UsageError, match="has no input 'cache'"):
        evaluator.run("decode", {"x": X[:1], "slot": whole([0]), "cache": X})
    with pytest.raises(UsageError, match=r"input 'x' of function 'decode' is float16\[1, 48\], not float32\[2, 48\]"):
        evaluator.run("decode", {"x": X[:2], "slot": whole([0])})
    with pytest.raises(UsageError, match="input 'slot'"):
        evaluator.run("decode", {"x": X[:1], "slot": np.zeros(1)})
    with pytest.raises(BadInput, match=r"both\.mlpackage: the package has no function 'main'; it has: decode, prefill"):
        evaluator.run("main", {})
    with pytest.raises(UsageError, match="no state 'other'"):
        evaluator.state["other"] = X
    with pytest.raises(UsageError, match="no precision"):
        Evaluator(load_package(package), "float64")  # type: ignore[arg-type]  # what is tested


def test_random_damage_is_an_error_of_ours_or_none(package: Path, tmp_path: Path) -> None:
    """Never another exception, and never a warning, whatever stands in the specification."""
    path = copied(package, tmp_path / "random.mlpackage")
    raw = (path / SPEC).read_bytes()
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(80):
        damaged = bytearray(raw)
        damaged[rng.integers(len(raw))] = rng.integers(256)
        (path / SPEC).write_bytes(damaged)
        try:
            describe_package(path)
            both(path)
        except NeedleExportError as error:
            assert "\n" not in error.sentence
            refused += 1
    assert refused > 60
