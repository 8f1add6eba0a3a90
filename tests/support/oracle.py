"""The JAX implementation of Needle 3 as the numeric oracle of the tests.

Everything is float32, without rematerialisation and without the fused attention kernel, so that
differences are rounding and nothing else. Only tests that compare with the oracle may import this.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from needle.model.architecture import SimpleAttentionNetwork, TransformerConfig
from needle.model.checkpoints import flatten, unflatten

from needle_export.checkpoint.geometry import Geometry

Tree = dict[str, Any]


def oracle_config(geometry: Geometry) -> TransformerConfig:
    """The oracle's configuration of a geometry, set up for exact float32 arithmetic."""
    config = TransformerConfig.from_saved(geometry.to_config())
    config.dtype, config.flash, config.remat = "float32", False, False
    return config


def to_tree(tensors: Mapping[str, np.ndarray], dtype: Any = np.float32) -> Tree:
    """Named tensors as the oracle's parameter tree, converted to ``dtype``."""
    return unflatten({name: np.asarray(array).astype(dtype) for name, array in tensors.items()})


def to_tensors(tree: Tree) -> dict[str, np.ndarray]:
    """The oracle's parameter tree as named tensors."""
    return {name: np.asarray(array) for name, array in flatten(tree).items()}


def parameter_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the oracle's own parameters, with the probe heads the geometry has."""
    model = SimpleAttentionNetwork(oracle_config(geometry))

    def everything(module: Any, tokens: Any) -> Any:
        heads = [getattr(module, f"forward_{head.name}")(tokens) for head in geometry.heads]
        return module(tokens), heads

    tokens = np.ones((1, 4), np.int32)
    tree = jax.eval_shape(lambda key: model.init(key, tokens, method=everything), jax.random.PRNGKey(0))
    leaves = jax.tree_util.tree_flatten_with_path(tree["params"])[0]
    return {"/".join(str(entry.key) for entry in path): leaf.shape for path, leaf in leaves}


@functools.lru_cache(maxsize=8)
def _compiled(geometry: Geometry, method: str) -> Any:
    model = SimpleAttentionNetwork(oracle_config(geometry))
    return jax.jit(lambda tree, tokens: model.apply({"params": tree}, tokens, method=method))


def logits(geometry: Geometry, tensors: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The oracle's logits, float32 [B, T, head_vocab], for tokens [B, T]."""
    return np.asarray(_compiled(geometry, "__call__")(to_tree(tensors), jnp.asarray(tokens, jnp.int32)))


def head(geometry: Geometry, tensors: Mapping[str, np.ndarray], tokens: np.ndarray,
         name: str) -> np.ndarray:
    """A probe head's answer for tokens [B, T]: "embedding", "confidence" or "router", by ``name``."""
    answer = _compiled(geometry, f"forward_{name}")
    return np.asarray(answer(to_tree(tensors), jnp.asarray(tokens, jnp.int32)))


def hidden_cells(geometry: Geometry, tensors: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Lane-averaged hidden states of the embedding and every block, float32 [B, T, L + 1, C]."""
    return np.asarray(_compiled(geometry, "hidden_cells")(to_tree(tensors), jnp.asarray(tokens, jnp.int32)))
