"""The matrices of finished packages as their functions use them: what each op multiplies by, or reads rows of.

Everything is read from the packages; what a matrix is called there is the one thing that was known when it was written.

Dimension letters: O outputs (rows of a matrix), I inputs (its columns), K columns that share a scale, G rows that share
a palette, L levels of it, C channels, R reach of a convolution's kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput
from needle_export.targets.claims import from_identifier, parse_name, split_every
from needle_export.targets.coreml.contract import FILE_NAME
from needle_export.targets.coreml.evaluate import FunctionInfo, load_package
from needle_export.targets.coreml.evaluate.spec import Op, Stored, Value
from needle_export.targets.coreml.names import block_of
from needle_export.targets.coreml.readcodes import Around, Ops, Strange, levels_and_norms
from needle_export.targets.matrices import Place, ReadMatrix, RowsOf, coded_form

#: Where ops read a matrix, and whether any constant there is one, named or not.
_READERS = {("linear", "weight"): True, ("gather", "x"): True, ("conv", "weight"): True, ("matmul", "x"): False,
            ("mul", "y"): False}

#: A number behind a name.
_COUNT = re.compile(r"_?\d+$")


@dataclass
class _Use:
    """A constant as ops read it.

    Attributes:
        reader: the first of them.
        maker: of the constant.
        inputs: of the maker, by parameter.
        factor: that multiplies the rows' results behind the op.
        norms: of a matrix in codebook form.
        fault: why it isn't read as one.
    """

    reader: Op
    maker: Op
    inputs: dict[str, Value]
    factor: Value | None
    norms: Value | None = None
    fault: str = ""
    places: list[Place] = field(default_factory=list)


def read_matrices(folder: Path) -> Iterator[ReadMatrix]:
    """Every matrix of an artifact that is named as one, compressed, or read by an op that only takes matrices.

    One at a time: no more than the largest is held in memory.

    Raises:
        BadInput: a package isn't there or is damaged.
    """
    found: dict[Any, _Use] = {}
    paths = sorted(folder.glob("*.mlpackage"))
    if folder / FILE_NAME not in paths:
        raise BadInput("the package is missing", where=str(folder / FILE_NAME), fix="build it again")
    for path in paths:
        for name, function in load_package(path).functions.items():
            for key, use in _uses(function):
                known = found.setdefault((path.name, *key), use)
                known.places.append(_place(use.reader, path.stem if len(paths) > 1 else name))
    for use in found.values():
        yield _matrix(use)


def _place(op: Op, where: str) -> Place:
    return Place(f"{op.type} {op.name} of {where}", block_of(op.name))


def _uses(function: FunctionInfo) -> Iterator[tuple[tuple[Any, ...], _Use]]:
    """Ops of a function that read matrices, each with what makes two of them the same use."""
    makers = {name: op for op in function.ops for name, _ in op.outputs if op.type.startswith("const")}
    readers: dict[str, list[Op]] = {}
    for op in function.ops:
        for argument in op.inputs.values():
            for one in argument:
                if isinstance(one, str):
                    readers.setdefault(one, []).append(op)
    ops = Ops(function.ops, readers)
    for op in function.ops:
        if op.type.startswith("const"):
            continue
        for parameter, argument in op.inputs.items():
            maker = makers.get(argument[0]) if len(argument) == 1 and isinstance(argument[0], str) else None
            if maker is None:
                continue
            if maker.type == "constexpr_lut_to_dense" and len(maker.outputs[0][1].shape) == 3:
                yield _coded(op, parameter, maker, ops, makers)
                continue
            takes = _READERS.get((op.type, parameter), False) and len(maker.outputs[0][1].shape) > 1
            if takes or maker.type != "const" or parse_name(_named(maker)[0]) is not None:
                factor = _factor(op, makers, readers) if op.type == "linear" else None
                inputs = {name: _value(given[0], makers) for name, given in maker.inputs.items()}
                places = tuple(sorted((name, _where(value)) for name, value in inputs.items()))
                applied = None if factor is None else _where(factor)
                key = (_named(maker), maker.type, op.type, parameter, places, applied)
                yield key, _Use(op, maker, inputs, factor)


def _coded(
    op: Op, parameter: str, maker: Op, ops: Ops, makers: dict[str, Op]
) -> tuple[tuple[Any, ...], _Use]:
    """An op that reads codes by group, whose norms multiply outside."""
    inputs, fault, around = {name: _value(given[0], makers) for name, given in maker.inputs.items()}, "", None
    try:
        around = ops.around(op, parameter)
    except Strange as reason:
        fault = str(reason)
    norms, factor = (_constant(name, makers) for name in _names(around))
    places = tuple(sorted((name, _where(value)) for name, value in inputs.items()))
    applied = tuple(None if value is None else _where(value) for value in (norms, factor))
    return (_named(maker), op.type, parameter, places, applied, fault), _Use(op, maker, inputs, factor, norms, fault)


def _names(around: Around | None) -> tuple[str | None, str | None]:
    return (None, None) if around is None else (around.norms, around.factor)


def _constant(name: str | None, makers: dict[str, Op]) -> Value | None:
    return None if name is None else _value(name, makers)


def _named(maker: Op) -> tuple[str, int]:
    """What a constant is called, and the steps between taps."""
    return split_every(from_identifier(_COUNT.sub("", maker.name)))


def _value(given: str | Value, makers: dict[str, Op]) -> Value:
    """A constant that is written in place, or by an op of its own."""
    while isinstance(given, str):
        given = makers[given].inputs["val"][0]
    return given


def _where(value: Value) -> Any:
    return value.offset if isinstance(value, Stored) else np.asarray(value.value).tobytes()


def _factor(op: Op, makers: dict[str, Op], readers: dict[str, list[Op]]) -> Value | None:
    """What multiplies the results of a linear's rows, if a mul by a constant [O] alone reads them."""
    result, declared = op.outputs[0]
    behind = readers.get(result, [])
    if len(behind) != 1 or behind[0].type != "mul":
        return None
    given = behind[0].inputs["y"][0]
    maker = makers.get(given) if isinstance(given, str) else None
    if maker is None or maker.outputs[0][1].shape != declared.shape[-1:]:
        return None
    return _value(given, makers)


