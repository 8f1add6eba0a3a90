"""A small program for every type of op, with inputs; and a formula where coremltools itself infers no value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.targets.coreml.packages import Array, builder, numbers, whole


class _Late:
    """coremltools' builder, imported when a case first needs it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(builder(), name)


mb = _Late()


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        body: given the float type and MIL values by name; returns one value or several.
        values: of its inputs, of float32 or int32.
        expect: what it gives, or None where coremltools infers it.
        half: whether there is a form of it in float16.
    """

    body: Callable[..., Any]
    values: dict[str, Array]
    expect: Callable[..., Any] | None = None
    half: bool = True


CASES: dict[str, Case] = {}


def case(
    name: str,
    body: Callable[..., Any],
    /,
    *,
    expect: Callable[..., Any] | None = None,
    half: bool = True,
    **values: Array,
) -> None:
    """Add a case."""
    assert name not in CASES
    CASES[name] = Case(body, values, expect, half)


X, Y = numbers(3, 4), numbers(3, 4, seed=1)
POSITIVE = numbers(3, 4, low=0.25, high=4.0)
INTS, MORE = whole([[7, -7, 3, -2]]), whole([[2, 2, -2, 3]])

# One tensor to one.


def _one(name: str) -> Callable[..., Any]:
    return lambda f, x: getattr(mb, name)(x=x)


for _name in ("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "relu", "relu6"):
    case(_name, _one(_name), x=X if _name not in ("acos", "asin") else numbers(3, 4, low=-1, high=1))
for _name in ("round", "sigmoid", "sign", "sin", "sinh", "softplus", "softsign", "square", "tan", "tanh"):
    case(_name, _one(_name), x=X)
case("relu6_reaches_6", _one("relu6"), x=numbers(3, 4, low=-9, high=9))
case("round_ties", _one("round"), x=np.array([0.5, 1.5, -0.5, 2.5, -1.5], np.float32))
case("softplus_far_out", _one("softplus"), x=np.array([-60, -30, 0, 25, 60], np.float32))
case("sqrt", _one("sqrt"), x=POSITIVE)
case("silu", _one("silu"), x=X, expect=lambda x: x / (1 + np.exp(-x)))
case("abs_int", _one("abs"), x=INTS, half=False)
case("square_int", _one("square"), x=INTS, half=False)
case("logical_not", lambda f, x: mb.logical_not(x=mb.greater(x=x, y=f(0))), x=X)
case("identity", _one("identity"), x=X, expect=lambda x: x)
case("rsqrt", lambda f, x: mb.rsqrt(x=x, epsilon=f(0.125)), x=POSITIVE)
case("log", lambda f, x: mb.log(x=x, epsilon=f(0.5)), x=POSITIVE)
case("inverse", lambda f, x: mb.inverse(x=x, epsilon=f(0.25)), x=POSITIVE)
for _mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
    case(f"gelu_{_mode}", lambda f, x, mode=_mode: mb.gelu(x=x, mode=mode), x=X)
case("clip", lambda f, x: mb.clip(x=x, alpha=f(-0.5), beta=f(1.25)), x=X)
case("threshold", lambda f, x: mb.threshold(x=x, alpha=f(0.5)), x=X)
case("leaky_relu", lambda f, x: mb.leaky_relu(x=x, alpha=f(0.125)), x=X)
case("elu", lambda f, x: mb.elu(x=x, alpha=f(0.5)), x=X)
case("linear_activation", lambda f, x: mb.linear_activation(x=x, alpha=f(0.5), beta=f(0.25)), x=X)
case("scaled_tanh", lambda f, x: mb.scaled_tanh(x=x, alpha=f(0.5), beta=f(1.5)), x=X)
case("sigmoid_hard", lambda f, x: mb.sigmoid_hard(x=x, alpha=f(0.5), beta=f(0.25)), x=X)
case("cast_int", lambda f, x: mb.cast(x=x, dtype="int32"), x=X * 5)
case("cast_bool", lambda f, x: mb.cast(x=x, dtype="bool"), x=np.array([0.0, 0.5, -2.0], np.float32))
case("cast_int8", lambda f, x: mb.cast(x=mb.cast(x=x, dtype="int8"), dtype="int32"), x=INTS, half=False)
case(
    "cast_uint16",
    lambda f, x: mb.cast(x=mb.cast(x=x, dtype="uint16"), dtype="int32"),
    x=whole([0, 65535, -1, 70000]),
    half=False,
)
case("cast_float", lambda f, x: mb.cast(x=x, dtype="fp32"), x=INTS, half=False)

# Two to one.


def _two(name: str) -> Callable[..., Any]:
    return lambda f, x, y: getattr(mb, name)(x=x, y=y)


for _name in ("add", "sub", "mul", "maximum", "minimum", "real_div", "floor_div", "mod"):
    case(_name, _two(_name), x=X, y=numbers(4, low=0.5, high=2.0))
    case(f"{_name}_negative", _two(_name), x=X, y=-POSITIVE)
    if _name != "real_div":
        case(f"{_name}_int", _two(_name), x=INTS, y=MORE, half=False)
case("pow", _two("pow"), x=POSITIVE, y=Y)
EQUALS = np.where(X > 0, X, Y)
for _name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"):
    case(_name, _two(_name), x=X, y=EQUALS)
for _name in ("logical_and", "logical_or", "logical_xor"):
    case(
        _name,
        lambda f, x, y, name=_name: getattr(mb, name)(x=mb.greater(x=x, y=f(0)), y=mb.greater(x=y, y=f(0))),
        x=X,
        y=Y,
    )
case("select", lambda f, x, y: mb.select(cond=mb.greater(x=x, y=y), a=x, b=y), x=X, y=Y)

# Reductions.

for _name in ("sum", "mean", "max", "min", "prod", "sum_square", "l1_norm", "l2_norm", "log_sum_exp"):
    for _which, _axes, _keep in (("last", [-1], False), ("two", [0, 2], True), ("all", None, False)):
        _rest = {} if _axes is None else {"axes": _axes}
        case(
            f"reduce_{_name}_over_{_which}",
            lambda f, x, name=f"reduce_{_name}", keep=_keep, rest=_rest: getattr(mb, name)(x=x, keep_dims=keep, **rest),
            x=numbers(2, 3, 4),
        )
case("reduce_log_sum", lambda f, x: mb.reduce_log_sum(x=x, axes=[1], keep_dims=False), x=POSITIVE)
case(
    "reduce_sum_int",
    lambda f, x: mb.reduce_sum(x=x, axes=[-1], keep_dims=False),
    x=INTS,
    half=False,
)
for _name in ("reduce_argmax", "reduce_argmin"):
    case(_name, lambda f, x, name=_name: getattr(mb, name)(x=x, axis=1, keep_dims=True), x=X)


def _summed(x: Array, exclusive: bool, reverse: bool) -> Array:
    """Sums of what stands before (or behind) a place, with it or without."""
    places = np.arange(x.shape[1])
    before = places[:, None] > places if reverse else places[:, None] < places
    return x @ (before | (np.eye(len(places), dtype=bool) & (not exclusive)))


for _name, _exclusive, _reverse in (
    ("", False, False),
    ("_exclusive", True, False),
    ("_reverse", False, True),
    ("_both", True, True),
):
    case(
        f"cumsum{_name}",
        lambda f, x, e=_exclusive, r=_reverse: mb.cumsum(x=x, axis=1, exclusive=e, reverse=r),
        x=numbers(2, 3),
        expect=lambda x, e=_exclusive, r=_reverse: _summed(x, e, r),
    )


def _sorted(x: Array) -> tuple[Array, Array]:
    order = np.argsort(-x, axis=1, kind="stable")[:, :2]
    return np.take_along_axis(x, order, 1), order.astype(np.int32)


case("topk", lambda f, x: mb.topk(x=x, k=2, axis=1), x=X, expect=_sorted)
case(
    "topk_ascending",
    lambda f, x: mb.topk(x=x, k=1, axis=0, ascending=True),
    x=X,
    expect=lambda x: (x.min(0, keepdims=True), x.argmin(0)[None].astype(np.int32)),
)
case("argsort", lambda f, x: mb.argsort(x=x, axis=1, ascending=True), x=X, expect=lambda x: np.argsort(x, 1, "stable"))
case("softmax", lambda f, x: mb.softmax(x=x, axis=0), x=X * 4)


def _normed(x: Array, axes: tuple[int, ...], scale: Array, shift: Array, epsilon: float) -> Array:
    mean = x.mean(axes, keepdims=True, dtype=np.float64)
    var = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (((x - mean) / np.sqrt(var + epsilon)) * scale + shift).astype(np.float32)


CUBE = numbers(2, 3, 4)
GAMMA, BETA = numbers(3, 4, seed=7), numbers(3, 4, seed=8)
case(
    "layer_norm_last",
    lambda f, x: mb.layer_norm(x=x, axes=[1, 2], gamma=GAMMA.astype(f), beta=BETA.astype(f), epsilon=f(0.125)),
    x=CUBE,
    expect=lambda x: _normed(x, (1, 2), GAMMA, BETA, 0.125),
)
case(
    "layer_norm_gamma_alone",
    lambda f, x: mb.layer_norm(x=x, axes=[-1], gamma=GAMMA[0].astype(f), epsilon=f(0.125)),
    x=CUBE,
    expect=lambda x: _normed(x, (2,), GAMMA[0], np.float32(0), 0.125),
)
case(
    "layer_norm_middle",
    lambda f, x: mb.layer_norm(x=x, axes=[1], gamma=GAMMA[:, 0].astype(f), beta=BETA[:, 0].astype(f), epsilon=f(0.125)),
    x=CUBE,
    expect=lambda x: _normed(x, (1,), GAMMA[:, :1], BETA[:, :1], 0.125),
)
case(
    "layer_norm_ends",
    lambda f, x: mb.layer_norm(x=x, axes=[0, 2], epsilon=f(0.125)),
    x=CUBE,
    expect=lambda x: _normed(x, (0, 2), np.float32(1), np.float32(0), 0.125),
)
case("l2_norm", lambda f, x: mb.l2_norm(x=x, epsilon=f(0.125)), x=numbers(2, 2, 3, 4))

# Products.

MATRIX = numbers(5, 4, seed=2)
BIAS = numbers(5, seed=3)
case("linear", lambda f, x: mb.linear(x=x, weight=MATRIX.astype(f), bias=BIAS.astype(f)), x=X)
case("linear_3d", lambda f, x: mb.linear(x=x, weight=MATRIX.astype(f)), x=CUBE)
for _tx in (False, True):
    for _ty in (False, True):
        case(
            f"matmul_{_tx}_{_ty}",
            lambda f, x, y, tx=_tx, ty=_ty: mb.matmul(x=x, y=y, transpose_x=tx, transpose_y=ty),
            x=numbers(2, 1, *((4, 3) if _tx else (3, 4))),
            y=numbers(5, *((6, 4) if _ty else (4, 6))),
        )
case("matmul_with_constant", lambda f, x: mb.matmul(x=x, y=MATRIX.astype(f), transpose_y=True), x=CUBE)
case("matmul_int", lambda f, x, y: mb.matmul(x=x, y=y, transpose_y=True), x=INTS, y=MORE, half=False)
case(
    "einsum_4d",
    lambda f, x, y: mb.einsum(values=[x, y], equation="nchw,nwhu->nchu"),
    x=numbers(2, 3, 1, 4),
    y=numbers(2, 4, 5, 6),
)
case(
    "einsum_3d",
    lambda f, x, y: mb.einsum(values=[x, y], equation="abc,cbd->abd"),
    x=numbers(3, 2, 4),
    y=numbers(4, 2, 6),
)


def _conv(
    x: Array, weight: Array, bias: Array, stride: int, dilation: int, groups: int, before: int, after: int
) -> Array:
    """A convolution over one spatial dimension, by its definition."""
    padded = np.pad(x, ((0, 0), (0, 0), (before, after))).astype(np.float64)
    out, per, taps = weight.shape
    reach = (taps - 1) * dilation + 1
    length = (padded.shape[2] - reach) // stride + 1
    y = np.zeros((x.shape[0], out, length))
    for channel in range(out):
        first = channel // (out // groups) * per
        for place in range(length):
            window = padded[:, first : first + per, place * stride : place * stride + reach : dilation]
            y[:, channel, place] = (window * weight[channel]).sum((1, 2)) + bias[channel]
    return y.astype(np.float32)


TAPS, TAP_BIAS = numbers(6, 2, 3, seed=4), numbers(6, seed=5)
SIGNAL = numbers(2, 4, 11)
for _kind, _stride, _dilation, _before, _after in (
    ("valid", 1, 3, 0, 0),
    ("custom", 2, 1, 3, 1),
    ("same", 2, 1, 1, 1),
    ("same", 1, 2, 2, 2),
    ("same_lower", 3, 1, 1, 0),
    ("same", 3, 1, 0, 1),
):
    case(
        f"conv_{_kind}_{_stride}_{_dilation}",
        lambda f, x, kind=_kind, s=_stride, d=_dilation, b=_before, a=_after: mb.conv(
            x=x,
            weight=TAPS.astype(f),
            bias=TAP_BIAS.astype(f),
            groups=2,
            strides=[s],
            dilations=[d],
            pad_type=kind,
            **({"pad": [b, a]} if kind == "custom" else {}),
        ),
        x=SIGNAL,
        expect=lambda x, s=_stride, d=_dilation, b=_before, a=_after: _conv(x, TAPS, TAP_BIAS, s, d, 2, b, a),
    )
KERNEL = numbers(3, 1, 2, 3, seed=6)
case(
    "conv_2d_depthwise",
    lambda f, x: mb.conv(x=x, weight=KERNEL.astype(f), groups=3, pad_type="custom", pad=[1, 0, 0, 2]),
    x=numbers(1, 3, 4, 5),
    expect=lambda x: np.array(
        [
            [
                [
                    [(np.pad(x[0, c], ((1, 0), (0, 2)))[i : i + 2, j : j + 3] * KERNEL[c, 0]).sum() for j in range(5)]
                    for i in range(4)
                ]
                for c in range(3)
            ]
        ],
        np.float32,
    ),
)


def _attended(query: Array, key: Array, value: Array, added: Array) -> Array:
    scores = np.einsum("...ld,...sd->...ls", query.astype(np.float64), key) / math.sqrt(query.shape[-1]) + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("...ls,...sv->...lv", weights / weights.sum(-1, keepdims=True), value).astype(np.float32)


#: Two KV heads with six queries each, two positions: queries are folded beside each other.
QUERY, KEY, VALUE = numbers(1, 2, 12, 48), numbers(1, 2, 20, 48, seed=1), numbers(1, 2, 20, 64, seed=2)
REACHES = np.arange(20)[None] <= np.repeat([13, 14], 6)[:, None]
MASK = np.where(REACHES, 0, -1e4).astype(np.float16).astype(np.float32)
case(
    "attention",
    lambda f, query, key, value: mb.scaled_dot_product_attention(query=query, key=key, value=value),
    query=QUERY,
    key=KEY,
    value=VALUE,
)
case(
    "attention_grouped_with_float_mask",
    lambda f, query, key, value, mask: mb.scaled_dot_product_attention(
        query=query, key=key, value=value, attn_mask=mask
    ),
    query=QUERY,
    key=KEY,
    value=VALUE,
    mask=MASK,
    expect=lambda query, key, value, mask: _attended(query, key, value, mask),
)
case(
    "attention_grouped_with_bool_mask",
    lambda f, query, key, value: mb.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=REACHES),
    query=QUERY,
    key=KEY,
    value=VALUE,
    expect=lambda query, key, value: _attended(query, key, value, np.where(REACHES, 0, -np.inf)),
)

# Quantised activations.

SCALES = np.array([0.125, 0.25, 0.5, 0.0625], np.float16)
ZEROS = np.array([-3, 0, 5, 100], np.int8)
case(
    "quantize",
    lambda f, x: mb.cast(
        x=mb.quantize(input=x, scale=SCALES.astype(f), zero_point=ZEROS, axis=1, output_dtype="int8"), dtype="int32"
    ),
    x=X * 16,
    expect=lambda x: np.clip(np.round(x / SCALES.astype(np.float32)) + ZEROS, -128, 127).astype(np.int32),
)
case(
    "dequantize",
    lambda f, x: mb.dequantize(
        input=mb.quantize(input=x, scale=f(0.25), output_dtype="int8"), scale=SCALES.astype(f), zero_point=ZEROS, axis=1
    ),
    x=X,
    expect=lambda x: (np.round(x * 4) - ZEROS) * SCALES.astype(np.float32),
)
