"""A small Needle trained on a made-up language of tool calls, for measurements that random weights can't stand for.

The language: somebody asks for one or two things in words, with fillers between them that follow each other by a
fixed table; the answer names the tool and repeats the values that were asked for, in the tool's own order. So a model
has to learn which words call for which tool, to copy, and to count arguments; much of it is certain and some is open,
as in the prompts that the model family is made for.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.loaded import standard_permutations
from needle_export.checkpoint.sample import make_sample
from needle_export.model.network import Needle

GEOMETRY = dataclasses.replace(
    SMALL,
    vocab_size=448,
    d_model=256,
    num_layers=4,
    global_layers=(1, 3),
    sliding_window=32,
    engram_heads=1,
    engram_sub_dim=128,
    engram_slots=1024,
    engram_layers=(1, 3),
    heads=(),
)
LENGTH = 96

PAD, START, ASK, CALL, OPEN, CLOSE, SET, COMMA, AND, END = range(10)
TOOLS, ARGUMENTS, FILLERS, VERBS, VALUES = 10, 34, 50, 110, 182
_TOOLS, _FILLERS, _KINDS = 24, 60, 8
_VALUES = (VOCABULARY := GEOMETRY.vocab_size) - VALUES


class Language:
    """Draws sequences; its rules are drawn once from a seed, sequences from another."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        # Of each tool: the arguments, each of which takes values of one kind.
        self.arguments = [rng.choice(16, rng.integers(1, 4), replace=False) for _ in range(_TOOLS)]
        self.kinds = rng.integers(0, _KINDS, 16)
        self.values = np.array_split(rng.permutation(_VALUES), _KINDS)
        # Values of a kind aren't equally frequent, and fillers prefer some successors.
        self.follow = rng.dirichlet(np.full(_FILLERS, 0.05), _FILLERS)

    def _fill(self, rng: np.random.Generator, out: list[int]) -> None:
        word = rng.integers(_FILLERS)
        for _ in range(rng.integers(0, 4)):
            out.append(FILLERS + int(word))
            word = rng.choice(_FILLERS, p=self.follow[word])

    def request(self, rng: np.random.Generator) -> list[int]:
        """One request and its answer."""
        asked, answer = [ASK], [CALL]
        for turn in range(rng.integers(1, 3)):
            tool = int(rng.integers(_TOOLS))
            if turn:
                asked.append(AND)
                answer.append(AND)
            self._fill(rng, asked)
            asked.append(VERBS + 3 * tool + int(rng.integers(3)))
            chosen = {}
            for argument in rng.permutation(self.arguments[tool]):
                kind = self.values[self.kinds[argument]]
                chosen[argument] = VALUES + int(kind[min(int(rng.exponential(len(kind) / 3)), len(kind) - 1)])
                self._fill(rng, asked)
                asked += [ARGUMENTS + int(argument), chosen[argument]]
            answer += [TOOLS + tool, OPEN]
            for argument in self.arguments[tool]:
                answer += [ARGUMENTS + int(argument), SET, chosen[argument], COMMA]
            answer[-1] = CLOSE
        return [*asked, *answer, END]

    def sequences(self, count: int, seed: int) -> Tensor:
        """[count, LENGTH] int64: requests one after the other, cut where the sequence ends."""
        rng = np.random.default_rng([1, seed])
        out = []
        for _ in range(count):
            row = [START]
            while len(row) < LENGTH:
                row += self.request(rng)
            out.append(row[:LENGTH])
        return torch.tensor(out)


def logits(net: Needle, tokens: Tensor) -> Tensor:
    """[B, T] -> [B, T, V], all sequences at once."""
    return torch.vmap(lambda row: net.logits(net.hidden(row)[-1]))(tokens)


def fresh() -> Needle:
    """A network at neutral norms and gates."""
    tensors = {name: value.astype(np.float32) for name, value in make_sample(GEOMETRY, 0).items()}
    for name, value in tensors.items():
        if name.endswith(("/scale", "attn_gate")):
            value[...] = 0
        elif name.endswith("d4"):
            value *= 0.3
        elif name.endswith("kernel"):
            value *= 2
    return Needle(GEOMETRY, tensors, standard_permutations(GEOMETRY.hada_n, GEOMETRY.split_permutations))


def train(steps: int, batch: int = 16, peak: float = 3e-3) -> tuple[Needle, list[float]]:
    """A trained network, and its loss at every step in nats a token."""
    torch.manual_seed(0)
    language, net = Language(), fresh()
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    adam = torch.optim.AdamW(net.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step in range(steps):
        share = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in adam.param_groups:
            group["lr"] = peak * share
        tokens = language.sequences(batch, step)
        scores = logits(net, tokens)
        loss = nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return net, losses


def trained(steps: int, cache: Path | None = None) -> tuple[Needle, list[float]]:
    """As :func:`train`, or what an earlier call has left in a file."""
    if cache is not None and cache.exists():
        held = torch.load(cache)
        net = fresh()
        net.load_state_dict(held["parameters"])
        return net, held["losses"]
    net, losses = train(steps)
    if cache is not None:
        torch.save({"parameters": net.state_dict(), "losses": losses}, cache)
    return net, losses
