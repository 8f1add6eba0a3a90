"""The reference model beside the oracle: the same weights and tokens through both."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from needle.model.architecture import SimpleAttentionNetwork, TransformerConfig

from needle_export.checkpoint.checkpoint import standard_permutations
from needle_export.checkpoint.geometry import Geometry
from needle_export.model.network import Needle
from tests.support.oracle import Tree

# Only the speed of compilation: 20 unrolled Sinkhorn iterations are what XLA spends its time on.
_COMPILER = {"xla_backend_optimization_level": "0"}

Answers = dict[str, np.ndarray]
Oracle = Callable[[Tree, np.ndarray], Answers]


def compile_oracle(config: TransformerConfig, heads: tuple[str, ...] = ()) -> Oracle:
    """The oracle at a configuration as one compiled function of parameters and tokens [B, T].

    Its result has ``logits`` [B, T, V] and, by name, the answers of the probe heads asked for.
    """
    model = SimpleAttentionNetwork(config)

    def everything(module: Any, tokens: Any) -> dict[str, Any]:
        found = {"logits": module(tokens)}
        if heads:
            # As forward_embedding and its kin do it, with the hidden states computed once for all.
            pooled = module._head_cells(tokens)
            for name in heads:
                answer = getattr(module, f"{name}_head")(*pooled)
                found[name] = answer[0] if name == "embedding" else answer
            if "confidence" in heads:
                found["confidence"] = found["confidence"][..., 0]
        return found

    compiled = jax.jit(lambda tree, tokens: model.apply({"params": tree}, tokens, method=everything),
                       compiler_options=_COMPILER)

    def run(tree: Tree, tokens: np.ndarray) -> Answers:
        found = compiled(tree, jnp.asarray(tokens, jnp.int32))
        return {name: np.asarray(value) for name, value in found.items()}

    return run


def build(geometry: Geometry, tensors: Mapping[str, np.ndarray]) -> Needle:
    """The reference model with the permutations its geometry implies."""
    return Needle(geometry, tensors, standard_permutations(geometry.hada_n, geometry.split_permutations))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Thousands of small operations: on a busy machine two threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def answers(net: Needle, tokens: np.ndarray, heads: tuple[str, ...] = ()) -> Answers:
    """What the reference model says where ``compile_oracle`` says it, in the same shapes."""
    rows = torch.from_numpy(tokens)
    with one_thread():
        found = {"logits": net(rows).numpy()}
        for name in heads:
            value = torch.stack([net.head(name, row) for row in rows])
            found[name] = (value[:, 0] if name == "confidence" else value).numpy()
    return found


def tokens_for(geometry: Geometry, length: int, *, batch: int = 1, seed: int = 5,
               pad: bool = False) -> np.ndarray:
    """Seeded tokens [B, T], without the padding token unless ``pad``."""
    low = 0 if pad else geometry.pad_token_id + 1
    return np.random.RandomState(seed).randint(low, geometry.vocab_size, (batch, length))


def changed(geometry: Geometry, **fields: Any) -> Geometry:
    """A geometry with other numbers, its engram rows as wide as the rest makes them."""
    tables = len(fields.get("engram_orders", geometry.engram_orders)) * fields.get(
        "engram_heads", geometry.engram_heads)
    width = fields.get("d_model", geometry.d_model) // tables
    out = dataclasses.replace(geometry, **{"engram_sub_dim": width, **fields})
    out.validate()
    return out


def differences(theirs: Answers, ours: Answers) -> dict[str, float]:
    """Largest absolute difference of each answer; shapes must agree."""
    assert {name: value.shape for name, value in theirs.items()} == {
        name: value.shape for name, value in ours.items()}
    return {name: float(np.abs(value - ours[name]).max()) for name, value in theirs.items()}


def assert_lively(logits: np.ndarray, tokens: np.ndarray) -> None:
    """A comparison of dead weights proves nothing: predictions vary and don't repeat the input."""
    predicted = logits.argmax(-1)
    assert len(np.unique(predicted)) >= 20
    assert (predicted == tokens).mean() < 0.5
    assert logits.std() > 0.1
