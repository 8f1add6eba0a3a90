"""What the GPU delegate of TFLite takes and what it is reported to get wrong, one rule a row, each with its source.

:mod:`.lint` says what the rules are worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from needle_export.targets.tflite.analysis import Graph, Op, TensorInfo

_GPU = "google-ai-edge/LiteRT: tflite/delegates/gpu/common/"
BUILDER = f"{_GPU}model_builder.cc"
_HELPER = f"{_GPU}model_builder_helper.cc"
_CHECKS = "google-ai-edge/LiteRT: tflite/tools/versioning/gpu_compatibility.cc"
ISSUE = "google-ai-edge/LiteRT: issue "


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMPARISONS = _words("EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL NOT_EQUAL")
_PAIRS = _words("DIV FLOOR_DIV FLOOR_MOD LOGICAL_AND MAXIMUM MINIMUM POW SQUARED_DIFFERENCE SUB")
_REDUCTIONS = _words("MEAN REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM")
_MATRICES = _words("BATCH_MATMUL CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV")
_SELECTS = _words("SELECT SELECT_V2")
_JOINS = _words("CONCATENATION PACK")

#: Ops the delegate has a parser for (NewOperationParser), by the highest version it takes (0: any).
_BY_VERSION = {
    0: _REDUCTIONS
    | _words("BATCH_MATMUL CAST DEPTH_TO_SPACE HARD_SWISH PACK SPLIT SPLIT_V TILE UNPACK")
    | _words("CUSTOM:Convolution2DTransposeBias CUSTOM:MaxPoolingWithArgmax2D CUSTOM:MaxUnpooling2D CUSTOM:Resampler"),
    1: _SELECTS | _words("CUMSUM DENSIFY GATHER ONE_HOT PRELU RESHAPE"),
    2: _COMPARISONS
    | _PAIRS
    | _words("ABS ADD ADD_N COS ELU EXP FLOOR GELU LOG LOGISTIC NEG RSQRT SIGN SIN SQRT SQUARE TANH")
    | _words("AVERAGE_POOL_2D CONCATENATION LEAKY_RELU MAX_POOL_2D MIRROR_PAD PAD PADV2 QUANTIZE RELU RELU6")
    | _words("RELU_0_TO_1 RELU_N1_TO_1 SLICE SOFTMAX SPACE_TO_DEPTH"),
    3: _words("DEQUANTIZE MUL RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR TRANSPOSE_CONV"),
    4: _words("LSTM STRIDED_SLICE TRANSPOSE"),
    6: _words("CONV_2D DEPTHWISE_CONV_2D"),
    9: _words("FULLY_CONNECTED"),
}
PARSED = {op: most for most, ops in _BY_VERSION.items() for op in ops}

_ANY = frozenset({"float32", "float16", "int8", "uint8"})

#: Types of runtime inputs and outputs that an op may have beyond those of all ops.
_MORE_IN = {
    "CAST": {"bool", "int32"},
    "GATHER": {"int32"},
    "LOGICAL_AND": {"bool"},
    "ONE_HOT": {"int32"},
    **{op: {"bool"} for op in _SELECTS},
}
_MORE_OUT = {"CAST": {"bool", "int32"}, "LOGICAL_AND": {"bool"}, **{op: {"bool"} for op in _COMPARISONS}}

#: Ops without a parser of which more is known.
UNPARSED = {
    "BROADCAST_TO": ("BROADCAST_TO is refused at every rank, by the delegate of CompiledModel too", f"{ISSUE}9191"),
    "EMBEDDING_LOOKUP": (
        "the open delegate has no parser for EMBEDDING_LOOKUP, though the compatibility check accepts it",
        f"{BUILDER} beside {_CHECKS.removeprefix('google-ai-edge/LiteRT: ')}",
    ),
    "GATHER_ND": ("GATHER_ND is not supported and was called unlikely to be", f"{ISSUE}5197"),
}


class View:
    """A graph as the delegate sees it: float16 constants are read through their DEQUANTIZE."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = graph.tensors
        self.producer = {tensor: op for op in graph.ops for tensor in op.outputs}
        self.consumers: dict[int, list[Op]] = {}
        for op in graph.ops:
            for tensor in set(op.inputs):
                self.consumers.setdefault(tensor, []).append(op)
        self.half = {
            op.outputs[0]: op.inputs[0]
            for op in graph.ops
            if op.name == "DEQUANTIZE"
            and self.tensors[op.inputs[0]].constant
            and self.tensors[op.inputs[0]].dtype == "float16"
        }

    def input(self, op: Op, at: int) -> TensorInfo | None:
        """An input, or None for an absent one."""
        if at >= len(op.inputs) or op.inputs[at] < 0:
            return None
        return self.tensors[self.half.get(op.inputs[at], op.inputs[at])]

    def inputs(self, op: Op) -> list[TensorInfo]:
        found = (self.input(op, at) for at in range(len(op.inputs)))
        return [tensor for tensor in found if tensor is not None]

    def constants(self, op: Op) -> list[TensorInfo]:
        return [tensor for tensor in self.inputs(op) if tensor.constant]

    def moving(self, op: Op) -> list[TensorInfo]:
        return [tensor for tensor in self.inputs(op) if not tensor.constant]

    def outputs(self, op: Op) -> list[TensorInfo]:
        return [self.tensors[tensor] for tensor in op.outputs]

    def around(self, op: Op) -> list[TensorInfo]:
        return [*self.inputs(op), *self.outputs(op)]


