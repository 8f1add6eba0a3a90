"""Cases of ops that move elements, look them up, or make them from sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.targets.coreml.op_cases import CUBE, X, Y, case, mb
from tests.targets.coreml.packages import Array, numbers, whole

BLOCK = numbers(4, 5, 6)

# Another layout.

for _name, _shape in (("plain", [4, 6]), ("rest", [2, -1]), ("kept", [0, 0, -1]), ("kept_and_given", [0, 4, 3])):
    case(f"reshape_{_name}", lambda f, x, shape=_shape: mb.reshape(x=x, shape=shape), x=CUBE)
case(
    "reshape_at_run_time",
    lambda f, x, shape: mb.reshape(x=mb.reshape(x=x, shape=shape), shape=[24]),
    x=CUBE,
    shape=whole([4, -1]),
    expect=lambda x, shape: x.reshape(24),
)
case("transpose", lambda f, x: mb.transpose(x=x, perm=[2, 0, 1]), x=CUBE)
case("transpose_negative", lambda f, x: mb.transpose(x=x, perm=[-1, 0, -2]), x=CUBE)
case("expand_dims", lambda f, x: mb.expand_dims(x=x, axes=[0, -1, 2]), x=X)
case("expand_dims_one", lambda f, x: mb.expand_dims(x=x, axes=[-2]), x=X)
case("squeeze", lambda f, x: mb.squeeze(x=x, axes=[0, -1]), x=numbers(1, 3, 1, 1))
case("squeeze_all", lambda f, x: mb.squeeze(x=x), x=numbers(1, 3, 1, 2))
case("concat", lambda f, x, y: mb.concat(values=[x, y, x], axis=-1), x=X, y=numbers(3, 2, seed=2))
case(
    "concat_interleaved",
    lambda f, x, y: mb.concat(values=[x, y], axis=0, interleave=True),
    x=X,
    y=Y,
    expect=lambda x, y: np.stack([x, y], 1).reshape(6, 4),
)
case("stack", lambda f, x, y: mb.stack(values=[x, y], axis=1), x=X, y=Y)
case("split", lambda f, x: mb.split(x=x, num_splits=2, axis=1), x=X)
case("split_sizes", lambda f, x: mb.split(x=x, split_sizes=[1, 3], axis=-1), x=X)
case("tile", lambda f, x: mb.tile(x=x, reps=[2, 1, 3]), x=CUBE)
case("reverse", lambda f, x: mb.reverse(x=x, axes=[1]), x=X)
case("reverse_all", lambda f, x: mb.reverse(x=x), x=X)
case(
    "band_part", lambda f, x: mb.band_part(x=x, lower=1, upper=0), x=CUBE, expect=lambda x: np.tril(x) - np.tril(x, -2)
)
case(
    "band_part_upper",
    lambda f, x: mb.band_part(x=x, lower=0, upper=-1),
    x=CUBE,
    expect=lambda x: np.triu(x),
)
case("pad", lambda f, x: mb.pad(x=x, pad=[1, 0, 2, 3], mode="constant", constant_val=f(0.5)), x=CUBE)
case("pad_reflect", lambda f, x: mb.pad(x=x, pad=[2, 1], mode="reflect"), x=X)
case("pad_replicate", lambda f, x: mb.pad(x=x, pad=[1, 0, 2, 1], mode="replicate"), x=X)
case("fill", lambda f, x: mb.add(x=x, y=mb.fill(shape=[3, 4], value=f(0.5))), x=X)
case(
    "fill_at_run_time",
    lambda f, x, sizes: mb.reshape(x=mb.fill(shape=sizes, value=f(0.5)), shape=[6]),
    x=X,
    sizes=whole([2, 3]),
    expect=lambda x, sizes: np.full(6, 0.5, np.float32),
)
case(
    "fill_like",
    lambda f, x: mb.add(x=x, y=mb.fill_like(ref_tensor=x, value=f(2))),
    x=X,
    expect=lambda x: x + 2,
)
case(
    "range_1d",
    lambda f, x: mb.reshape(x=mb.range_1d(start=np.int32(2), end=mb.squeeze(x=x), step=np.int32(3)), shape=[4]),
    x=whole([12]),
    half=False,
    expect=lambda x: whole([2, 5, 8, 11]),
)
case("shape", lambda f, x: mb.shape(x=x), x=CUBE)
case("one_hot", lambda f, x: mb.one_hot(indices=x, one_hot_vector_size=4, axis=0, on_value=f(2), off_value=f(-1)),
     x=whole([3, 0, 1]), expect=lambda x: np.where(np.arange(4)[:, None] == x, 2, -1).astype(np.float32))

# Slices.

case("slice_by_index", lambda f, x: mb.slice_by_index(x=x, begin=[1, 0, 2], end=[3, 5, 6], stride=[1, 2, 3]), x=BLOCK)
case(
    "slice_by_index_masks",
    lambda f, x: mb.slice_by_index(
        x=x, begin=[1, 3, 9], end=[9, 4, 9], begin_mask=[False, True, True], end_mask=[True, False, True]
    ),
    x=BLOCK,
)
case(
    "slice_by_index_squeeze",
    lambda f, x: mb.slice_by_index(x=x, begin=[-1, 1, 0], end=[0, 3, 6], squeeze_mask=[True, False, False]),
    x=BLOCK,
)
case(
    "slice_by_index_from_the_end",
    lambda f, x: mb.slice_by_index(x=x, begin=[-3, 0, -2], end=[-1, 5, 6]),
    x=BLOCK,
)
case(
    "slice_by_index_backwards",
    lambda f, x: mb.slice_by_index(
        x=x, begin=[0, 4, 5], end=[4, 0, 0], stride=[1, -1, -2], end_mask=[False, False, True]
    ),
    x=BLOCK,
)
case(
    "slice_by_index_at_run_time",
    lambda f, x, at: mb.reshape(
        x=mb.slice_by_index(x=x, begin=at, end=mb.add(x=at, y=whole([2, 1, 3]))), shape=[2, 1, 3]
    ),
    x=BLOCK,
    at=whole([1, 4, 2]),
    expect=lambda x, at: x[1:3, 4:5, 2:5],
)
case("slice_by_size", lambda f, x: mb.slice_by_size(x=x, begin=[1, 0, 2], size=[2, -1, 3]), x=BLOCK)
case(
    "slice_by_size_at_run_time",
    lambda f, x, at: mb.slice_by_size(x=x, begin=at, size=[2, 1, 3]),
    x=BLOCK,
    at=whole([1, 4, 2]),
    expect=lambda x, at: x[1:3, 4:5, 2:5],
)
case("slice_update", lambda f, x, y: mb.slice_update(x=x, update=y, begin=[0, 1], end=[3, 3]), x=X, y=numbers(3, 2))
case(
    "slice_update_masks",
    lambda f, x, y: mb.slice_update(
        x=x, update=y, begin=[1, 9], end=[9, 9], begin_mask=[False, True], end_mask=[True, True], stride=[1, 2]
    ),
    x=X,
    y=numbers(2, 2),
)
case(
    "slice_update_squeezed",
    lambda f, x, y: mb.slice_update(x=x, update=y, begin=[0, -1], end=[3, 0], squeeze_mask=[False, True]),
    x=X,
    y=numbers(3),
    expect=lambda x, y: np.concatenate([x[:, :3], y[:, None]], 1),
)
case(
    "slice_update_backwards",
    lambda f, x, y: mb.slice_update(x=x, update=y, begin=[0, 3], end=[3, 0], stride=[1, -2], end_mask=[False, True]),
    x=X,
    y=numbers(3, 2),
)


def _slot(x: Array, y: Array, slot: Array) -> Array:
    whole_cache = x.copy()
    whole_cache[:, :, slot[0]] = y[:, :, 0]
    return whole_cache


case(
    "slice_update_at_a_slot",
    lambda f, x, y, slot: mb.slice_update(
        x=x,
        update=y,
        begin=mb.concat(values=[whole([0, 0]), slot], axis=0),
        end=mb.concat(values=[whole([2, 48]), mb.add(x=slot, y=whole([1]))], axis=0),
    ),
    x=numbers(2, 48, 20),
    y=numbers(2, 48, 1),
    slot=whole([17]),
    expect=_slot,
)

# Look-ups.

TABLE = numbers(9, 5, seed=3)
PLACES = whole([[3, 0], [8, 3]])
case("gather", lambda f, x, at: mb.gather(x=x, indices=at, axis=0), x=TABLE, at=PLACES)
case("gather_axis", lambda f, x, at: mb.gather(x=x, indices=at, axis=-1), x=CUBE, at=whole([3, 3, 0]))
case(
    "gather_constant",
    lambda f, at: mb.gather(x=TABLE.astype(f), indices=at, axis=0, validate_indices=True),
    at=PLACES,
)
case(
    "gather_constant_axis",
    lambda f, at: mb.gather(x=BLOCK.astype(f), indices=at, axis=1),
    at=PLACES % 5,
)
case(
    "gather_scalar",
    lambda f, x, at: mb.gather(x=x, indices=mb.squeeze(x=at), axis=1),
    x=CUBE,
    at=whole([2]),
)


def _batched(name: str, constant: bool, axis: int, x: Array, at: Array) -> None:
    def body(f: Any, at: Any, x: Any = x) -> Any:
        return mb.gather(x=x.astype(f) if constant else x, indices=at, axis=axis, batch_dims=1)

    formula = np.stack([np.take(x[i], at[i], axis - 1) for i in range(len(x))])
    inputs = {"at": at} if constant else {"at": at, "x": x}
    case(name, body, expect=lambda **_: formula, **inputs)


_batched("gather_batches", False, 1, numbers(3, 7, 2), whole([[6, 0], [1, 1], [2, 5]]))
_batched("gather_batches_constant", True, 1, numbers(3, 7, 2), whole([[6, 0], [1, 1], [2, 5]]))
_batched("gather_batches_inner", False, 2, numbers(3, 2, 7, 2), whole([[6, 0], [1, 1], [2, 5]]))
case(
    "gather_along_axis",
    lambda f, x, at: mb.gather_along_axis(x=x, indices=at, axis=1),
    x=X,
    at=whole([[3, 0], [1, 1], [2, 3]]),
)
case(
    "gather_nd",
    lambda f, x, at: mb.gather_nd(x=x, indices=at),
    x=BLOCK,
    at=whole([[[3, 0], [1, 4]]]),
    expect=lambda x, at: x[at[..., 0], at[..., 1]],
)
case(
    "gather_nd_constant",
    lambda f, at: mb.gather_nd(x=BLOCK.astype(f), indices=at),
    at=whole([[3, 0], [1, 4], [1, 4]]),
    expect=lambda at: BLOCK[at[..., 0], at[..., 1]],
)
case(
    "gather_nd_batches",
    lambda f, x, at: mb.gather_nd(x=x, indices=at, batch_dims=1),
    x=BLOCK,
    at=whole([[[3]], [[0]], [[4]], [[2]]]),
    expect=lambda x, at: np.stack([x[i, at[i, :, 0]] for i in range(4)]),
)


def _scattered(adds: bool) -> Callable[..., Array]:
    def formula(x: Array, y: Array) -> Array:
        result = x.copy()
        result[[2, 0]] = result[[2, 0]] + y if adds else y
        return result

    return formula


for _mode in ("add", "update"):
    case(
        f"scatter_{_mode}",
        lambda f, x, y, mode=_mode: mb.scatter(data=x, indices=whole([2, 0]), updates=y, axis=0, mode=mode),
        x=X,
        y=numbers(2, 4),
        expect=_scattered(_mode == "add"),
    )
    case(
        f"scatter_along_axis_{_mode}",
        lambda f, x, y, mode=_mode: mb.scatter_along_axis(
            data=x, indices=whole([[2] * 4, [0] * 4]), updates=y, axis=0, mode=mode
        ),
        x=X,
        y=numbers(2, 4),
        expect=_scattered(_mode == "add"),
    )
    case(
        f"scatter_nd_{_mode}",
        lambda f, x, y, mode=_mode: mb.scatter_nd(data=x, indices=whole([[2], [0]]), updates=y, mode=mode),
        x=X,
        y=numbers(2, 4),
        expect=_scattered(_mode == "add"),
    )
