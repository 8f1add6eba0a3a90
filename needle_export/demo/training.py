"""Trains the demo model: seeded, resumable, on a CPU.

A step is one list of tools with K requests behind it, packed (:mod:`needle_export.demo.packed`), at a depth drawn for
that step, so that rungs are trained as well. The loss is the cross-entropy of the answers' tokens. What a step draws
depends on the seed and its number alone, so that a run that was interrupted goes on as if it hadn't been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from needle_export.checkpoint.files import atomic_write
from needle_export.checkpoint.geometry import Geometry
from needle_export.checkpoint.ladder import cut_of, ladder_geometry
from needle_export.checkpoint.loaded import standard_permutations
from needle_export.checkpoint.text import Tokenizer
from needle_export.demo.geometry import DEMO, initial
from needle_export.demo.muon import Muon
from needle_export.demo.packed import Packing, hidden
from needle_export.demo.prompts import Group, group
from needle_export.errors import BadInput
from needle_export.generate.schemas import Tool
from needle_export.model.network import Needle


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        steps: of the whole run.
        requests: a step.
        warmup: steps until the rate is whole; then it falls along a cosine to ``floor`` of it.
        rate: of AdamW, which has all but the projections.
        matrix_rate: of Muon, which has the projections.
        decay: of the projections' weights.
        whole: how often a step trains the full depth; otherwise any lower rung.
    """

    steps: int = 3000
    requests: int = 32
    warmup: int = 150
    rate: float = 3e-3
    matrix_rate: float = 0.02
    floor: float = 0.01
    decay: float = 0.05
    whole: float = 0.6

    def share_at(self, step: int) -> float:
        """Share of the full learning rates at a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


def sliced(geometry: Geometry, tensors: Mapping[str, Tensor], depth: int) -> tuple[Geometry, dict[str, Tensor]]:
    """A rung's geometry and tensors, through which gradients reach those of the whole."""
    if depth == geometry.num_layers:
        return geometry, dict(tensors)
    cut, out = cut_of(geometry, depth), dict[str, Tensor]()
    for name, value in tensors.items():
        target, part = cut.renamed(name), cut.along(name)
        if target is not None:
            out[target] = value if part is None else value.index_select(part[0], torch.from_numpy(part[1]))
    return ladder_geometry(geometry, depth), out


def model_of(geometry: Geometry, tensors: Mapping[str, Tensor], depth: int) -> Needle:
    """The reference model of a rung over these tensors."""
    rung, cut = sliced(geometry, tensors, depth)
    return Needle(rung, cut, standard_permutations(geometry.hada_n))


def answer_rows(packing: Packing, requests: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that predict an answer's token, the tokens, and the branch of each: [A] each.

    A branch's last token is predicted and predicts nothing, so that it is no row of the packing.
    """
    rows: list[int] = []
    targets: list[int] = []
    owner: list[int] = []
    for k, (tokens, prompt) in enumerate(requests.branches):
        start = int(packing.starts[k])
        rows += [start + j - 1 for j in range(prompt, len(tokens))]
        targets += tokens[prompt:]
        owner += [k] * (len(tokens) - prompt)
    return torch.tensor(rows), torch.tensor(targets), torch.tensor(owner)


def predicted(model: Needle, requests: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [A, V] of the answers' tokens, the tokens [A] and their branches [A]."""
    packing = Packing(requests.head, [tokens[:-1] for tokens, _ in requests.branches])
    rows, targets, owner = answer_rows(packing, requests)
    return model.logits(hidden(model, packing)[-1][rows]), targets, owner


def exact(model: Needle, requests: Group) -> Tensor:
    """Whether greedy decoding gives the answer, token for token: [K] bool.

    It does exactly if every token of the right answer is the most likely one behind those before it.
    """
    with torch.no_grad():
        logits, targets, owner = predicted(model, requests)
    wrong = (logits.argmax(-1) != targets).long()
    return torch.zeros(len(requests.branches), dtype=torch.int64).index_add(0, owner, wrong) == 0


class Training:
    """A run: weights in the checkpoint's layout, the optimiser, and how far it is.

    Args:
        tools: that prompts offer.
        tokenizer: that they are read with.
        seed: of the initial values and of all that is drawn.
        geometry: of the model.
    """

    def __init__(self, tools: Sequence[Tool], tokenizer: Tokenizer, seed: int, schedule: Schedule,
                 geometry: Geometry = DEMO) -> None:
        self.tools, self.tokenizer, self.seed, self.schedule, self.geometry = tools, tokenizer, seed, schedule, geometry
        self.weights = {name: value.requires_grad_() for name, value in initial(geometry, seed).items()}
        # Probe heads are trained afterwards, on what the finished model answers.
        trained = {name: w for name, w in self.weights.items() if not name.partition("/")[0].endswith("_head")}
        matrices = [w for name, w in trained.items() if name.endswith("kernel")]
        rest = [w for name, w in trained.items() if not name.endswith("kernel")]
        self.optimizers = (Muon(matrices, schedule.matrix_rate, decay=schedule.decay),
                           torch.optim.AdamW(rest, schedule.rate, (0.9, 0.97), 1e-9, weight_decay=0.0, fused=True))
        self.parameters = [*matrices, *rest]
        self.step = 0

    def run(self, told: Callable[[int, float, int], None], save: Callable[[], None], every: int = 200) -> None:
        """Train to the end; ``told(step, loss, depth)`` after each step, ``save()`` every so often and at the end."""
        while self.step < self.schedule.steps:
            loss, depth = self._one()
            self.step += 1
            told(self.step, loss, depth)
            if self.step % every == 0 or self.step == self.schedule.steps:
                save()

    def _one(self) -> tuple[float, int]:
        rng = Random(f"{self.seed} step {self.step}")
        top = self.geometry.num_layers
        depth = top if rng.random() < self.schedule.whole else rng.randint(2, top - 1)
        requests = group(rng, "train", self.tools, self.schedule.requests, self.tokenizer)
        logits, targets, _ = predicted(model_of(self.geometry, self.weights, depth), requests)
        loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own stub
        for weight in self.parameters:
            # A rung leaves some out; a missing gradient would stop their moments, a zero one lets them fade.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, whole in zip(self.optimizers, (self.schedule.matrix_rate, self.schedule.rate), strict=True):
            for part in optimizer.param_groups:
                part["lr"] = whole * self.schedule.share_at(self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), depth

    def save(self, path: Path) -> None:
        """Write the state of the run, whole or not at all."""
        state = {"step": self.step, "seed": self.seed, "schedule": vars(self.schedule),
                 "weights": {k: v.detach() for k, v in self.weights.items()},
                 "optimizers": [o.state_dict() for o in self.optimizers]}
        with atomic_write(path) as handle:
            torch.save(state, handle)

    def load(self, path: Path) -> None:
        """Go on from a saved state.

        Raises:
            BadInput: it is of a run with another seed or schedule.
        """
        state = torch.load(path, weights_only=True)
        if state["seed"] != self.seed or state["schedule"] != vars(self.schedule):
            raise BadInput("it belongs to a run with another seed or schedule", where=str(path),
                           fix="give the same options, or remove it to start anew")
        with torch.no_grad():
            for name, value in state["weights"].items():
                self.weights[name].copy_(value)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