# One function a rule: whether an op breaks it.


def _dimensions(view: View, op: Op) -> bool:
    return any(len(tensor.shape) > 4 for tensor in view.around(op))


def _scalar(view: View, op: Op) -> bool:
    return any(not tensor.shape for tensor in (*view.moving(op), *view.outputs(op)))


def _types(view: View, op: Op) -> bool:
    inputs, outputs = _ANY | _MORE_IN.get(op.name, set()), _ANY | _MORE_OUT.get(op.name, set())
    return any(t.dtype not in inputs for t in view.moving(op)) or any(t.dtype not in outputs for t in view.outputs(op))


def _rank_of_slice(view: View, op: Op) -> bool:
    source = view.input(op, 0)
    return op.name in ("SLICE", "STRIDED_SLICE") and source is not None and len(source.shape) not in (3, 4)


def _slice_masks(view: View, op: Op) -> bool:
    # The masks themselves aren't read: they are what changes the number of dimensions.
    source = view.input(op, 0)
    return op.name == "STRIDED_SLICE" and source is not None and len(source.shape) != len(view.outputs(op)[0].shape)


def _gather(view: View, op: Op) -> bool:
    indices = view.input(op, 1)
    return op.name == "GATHER" and indices is not None and (len(indices.shape) != 1 or indices.dtype != "int32")


def _gather_table(view: View, op: Op) -> bool:
    table = view.input(op, 0)
    return op.name == "GATHER" and table is not None and table.constant


def _reduction(view: View, op: Op) -> bool:
    source, axes = view.input(op, 0), view.input(op, 1)
    if op.name not in _REDUCTIONS or source is None or axes is None:
        return False
    return source.constant or not axes.constant or axes.dtype != "int32"


def _broadcast(view: View, op: Op) -> bool:
    if op.name not in ("ADD", "MUL") or len(op.inputs) != 2:
        return False
    short, long = sorted((tensor.shape for tensor in view.inputs(op)), key=len)
    if len(short) <= 1 or len(short) == len(long):
        return False
    if (len(long), len(short)) == (4, 3):
        return long[0] != 1
    if (len(long), len(short)) == (4, 2):
        return (long[0], *short) != (1, 1, 1) and (long[0], long[3]) != short
    return True


def _mixed_ranks(view: View, op: Op) -> bool:
    ranks = [len(tensor.shape) for tensor in view.moving(op)]
    if op.name not in ("ADD", "MUL") or len(ranks) != 2 or _broadcast(view, op):
        return False
    return 1 < min(ranks) < max(ranks)


