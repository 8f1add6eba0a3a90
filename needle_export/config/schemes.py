"""Weight schemes: what each is, which target can hold it and in which form, and why another can't."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """A scheme in one target.

    Attributes:
        form: how matrices and tables lie there; empty where the target can't hold it.
        inputs: what the inputs of products with them are rounded to at run time, or empty.
        why_not: why the target can't, or empty.
    """

    form: str = ""
    inputs: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Scheme:
    """One value of ``--weights``.

    Attributes:
        name: as it is given.
        bits: of a weight, without scales.
        what: it is.
        targets: by name.
    """

    name: str
    bits: int
    what: str
    targets: dict[str, Held]


_BLOCKS = "a float32 scale for 128 columns of a row; opset 24 only"
_NO_PALETTE = "no kernel reads a table of levels"

def _codes() -> dict[str, Held]:
    """Where codes of a rotated group can lie."""
    return {
        "onnx": Held("packed indices and float16 norms, unpacked when the file is loaded; of tables, the rows read"),
        "tflite": Held(why_not=_NO_PALETTE),
        "coreml": Held("indices into one float32 table, float16 norms outside, inputs rotated once; from iOS 18 on"),
    }


ALL = (
    Scheme("fp32", 32, "as they are", {
        "onnx": Held("float32"),
        "tflite": Held("float32"),
        "coreml": Held("float32"),
    }),
    Scheme("fp16", 16, "half precision", {
        "onnx": Held("float16, widened when the file is loaded"),
        "tflite": Held("float16, widened when the file is loaded"),
        "coreml": Held("float16, and half-precision arithmetic outside Sinkhorn and the norms' sums"),
    }),
    Scheme("int8", 8, "symmetric integers", {
        "onnx": Held(_BLOCKS, "int8, by 128 columns"),
        "tflite": Held("a float32 scale for a row, behind the op", "int8, by row"),
        "coreml": Held("a float16 scale for a row"),
    }),
    Scheme("int4", 4, "symmetric integers", {
        "onnx": Held(_BLOCKS, "int8, by 128 columns"),
        "tflite": Held("a float16 scale for 32 columns of a row; LiteRT only", "int8, by row"),
        "coreml": Held("a float16 scale for 32 columns of a row; from iOS 18 on"),
    }),
    Scheme("int2", 2, "symmetric integers: -1, 0, 1", {
        "onnx": Held(_BLOCKS, "int8, by 128 columns"),
        "tflite": Held(why_not="not built: the runtime's two-bit kernel has one scale for a whole row"),
        "coreml": Held(why_not="its blocks of integers have 4 or 8 bits; palettes can have 2"),
    }),
    Scheme("cq4", 4, "the exporter's codes, from floats: 16 levels for a rotated group of 128 columns, and its length",
           _codes()),
    Scheme("cq2", 2, "the same with 4 levels", _codes()),
    Scheme("codebook", 4, "a container's own codes, of the bits that it has: lossless", _codes()),
    Scheme("palette4", 4, "16 levels for a group of rows, placed where they cost least", {
        "onnx": Held(why_not=_NO_PALETTE),
        "tflite": Held(why_not=_NO_PALETTE),
        "coreml": Held("16 float16 levels for 16 rows; from iOS 18 on"),
    }),
)
"""In the order in which they are offered."""


@dataclass(frozen=True)
class Cache:
    """One value of ``--cache``.

    Attributes:
        name: as it is given.
        what: keys and values are, between steps.
        targets: by name.
    """

    name: str
    what: str
    targets: dict[str, Held]


_HALF_STATES = "its states are half precision"
_FLOAT_ROWS = "its graphs read the rows that a host writes as float32"

CACHES = (
    Cache("fp32", "as they are computed", {
        "onnx": Held("float32"),
        "tflite": Held("float32"),
        "coreml": Held(why_not=f"{_HALF_STATES}, but with --os ios17 and --weights fp32, where it is float32"),
    }),
    Cache("fp16", "half precision", {
        "onnx": Held("float16, widened where attention reads the rows in use"),
        "tflite": Held(why_not=_FLOAT_ROWS),
        "coreml": Held("float16"),
    }),
    Cache("int8", "symmetric integers with a scale for each head and position, rounded after rotation", {
        "onnx": Held("int8 and a float32 scale, which multiplies scores and weights instead of rows"),
        "tflite": Held(why_not=_FLOAT_ROWS),
        "coreml": Held(why_not=_HALF_STATES),
    }),
)
"""In the order in which they are offered; a target's own is the first that it has."""