def _matrix(use: _Use) -> ReadMatrix:
    name, every = _named(use.maker)
    claim, folded = parse_name(name) or (RowsOf((use.maker.name,)), False)
    places = tuple(use.places)
    factor = None if use.factor is None else np.asarray(use.factor.value).astype(np.float32)
    try:
        if use.norms is not None:
            levels, norms, size = levels_and_norms(use.inputs, use.norms)
            held = use.inputs["indices"].type.bytes + use.norms.type.bytes
            return ReadMatrix(
                claim, False, levels, norms, places, form=coded_form(size), own=True, bytes=held, behind=factor
            )
        if use.fault:
            raise Strange(use.fault)
        values, scales, form = _read(use, every)
    except Strange as fault:
        return ReadMatrix(claim, folded, np.empty((0, 0), np.int8), None, places, str(fault))
    held = sum(value.type.bytes for name, value in use.inputs.items() if name in _HELD)
    if factor is not None:
        scales = factor if scales is None else scales * factor[:, None]
    return ReadMatrix(claim, folded, values, scales, places, form=form, own=bool(form), bytes=held)


#: Parameters whose bytes are a matrix's.
_HELD = ("val", "data", "quantized_data", "indices", "scale", "lut")


def _read(use: _Use, every: int) -> tuple[NDArray[Any], NDArray[np.float32] | None, str]:
    """Values [O, I], scales or levels of each row, and the form.

    Raises:
        Strange: it isn't read as a matrix.
    """
    maker, op = use.maker, use.reader
    shape, given = maker.outputs[0][1].shape, use.inputs
    if maker.type == "const":
        return _floats(use, np.asarray(given["val"].value), every), None, ""
    if len(shape) != 2 or op.type not in ("linear", "gather") or (op.type == "gather" and not _by_rows(op)):
        raise Strange(f"{op.type} reads it, not as a matrix of rows")
    (rows, columns), known = shape, set(given)
    if maker.type == "constexpr_affine_dequantize" and known == {"quantized_data", "scale", "zero_point", "axis"}:
        scale, zero = (np.asarray(given[name].value) for name in ("scale", "zero_point"))
        if scale.shape == (rows,) and not zero.any() and int(np.asarray(given["axis"].value)) == 0:
            levels = np.asarray(given["quantized_data"].value)
            return levels, scale.astype(np.float32)[:, None], f"{_kind(given['quantized_data'])}x{columns}"
    if maker.type == "constexpr_blockwise_shift_scale" and known == {"data", "scale"}:
        scale = np.asarray(given["scale"].value)
        if scale.ndim == 2 and len(scale) == rows:
            levels = np.asarray(given["data"].value)
            return levels, scale.astype(np.float32), f"{_kind(given['data'])}x{columns // scale.shape[1]}"
    if maker.type == "constexpr_lut_to_dense" and known == {"indices", "lut"}:
        lut, kind = np.asarray(given["lut"].value), _kind(given["indices"]).removeprefix("uint")
        if lut.ndim == 4 and lut.shape[1] == lut.shape[3] == 1 and kind.isdigit():
            group = rows // len(lut)
            palettes = np.repeat(lut[:, 0, :, 0].astype(np.float32), group, axis=0)
            return np.asarray(given["indices"].value), palettes, f"palette{kind}x{group}"
    raise Strange(f"{maker.type} makes it of other parts than this tool writes")


def _kind(value: Value) -> str:
    return value.type.dtype


def _by_rows(op: Op) -> bool:
    """Whether a gather reads whole rows: its axis is the first."""
    given = op.inputs["axis"][0]
    return isinstance(given, str) or int(np.asarray(given.value)) == 0


def _floats(use: _Use, data: NDArray[Any], every: int) -> NDArray[Any]:
    """A matrix of floats by rows of outputs, as the op reads it."""
    op, kind = use.reader, use.reader.type
    if data.ndim == 2 and (kind == "linear" or (kind == "gather" and _by_rows(op))):
        return data
    if data.ndim == 3 and kind == "matmul" and len(data) == 1:
        whole: NDArray[Any] = data[0]
        return whole
    if data.ndim == 3 and kind == "conv" and data.shape[1] == 1:
        # The op correlates: its first tap is the oldest row.
        taps: NDArray[Any] = data[:, 0, ::-1]
        return taps
    if data.ndim == 2 and kind == "mul":
        # [R, C] over a window of rows; zeros between the taps.
        between = np.arange(len(data))[::-1] % every != 0
        if data[between].any():
            raise Strange("its kernel isn't 0 between the taps")
        turned: NDArray[Any] = data[:: -every].T
        return turned
    raise Strange(f"{kind} reads it, not as a matrix of rows")