def _same_twice(view: View, op: Op) -> bool:
    return op.name in _PAIRS and len(op.inputs) == 2 and op.inputs[0] == op.inputs[1]


def _comparison(view: View, op: Op) -> bool:
    if op.name not in _COMPARISONS:
        return False
    users = view.consumers.get(op.outputs[0], [])
    if len(users) != 1 or users[0].name not in {"CAST", *_SELECTS}:
        return True
    return view.outputs(users[0])[0].dtype not in ("float16", "float32")


def _select(view: View, op: Op) -> bool:
    if op.name not in _SELECTS:
        return False
    condition, *cases = view.inputs(op)
    shape = view.outputs(op)[0].shape
    tail = shape[len(shape) - len(condition.shape) :] if len(condition.shape) <= len(shape) else ()
    fits = len(tail) == len(condition.shape) and all(a in (1, b) for a, b in zip(condition.shape, tail, strict=True))
    return not fits or any(
        (case.shape != shape and case.shape not in ((), (1,))) or (len(case.shape) == 2 and not case.constant)
        for case in cases
    )


def _paddings(view: View, op: Op) -> bool:
    paddings = view.input(op, 1)
    return op.name in ("PAD", "PADV2", "MIRROR_PAD") and paddings is not None and paddings.shape not in ((3, 2), (4, 2))


def _constant_matrix(view: View, op: Op) -> bool:
    if op.name != "BATCH_MATMUL":
        return False
    left, right = view.inputs(op)
    return left.constant or (right.constant and len(right.shape) != 2)


def _transposed(view: View, op: Op) -> bool:
    if op.name != "BATCH_MATMUL":
        return False
    (left, right), result = view.inputs(op), view.outputs(op)[0]
    if min(len(t.shape) for t in (left, right, result)) < 2:
        return False
    # Of square matrices the shapes don't tell.
    return left.shape[-2] != result.shape[-2] or right.shape[-1] != result.shape[-1]


def _heads_as_batch(view: View, op: Op) -> bool:
    moving = view.moving(op)
    return op.name == "BATCH_MATMUL" and len(moving) == 2 and any(len(t.shape) == 3 and t.shape[0] > 1 for t in moving)


def _masked_scores(view: View, op: Op) -> bool:
    if op.name != "ADD" or len(view.moving(op)) != 2:
        return False
    shapes = [view.tensors[tensor].shape for tensor in op.inputs]
    return shapes[0] != shapes[1] and any(_of_matmul(view, tensor) for tensor in op.inputs)


def _of_matmul(view: View, tensor: int) -> bool:
    """Whether a tensor is a BATCH_MATMUL's result, scaled or not."""
    maker = view.producer.get(tensor)
    while maker is not None and maker.name in ("MUL", "DIV"):
        maker = next((view.producer[t] for t in maker.inputs if t in view.producer), None)
    return maker is not None and maker.name == "BATCH_MATMUL"


def _linear(view: View, op: Op) -> bool:
    source = view.input(op, 0)
    return op.name == "FULLY_CONNECTED" and ((source is not None and source.constant) or len(view.moving(op)) > 2)


def _packed(view: View, op: Op) -> bool:
    return any(tensor.dtype in ("int4", "int2", "uint4") for tensor in view.constants(op))


def _expanded(view: View, op: Op) -> bool:
    return op.name in _MATRICES and any(tensor.dtype in ("int8", "uint8") for tensor in view.constants(op))


def _joined_constant(view: View, op: Op) -> bool:
    return op.name in _JOINS and any(len(tensor.shape) != 4 for tensor in view.constants(op))


def _constant_batch(view: View, op: Op) -> bool:
    if op.name not in _PAIRS | _COMPARISONS | {"ADD", "MUL"}:
        return False
    return any(len(t.shape) == 4 and t.shape[0] != 1 for t in view.constants(op))


def _half_sum(view: View, op: Op) -> bool:
    return op.name == "SUM"


