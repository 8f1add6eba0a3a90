"""Random checkpoints in the real format, lively enough to test with.

With plain random weights the residual stream stays close to the token's own embedding, so the tied head
predicts the input token at every position and comparing tokens proves nothing. The values here let
every mechanism speak: attention and MLP write as loudly as the embedding, memory is gathered at the
embedding's scale, lanes mix, taps and gates differ from their neutral values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from needle_export import __version__
from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.layout import optional_shapes, tensor_shapes
from needle_export.checkpoint.safetensors_file import write_checkpoint

Shape = tuple[int, ...]
Normal = Callable[[float], NDArray[np.float32]]

SIGMA = 0.02
"""Standard deviation of ordinary weights, as the model is initialised."""


def make_sample(geometry: Geometry, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a random checkpoint, float16; the same for the same geometry and seed.

    Each tensor has a random stream of its own, named after it, so that two geometries share the tensors
    they have in common in name and shape.
    """
    shapes = tensor_shapes(geometry) | optional_shapes(geometry)
    return {name: _values(name, shape, seed).astype(np.float16) for name, shape in shapes.items()}


def write_sample(path: str | PathLike[str], geometry: Geometry, seed: int) -> None:
    """Writes ``make_sample`` as a float16 checkpoint whose run metadata say that it is random.

    Raises:
        UsageError: when the place can't be written.
    """
    write_checkpoint(path, geometry, make_sample(geometry, seed), dtype="float16",
                     run={"random": True, "seed": seed, "generator": f"needle-export {__version__}"})


def _values(name: str, shape: Shape, seed: int) -> NDArray[np.float32]:
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))

    def normal(sigma: float) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32) * np.float32(sigma)

    def uniform(low: float, high: float) -> NDArray[np.float32]:
        return rng.uniform(low, high, shape).astype(np.float32)

    leaf = name.rsplit("/", 1)[-1]
    if leaf == "scale":
        # Zero-centred scales: the norm multiplies by 1 + scale.
        if "post_attn_norm" in name:
            return uniform(5, 8)
        # Sharper attention keeps positions apart; much sharper would amplify rounding beyond float32's.
        return uniform(0.4, 0.7) if name.endswith(("q_norm/scale", "k_norm/scale")) else normal(0.1)
    if leaf == "attn_gate":
        return uniform(4, 5)
    if name.startswith("engrams_") and leaf == "embedding":
        return normal(1.0)
    if leaf.endswith("taps"):
        return _identity_taps(shape) + normal(0.1)
    if "hadamard_mlp" in name:
        return _mlp(leaf, shape, normal, uniform)
    if leaf.startswith("mhc_"):
        return _lanes(leaf, shape, normal, uniform)
    if name.partition("/")[0].endswith("_head"):
        return _head(name.partition("/")[2], shape, normal, uniform)
    return normal(SIGMA)


def _mlp(leaf: str, shape: Shape, normal: Normal,
         uniform: Callable[[float, float], NDArray[np.float32]]) -> NDArray[np.float32]:
    if leaf in ("d1", "d2", "d3"):
        return uniform(0.8, 1.2)
    if leaf == "d4":
        # The architecture starts at 0.02; 30 to 50 times that is what makes predictions vary.
        return uniform(0.6, 1.0)
    if leaf == "b2":
        return normal(0.1)
    if leaf == "cond_v":
        return normal(5 * SIGMA)
    if leaf == "cond_u":
        return normal(0.3)
    return _walsh(shape[-1]) + normal(0.1 / math.sqrt(shape[-1]))


def _lanes(leaf: str, shape: Shape, normal: Normal,
           uniform: Callable[[float, float], NDArray[np.float32]]) -> NDArray[np.float32]:
    if leaf.startswith("mhc_a_"):
        return uniform(0.2, 0.4)
    if leaf == "mhc_b_res":
        return 4 * np.eye(shape[-1], dtype=np.float32) + normal(1.0)
    if leaf.startswith("mhc_b_"):
        # The fixed offsets are +-4, so this opens lanes other than the block's own.
        return normal(1.5)
    return normal(SIGMA)


def _head(leaf: str, shape: Shape, normal: Normal,
          uniform: Callable[[float, float], NDArray[np.float32]]) -> NDArray[np.float32]:
    if leaf == "gain":
        return uniform(0.5, 1.5)
    if leaf in ("probes", "query", "row_bias"):
        return normal(1.0)
    if leaf == "log_temp":
        return np.asarray(math.log(10.0), np.float32)
    if leaf == "bias":
        return np.asarray(-10.0, np.float32)
    if leaf == "calibration":
        return uniform(0.0, 1.0)
    return normal(SIGMA)


def _identity_taps(shape: Shape) -> NDArray[np.float32]:
    """Taps [..., taps, channels] that pass the newest row through."""
    taps = np.zeros(shape, np.float32)
    taps[..., 0, :] = 1
    return taps


def _walsh(size: int) -> NDArray[np.float32]:
    """Normalised Walsh-Hadamard matrix [size, size], ``size`` a power of two."""
    bits = np.arange(size)
    parity = np.bitwise_count(bits[:, None] & bits) & 1
    matrix: NDArray[np.float32] = ((1 - 2.0 * parity) / math.sqrt(size)).astype(np.float32)
    return matrix
