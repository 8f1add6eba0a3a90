"""Trains the demo's confidence head: how likely the calls of an answer are right.

The model stays as it is. Requests of the validation split, which the model has not seen, are answered greedily; the
head reads the prompt and the answer, up to and with the marker that ends the calls, and learns, as a logit, whether the
answer is exact. Wrong answers are rarer than
right ones, so as many of each are learnt from, and the bias is then set to the share that was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import Geometry
from needle_export.checkpoint.layout import head_shapes
from needle_export.checkpoint.text import Tokenizer
from needle_export.demo.geometry import initial
from needle_export.demo.packed import Packing, hidden
from needle_export.demo.prompts import Group, group
from needle_export.demo.training import exact
from needle_export.generate.prompt import IM_END
from needle_export.generate.schemas import Tool
from needle_export.model.heads import ProbeHead
from needle_export.model.network import Needle

HEAD = "confidence"

#: Longest answer that is decoded, in tokens.
LONGEST = 64


@dataclass(frozen=True)
class Judged:
    """A sequence's hidden states [T, M, C], float16, and whether its answer is exact."""

    cells: Tensor
    right: bool


def greedy(model: Needle, requests: Group, end: int) -> list[list[int]]:
    """What greedy decoding answers to each request, up to the end token, itself included."""
    texts = [list(tokens[:prompt]) for tokens, prompt in requests.branches]
    prompts = [len(t) for t in texts]
    open_ = list(range(len(texts)))
    with torch.no_grad():
        for _ in range(LONGEST):
            packing = Packing(requests.head, [texts[k] for k in open_])
            last = packing.starts + packing.real.sum(1) - 1
            best = model.logits(hidden(model, packing)[-1][last]).argmax(-1).tolist()
            for k, token in zip(open_, best, strict=True):
                texts[k].append(token)
            open_ = [k for k, token in zip(open_, best, strict=True) if token != end]
            if not open_:
                break
    return [text[prompt:] for text, prompt in zip(texts, prompts, strict=True)]


def judged(model: Needle, tools: Sequence[Tool], tokenizer: Tokenizer, seed: int, groups: int, size: int,
           told: Callable[[], None], most: int = 400) -> tuple[list[Judged], float]:
    """Answers with their verdicts, as many wrong as right where there are enough; and the share of right ones."""
    end = tokenizer.marker(IM_END)
    assert end is not None  # the demo's own tokenizer has every marker
    found: dict[bool, list[Judged]] = {True: [], False: []}
    right = total = 0
    for index in range(groups):
        requests = group(Random(f"{seed} confidence {index}"), "validation", tools, size, tokenizer)
        verdicts = exact(model, requests).tolist()
        right, total = right + sum(verdicts), total + size
        wrong = [k for k in range(size) if not verdicts[k]]
        good = [k for k in range(size) if verdicts[k]][: max(2, len(wrong))]
        if wrong:
            cut = Group(requests.head, tuple(requests.branches[k] for k in wrong))
            answers = greedy(model, cut, end)
            branches = [[*tokens[:prompt], *(t for t in answer if t != end)]
                        for (tokens, prompt), answer in zip(cut.branches, answers, strict=True)]
            found[False] += _cells(model, requests.head, branches, right=False)
        found[True] += _cells(model, requests.head, [list(requests.branches[k][0][:-2]) for k in good], right=True)
        told()
    few = min(len(found[True]), max(1, len(found[False])), most)
    return found[True][:few] + found[False][:few], right / total


def _cells(model: Needle, head: tuple[int, ...], branches: list[list[int]], *, right: bool) -> list[Judged]:
    if not branches:
        return []
    with torch.no_grad():
        packing = Packing(head, branches)
        cells = torch.stack(hidden(model, packing), dim=1).half()
    start = cells[: len(head)]
    return [Judged(torch.cat([start, cells[packing.places[k][packing.real[k]]]]), right) for k in range(len(branches))]


def train_head(geometry: Geometry, examples: list[Judged], share: float, seed: int, epochs: int,
               told: Callable[[], None], rate: float = 2e-3) -> tuple[dict[str, Tensor], float]:
    """The head's tensors, and the area under the ROC curve on the tenth of the examples that it wasn't trained on."""
    spec = geometry.head(HEAD)
    assert spec is not None
    names = list(head_shapes(geometry, spec))
    begun = initial(geometry, seed)
    weights = {name: begun[name].clone().requires_grad_() for name in names}
    optimizer = torch.optim.AdamW(list(weights.values()), lr=rate, weight_decay=0.02)
    order = list(examples)
    Random(seed).shuffle(order)
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]

    def score(example: Judged) -> Tensor:
        head = ProbeHead(spec, {name.partition("/")[2]: w for name, w in weights.items()})
        out: Tensor = head(example.cells.float())
        return out[0]

    for epoch in range(epochs):
        Random(f"{seed} {epoch}").shuffle(kept)
        for at in range(0, len(kept), 16):
            batch = kept[at : at + 16]
            logits = torch.stack([score(e) for e in batch])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor([float(e.right) for e in batch]))
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own stub
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        told()
    with torch.no_grad():
        scores = [(float(score(e)), e.right) for e in held]
        # As many wrong answers as right ones were learnt from; there are fewer.
        share = min(max(share, 1e-3), 1 - 1e-3)
        weights[f"{HEAD}_head/proj/bias"] += math.log(share / (1 - share))
    return {name: w.detach() for name, w in weights.items()}, _area(scores)


def _area(scores: list[tuple[float, bool]]) -> float:
    """How often a right answer scores above a wrong one; ties count half. NaN where one kind is missing."""
    good, bad = [s for s, r in scores if r], [s for s, r in scores if not r]
    if not good or not bad:
        return math.nan
    return sum((a > b) + (a == b) / 2 for a in good for b in bad) / (len(good) * len(bad))