@dataclass(frozen=True)
class Rule:
    name: str
    breaks: Callable[[View, Op], bool]
    why: str
    source: str
    #: Whether the op stays on the CPU; else the delegate takes it, and fails or computes something else.
    refuses: bool = True


_FAILS = "; the check accepts it, then the delegate fails as a whole"

RULES = (
    Rule(
        "dimensions",
        _dimensions,
        "tensors of more than 4 dimensions are refused",
        f"{BUILDER}, IsAllAllowedTensors; {ISSUE}2540",
    ),
    Rule(
        "types",
        _types,
        "runtime tensors must be float or 8-bit; integers and booleans are taken by few ops",
        f"{BUILDER}, GetOpsToReplace",
    ),
    Rule("slice rank", _rank_of_slice, "slices of 3 or 4 dimensions alone are supported", _CHECKS),
    Rule("slice masks", _slice_masks, "slices that drop or add a dimension are refused", _CHECKS),
    Rule("gather indices", _gather, "indices must be int32 of one dimension", _CHECKS),
    Rule("reduction axes", _reduction, "needs a runtime input and constant int32 axes", f"{_CHECKS}; {ISSUE}9192"),
    Rule("broadcast", _broadcast, "operands of these different ranks are refused by the standard check", _CHECKS),
    Rule("comparison", _comparison, "must lead to exactly one CAST or SELECT of float result", BUILDER),
    Rule(
        "select shapes",
        _select,
        "the cases must have the result's shape or be one number, and not be 2-D at run time",
        _CHECKS,
    ),
    Rule("paddings", _paddings, "paddings must be 3x2 or 4x2", _CHECKS),
    Rule("linear inputs", _linear, "a constant input or more than 2 runtime inputs are refused", _CHECKS),
    Rule("scalar", _scalar, f"a runtime tensor without dimensions has no layout{_FAILS}", _HELPER, False),
    Rule("gather table", _gather_table, f"a constant table is not read{_FAILS}", BUILDER, False),
    Rule(
        "constant matrix",
        _constant_matrix,
        f"of constants, only a 2-D right-hand side is read{_FAILS}",
        f"{BUILDER}, BatchedMatMulOperationParser; tensorflow/tensorflow: issue 66727",
        False,
    ),
    Rule(
        "same input twice",
        _same_twice,
        f"identical inputs are supported by ADD and MUL alone{_FAILS}",
        f"{BUILDER}; {ISSUE}9192",
        False,
    ),
    Rule("packed weights", _packed, f"4-bit and 2-bit constants can't be read as float{_FAILS}", _HELPER, False),
    Rule("joined constant", _joined_constant, f"constant parts must have 4 dimensions{_FAILS}", BUILDER, False),
    Rule("constant batch", _constant_batch, f"a constant's first of 4 dimensions must be 1{_FAILS}", _HELPER, False),
    Rule(
        "transposed matmul",
        _transposed,
        "adj_x and adj_y are reported to be ignored: the result is wrong without a word",
        f"{ISSUE}8913",
        False,
    ),
    Rule(
        "masked scores",
        _masked_scores,
        "a broadcast ADD on the result of BATCH_MATMUL was reported to compute wrong values without a word",
        f"{ISSUE}8593",
        False,
    ),
    Rule(
        "mixed ranks",
        _mixed_ranks,
        "an operand of lower rank was reported to be aligned wrongly, with wrong values and no word",
        f"{ISSUE}8980",
        False,
    ),
    Rule(
        "heads as batch",
        _heads_as_batch,
        "3-D attention with heads in the first dimension is reported to compute wrong values on one GPU",
        f"{ISSUE}8619",
        False,
    ),
    Rule(
        "sum in half",
        _half_sum,
        "sums are reported to accumulate in fp16 unless fp32 is forced: a total beyond 65504 gives NaN",
        f"{ISSUE}9249",
        False,
    ),
    Rule(
        "expanded weights",
        _expanded,
        "8-bit constants become float in GPU memory when the delegate starts: smaller on disk, not there",
        "google-ai-edge/LiteRT: tflite/g3doc/performance/gpu.md, Using quantized models",
        False,
    ),
)
