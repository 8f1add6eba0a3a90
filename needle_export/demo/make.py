"""Makes the demo model from nothing: tokenizer, training, confidence head, accuracy, model card.

The steps of :func:`make` are the list of what is done. What it writes is what the package ships.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import jinja2
import torch
from torch import Tensor

from needle_export import __version__, demo
from needle_export.checkpoint.checkpoint import read_checkpoint
from needle_export.checkpoint.files import atomic_write
from needle_export.checkpoint.geometry import Geometry, parameter_count
from needle_export.checkpoint.safetensors_file import write_checkpoint
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.config.progress import Progress
from needle_export.demo import vocabulary
from needle_export.demo.confidence import judged, train_head
from needle_export.demo.geometry import DEMO
from needle_export.demo.prompts import Group, answer_text
from needle_export.demo.queries import Example, draw
from needle_export.demo.training import Schedule, Training, exact, model_of
from needle_export.errors import BadInput
from needle_export.generate.prompt import AFTER_QUERY, before_query, compact
from needle_export.generate.schemas import Tool, read_tools

#: Requests of the held-out file, all behind the whole list of tools.
HELDOUT = 1000

#: Requests that one packed pass answers.
_BATCH = 50

_STATE = "training.pt"
_TIMES = "training-seconds.json"


@dataclass(frozen=True)
class Confidence:
    """How the head's training is done: groups of requests, how many each, passes over what came of them."""

    groups: int = 60
    requests: int = 48
    epochs: int = 8


@dataclass(frozen=True)
class Made:
    """What came of it.

    Attributes:
        files: by name, in bytes.
        accuracy: exact answers among the held-out requests by depth, in float32, as a share.
        kinds: the same at full depth, by the number of calls that are right: none, one, two.
        auc: of the confidence head.
        seconds: of training, over all runs that it took.
    """

    folder: Path
    files: dict[str, int]
    parameters: int
    accuracy: dict[int, float]
    kinds: dict[str, tuple[int, int]]
    auc: float
    seconds: float
    threads: int


def make(out: Path, seed: int, schedule: Schedule, progress: Progress, confidence: Confidence = Confidence(),
         geometry: Geometry = DEMO, heldout: int = HELDOUT, threads: int = 2,
         sentences: int = 40_000) -> Made:
    """Train the demo model in ``out``, or go on with what an interrupted run has left there.

    Raises:
        BadInput: what lies there belongs to another run.
        UsageError: it can't be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    tools = demo_tools()
    with progress.stage("train the tokenizer"):
        model = vocabulary.train(tools, seed, sentences)
        _write(out / demo.TOKENIZER, model)
    pieces = load_tokenizer(model)
    requests = heldout_requests(seed, heldout)
    _write(out / demo.TOOLS, _tools_text())
    lines = (compact({"query": e.query, "answers": list(e.answers)}) for e in requests)
    _write(out / demo.HELDOUT, "".join(f"{line}\n" for line in lines))
    training = Training(tools, pieces, seed, schedule, geometry)
    seconds = _trained(training, out, progress)
    weights = {name: value.detach() for name, value in training.weights.items()}
    auc = _with_head(weights, geometry, tools, pieces, seed, confidence, progress)
    write_checkpoint(out / demo.CHECKPOINT, geometry, {n: w.numpy() for n, w in weights.items()}, step=schedule.steps,
                     run={"model": "needle-export demo", "seed": seed, "generator": f"needle-export {__version__}"})
    accuracy, kinds = measure(out / demo.CHECKPOINT, requests, tools, pieces, progress)
    made = Made(out, {}, parameter_count(geometry), accuracy, kinds, auc, seconds, torch.get_num_threads())
    _write(out / demo.CARD, card(made, geometry, seed, schedule, (out / demo.CHECKPOINT).stat().st_size, len(requests)))
    names = (demo.CHECKPOINT, demo.TOKENIZER, demo.TOOLS, demo.HELDOUT, demo.CARD)
    made.files.update({name: (out / name).stat().st_size for name in names})
    return made


def demo_tools() -> tuple[Tool, ...]:
    """The demo's tools."""
    return read_tools(json.loads(_tools_text()))


def _tools_text() -> str:
    # Not by demo.files(): whoever trains the model may not have it.
    return (Path(demo.__file__).parent / "model" / demo.TOOLS).read_text(encoding="utf-8")


