"""Small Core ML packages, written by coremltools, and changed behind its back."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]

WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
SPEC = "Data/com.apple.CoreML/model.mlmodel"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    # coremltools warns of this system and of versions that it wasn't tried with, and draws bars.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def builder() -> Any:
    """coremltools' builder of MIL ops."""
    import torch

    assert torch  # its log goes to the real standard error, not to the one that is swallowed below
    with _quietly():
        from coremltools.converters.mil import Builder

    return Builder


def nptype(name: str) -> Any:
    """A numpy type for elements below a byte, as coremltools has them."""
    builder()
    from coremltools.converters.mil.mil.types.type_mapping import string_to_nptype

    return string_to_nptype(name)


def _milled(
    body: Callable[..., Any],
    inputs: Mapping[str, tuple[Shape, str]],
    states: Mapping[str, Shape],
    system: int,
) -> Any:
    """A program of one function; types of inputs are called fp16, fp32 or int32."""
    mb = builder()
    import coremltools as ct
    from coremltools.converters.mil.mil import Function, Program, types

    target = {17: ct.target.iOS17, 18: ct.target.iOS18}[system]
    placeholders = {
        name: mb.TensorSpec(shape=shape, dtype=getattr(types, dtype)) for name, (shape, dtype) in inputs.items()
    } | {name: mb.StateTensorSpec(shape=shape, dtype=types.fp16) for name, shape in states.items()}
    with Function(placeholders, opset_version=target) as function:
        results = body(**function.inputs)
        results = list(results) if isinstance(results, tuple | list) else [results]
        for number, result in enumerate(results):
            # An output can't be a bool.
            made = mb.cast(x=result, dtype="int32") if result.dtype == types.bool else result
            results[number] = mb.identity(x=made, name=f"out{number}")
        function.set_outputs(results)
    program = Program()
    program.add_function("main", function)
    return program, target


def write(
    path: Path,
    body: Callable[..., Any],
    inputs: Mapping[str, tuple[Shape, str]],
    states: Mapping[str, Shape] | None = None,
    system: int = 18,
) -> Path:
    """Save a program; its outputs are called out0, out1, ...

    Args:
        path: of the .mlpackage.
        body: given MIL values by name, returns one or several.
        inputs: shape and type ("fp16", "fp32", "int32") by name.
        states: shape by name; they are float16.
        system: iOS version that it is written for.
    """
    with _quietly():
        program, target = _milled(body, inputs, states or {}, system)
        import coremltools as ct

        model = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=target,
            skip_model_load=True,
            compute_precision=ct.precision.FLOAT32,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )
        model.save(str(path))
    return path


def merge(path: Path, functions: Mapping[str, Path], default: str) -> Path:
    """One package of several functions."""
    with _quietly():
        import coremltools as ct

        descriptor = ct.utils.MultiFunctionDescriptor()
        for name, source in functions.items():
            descriptor.add_function(str(source), src_function_name="main", target_function_name=name)
        descriptor.default_function_name = default
        ct.utils.save_multifunction(descriptor, str(path))
    return path


def inferred(body: Callable[..., Any], values: Mapping[str, Array], system: int = 18) -> list[Array | None]:
    """What coremltools itself computes when all inputs are constants; None where it doesn't."""
    mb = builder()

    def constant() -> Any:
        results = body(**{name: mb.const(val=value) for name, value in values.items()})
        results = list(results) if isinstance(results, tuple | list) else [results]
        found.extend(result.val for result in results)
        return mb.identity(x=mb.const(val=np.float32(0)))

    found: list[Array | None] = []
    with _quietly():
        _milled(lambda **_: constant(), {"unused": ((1,), "fp32")}, {}, system)
    return found


def read_spec(path: Path) -> Any:
    """The specification's message."""
    builder()
    from coremltools.proto import Model_pb2

    model = Model_pb2.Model()
    model.ParseFromString((path / SPEC).read_bytes())
    return model


def write_spec(path: Path, model: Any) -> None:
    """Put a changed specification back."""
    (path / SPEC).write_bytes(model.SerializeToString())


def operations(model: Any, function: str = "main") -> Any:
    """The ops of a function, to be changed."""
    (block,) = model.mlProgram.functions[function].block_specializations.values()
    return block.operations


def copied(path: Path, to: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(path, to)
    return to


def half_step(values: Array) -> Array:
    """Half of float16's step at each value: what rounding to it may change."""
    return np.spacing(np.maximum(np.abs(values), 2.0**-14).astype(np.float16)).astype(np.float64) / 2


def shapes(values: Mapping[str, Array], float_type: str) -> dict[str, tuple[Shape, str]]:
    """Declarations of inputs for arrays: floats as said, integers as int32."""
    return {name: (value.shape, float_type if value.dtype.kind == "f" else "int32") for name, value in values.items()}


def numbers(*sizes: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> Array:
    """Values in a range, all of them float16's own."""
    rng = np.random.default_rng([seed, *sizes])
    return rng.uniform(low, high, sizes).astype(np.float16).astype(np.float32)


def whole(values: Sequence[Any]) -> Array:
    """Integers as int32."""
    return np.array(values, np.int32)
