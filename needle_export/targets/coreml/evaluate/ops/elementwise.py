"""Ops that compute each element from the elements at its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from needle_export.targets.coreml.evaluate.call import OPS, Call, Kernel, Known, op
from needle_export.targets.coreml.evaluate.constants import RUNTIME, to_fp16
from needle_export.targets.coreml.evaluate.types import BITS, FLOATS


def _softplus(x: Tensor) -> Tensor:
    # torch's own is linear above 20.
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))


#: Functions of one float tensor. ``round`` is to even on ties, ``sign`` of zero is zero.
_UNARY_FLOAT: dict[str, Callable[[Tensor], Tensor]] = {
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "softplus": _softplus,
    "softsign": functional.softsign,
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
}

_UNARY_ANY: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "exp2": torch.exp2,
    "sign": torch.sign,
    "square": lambda x: x * x,
}


def _unary(compute: Callable[[Tensor], Tensor], floats_only: bool) -> Callable[[Call], Kernel]:
    def implement(call: Call) -> Kernel:
        call.tensor("x")
        call.same("x")
        if floats_only or call.op.type == "exp2":
            _needs_floats(call)
        return compute

    return implement


def _needs_floats(call: Call) -> None:
    if call.outputs[0].dtype not in FLOATS:
        call.refuse(f"isn't known for {call.outputs[0].dtype}")


for _name, _function in _UNARY_FLOAT.items():
    OPS[_name] = Known(_unary(_function, True), moves=_name == "relu")
for _name, _function in _UNARY_ANY.items():
    OPS[_name] = Known(_unary(_function, False), moves=False)


def _floor_div(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "floor_div": _floor_div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mod": torch.remainder,
    "mul": torch.mul,
    "pow": torch.pow,
    "real_div": torch.div,
    "sub": torch.sub,
}

_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "equal": torch.eq,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "not_equal": torch.ne,
}

_LOGICAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}


@op(*_BINARY)
def _binary(call: Call) -> Kernel:
    call.tensor("x")
    call.tensor("y")
    call.same("x", "y")
    if call.op.type == "real_div":
        _needs_floats(call)
    return _BINARY[call.op.type]


@op(*_COMPARE, *_LOGICAL)
def _compare(call: Call) -> Kernel:
    x, y = call.tensor("x"), call.tensor("y")
    call.check(x.dtype == y.dtype, f"compares {x.dtype} with {y.dtype}")
    if call.op.type in _LOGICAL:
        call.check(x.dtype == "bool", f"takes bools, not {x.dtype}")
        return _LOGICAL[call.op.type]
    return _COMPARE[call.op.type]


@op("logical_not")
def _logical_not(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    return torch.logical_not


def _epsilon(call: Call, default: float) -> float:
    """A small constant, as it is stored: 1e-12 in float16 is zero. So is a default, which has x's type."""
    value = float(call.value("epsilon", default))
    if not call.given("epsilon") and call.type("x").dtype == "float16":
        value = float(to_fp16(torch.tensor(value)))
    return value