def heldout_requests(seed: int, count: int) -> list[Example]:
    """The held-out requests of a seed, each once."""
    rng, found = Random(f"{seed} heldout"), dict[str, Example]()
    while len(found) < count:
        example = draw(rng, "heldout")
        found.setdefault(example.query, example)
    return list(found.values())


def measure(checkpoint: Path, requests: Sequence[Example], tools: Sequence[Tool], pieces: Tokenizer,
            progress: Progress, depths: Sequence[int] = ()) -> tuple[dict[int, float], dict[str, tuple[int, int]]]:
    """Share of exact answers by depth, and at full depth right and all by kind, of the finished file in float32.

    Args:
        depths: to measure, the last of them the full one; all rungs if empty.
    """
    read = read_checkpoint(checkpoint)
    tensors: Mapping[str, Tensor] = {n: torch.from_numpy(read.tensors[n].astype("float32")) for n in read.tensors}
    geometry = read.geometry
    head = (pieces.bos_id, *pieces.encode(before_query(tools)))
    branches = []
    for e in requests:
        tail = pieces.encode(e.query + AFTER_QUERY)
        branches.append(((*tail, *pieces.encode(answer_text(e.answers)), pieces.eos_id), len(tail)))
    parts = [branches[at : at + _BATCH] for at in range(0, len(branches), _BATCH)]
    right: dict[int, list[bool]] = {}
    depths = depths or range(2, geometry.num_layers + 1)
    with progress.stage("measure every rung", total=len(depths) * len(parts)) as task:
        for depth in depths:
            model = model_of(geometry, tensors, depth)
            right[depth] = []
            for part in parts:
                right[depth] += exact(model, Group(head, tuple(part))).tolist()
                task.advance()
    kinds = {}
    for name, calls in (("nothing to call", 0), ("one call", 1), ("two calls", 2)):
        which = [ok for ok, e in zip(right[geometry.num_layers], requests, strict=True) if len(e.answers) == calls]
        kinds[name] = (sum(which), len(which))
    return {depth: sum(found) / len(found) for depth, found in right.items()}, kinds


def card(made: Made, geometry: Geometry, seed: int, schedule: Schedule, size: int, heldout: int) -> str:
    """The model card, as Markdown."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("needle_export.demo", "."), autoescape=False,
                                     undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("card.md.j2").render(
        made=made, geometry=geometry, seed=seed, schedule=schedule, bytes=size, heldout=heldout, version=__version__,
        torch=torch.__version__.partition("+")[0])


def _trained(training: Training, out: Path, progress: Progress) -> float:
    """Trains to the end; seconds that it took, earlier runs included."""
    state, times = out / _STATE, out / _TIMES
    before = 0.0
    if state.exists():
        training.load(state)
        before = _seconds(times)
    begun = time.monotonic()

    def save() -> None:
        # The time first: a run that dies between the two counts a little too much, never too little.
        _write(times, json.dumps(before + time.monotonic() - begun))
        training.save(state)

    with progress.stage("train the model", total=training.schedule.steps) as task:
        task.advance(training.step)
        training.run(lambda step, loss, depth: task.advance(), save)
    return _seconds(times)


def _seconds(path: Path) -> float:
    try:
        return float(json.loads(path.read_text()))
    except (OSError, ValueError):
        raise BadInput("it doesn't say how long training has taken so far", where=str(path),
                       fix="remove the folder and start anew") from None


def _with_head(weights: dict[str, Tensor], geometry: Geometry, tools: Sequence[Tool], pieces: Tokenizer, seed: int,
               confidence: Confidence, progress: Progress) -> float:
    model = model_of(geometry, weights, geometry.num_layers)
    with progress.stage("collect answers for the confidence head", total=confidence.groups) as task:
        examples, share = judged(model, tools, pieces, seed, confidence.groups, confidence.requests, task.advance)
    with progress.stage("train the confidence head", total=confidence.epochs) as task:
        tensors, auc = train_head(geometry, examples, share, seed, confidence.epochs, task.advance)
    weights.update(tensors)
    return auc


def _write(path: Path, data: str | bytes) -> None:
    with atomic_write(path) as handle:
        handle.write(data.encode() if isinstance(data, str) else data)