@op("rsqrt", "log", "inverse")
def _with_epsilon(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    if call.op.type == "rsqrt":
        epsilon = _epsilon(call, 1e-12)
        return lambda x: torch.rsqrt(x + epsilon)
    if call.op.type == "log":
        epsilon = _epsilon(call, 1e-45)
        return lambda x: torch.log(x + epsilon)
    epsilon = _epsilon(call, 1e-4)
    return lambda x: torch.reciprocal(x + epsilon)


@op("gelu")
def _gelu(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    mode = call.value("mode", "EXACT")
    if mode == "EXACT":
        return functional.gelu
    if mode == "TANH_APPROXIMATION":
        return lambda x: functional.gelu(x, approximate="tanh")
    if mode != "SIGMOID_APPROXIMATION":
        call.refuse(f"mode {mode!r} isn't known")
    return lambda x: x * torch.sigmoid(1.702 * x)


@op("clip")
def _clip(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    low, high = call.value("alpha"), call.value("beta")
    return lambda x: torch.clamp(x, low, high)


@op("threshold")
def _threshold(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    low = call.value("alpha")
    return lambda x: torch.clamp(x, min=low)


@op("leaky_relu", "elu")
def _leaky(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    alpha = call.value("alpha")
    if call.op.type == "elu":
        return lambda x: torch.where(x > 0, x, alpha * torch.expm1(x))
    return lambda x: torch.where(x >= 0, x, alpha * x)


@op("linear_activation", "scaled_tanh", "sigmoid_hard")
def _with_alpha_and_beta(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    alpha, beta = call.value("alpha"), call.value("beta")
    if call.op.type == "linear_activation":
        return lambda x: alpha * x + beta
    if call.op.type == "scaled_tanh":
        return lambda x: alpha * torch.tanh(beta * x)
    return lambda x: torch.clamp(alpha * x + beta, 0.0, 1.0)


@op("select")
def _select(call: Call) -> Kernel:
    condition = call.tensor("cond")
    call.tensor("a")
    call.tensor("b")
    call.same("a", "b")
    call.check(condition.dtype == "bool", f"takes a bool condition, not {condition.dtype}")
    return torch.where


#: Types as ``cast`` calls them.
_CASTS = {
    "bool": "bool",
    "fp16": "float16",
    "fp32": "float32",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "uint8": "uint8",
    "uint16": "uint16",
}


@op("cast")
def _cast(call: Call) -> Kernel:
    source = call.tensor("x")
    wanted = call.value("dtype")
    if wanted not in _CASTS:
        call.refuse(f"dtype {wanted!r} isn't known")
    target = _CASTS[wanted]
    call.check(call.outputs[0].dtype == target, f"casts to {target} and declares {call.outputs[0].dtype}")
    if target == "bool":
        return lambda x: x != 0
    runtime = RUNTIME[target]
    if target in FLOATS:
        return lambda x: x.to(runtime)
    if target == "uint16":
        return lambda x: torch.bitwise_and(x.to(torch.int64), 0xFFFF).to(runtime)
    if source.dtype in FLOATS and BITS[target] < 32:
        # By way of int64, so that what doesn't fit wraps and depends on no machine.
        return lambda x: x.to(torch.int64).to(runtime)
    return lambda x: x.to(runtime)


@op("identity", moves=True)
def _identity(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    return lambda x: x


@op("l2_norm")
def _l2_norm(call: Call) -> Kernel:
    x = call.tensor("x")
    call.same("x")
    call.check(len(x.shape) >= 3, "takes three dimensions at least")
    epsilon = _epsilon(call, 1e-6)
    return lambda x: x / torch.sqrt((x * x).sum(dim=(-3, -2, -1), keepdim=True) + epsilon)


@op("softmax")
def _softmax(call: Call) -> Kernel:
    call.tensor("x")
    call.same("x")
    axis = int(call.value("axis", -1))
    return lambda x: torch.softmax(x, dim=axis)


@op("layer_norm")
def _layer_norm(call: Call) -> Kernel:
    rank = len(call.tensor("x").shape)
    call.same("x")
    shape = call.type("x").shape
    axes = sorted({int(axis) % rank for axis in call.value("axes", list(range(rank)))})
    epsilon = _epsilon(call, 1e-5)
    scaled, shifted = call.given("gamma"), call.given("beta")
    # gamma and beta have the sizes of the axes alone: they are laid out to broadcast.
    spread = [shape[axis] if axis in axes else 1 for axis in range(rank)]
    for parameter, has in (("gamma", scaled), ("beta", shifted)):
        if has:
            sizes = call.tensor(parameter).shape
            call.same("x", parameter)
            call.check(sizes == tuple(shape[axis] for axis in axes), f"{parameter} has sizes {list(sizes)}")
    last = axes == list(range(rank - len(axes), rank))
    if last and -1 not in spread:
        normalized = [shape[axis] for axis in axes]
        if scaled and shifted:
            return lambda x, gamma, beta: functional.layer_norm(x, normalized, gamma, beta, epsilon)
        if scaled:
            return lambda x, gamma: functional.layer_norm(x, normalized, gamma, None, epsilon)
        if not shifted:
            return lambda x: functional.layer_norm(x, normalized, None, None, epsilon)

    def normalize(x: Tensor, *affine: Tensor) -> Tensor:
        centred = x - x.mean(dim=axes, keepdim=True)
        y = centred / torch.sqrt((centred * centred).mean(dim=axes, keepdim=True) + epsilon)
        if scaled:
            y = y * affine[0].reshape(spread)
        return y + affine[-1].reshape(spread) if shifted else y

    return normalize
