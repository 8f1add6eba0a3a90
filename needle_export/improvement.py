"""Better numbers for matrices that will lie in integer blocks, found before anything rounds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.checkpoint.prompts import read_prompts
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.model.dynamic import matrices_of
from needle_export.model.improve import Method, improve
from needle_export.model.moments import gather
from needle_export.model.step import Step, parameter_sources
from needle_export.targets.base import Target
from needle_export.weights.forms import Form

#: Methods by what ``--rounding`` calls them.
_METHODS: dict[str, Method] = {"search": "mse", "calibrated": "calibrated"}


def improve_reference(
    net: Any, checkpoint: Checkpoint, target: Target, options: BuildOptions, progress: Progress
) -> None:
    """Round matrices of the reference to levels of their integer blocks, in place, by something better than nearest.

    Rounding to nearest, which is all that targets do, then leaves them as they are.

    Args:
        net: the reference, from which programs are traced.

    Raises:
        BadInput: the prompts can't be read.
    """
    step = Step(net, options.context)
    sources, rules = parameter_sources(step), options.schemes
    forms: dict[tuple[str, int], Form] = {}
    for path, value in step.named_parameters():
        if path not in sources or value.dim() < 2:
            continue
        source, role, layer = sources[path]
        form = target.blocks(rules.scheme(source, role), *matrices_of(source, value)[0].shape)
        if form is not None:
            forms[source, layer] = form
    named = [(p, v) for p, v in step.named_parameters() if p in sources]
    moments = None
    if options.calibrate is not None:
        with progress.stage("read the prompts"):
            prompts = read_prompts(Path(options.calibrate), checkpoint.geometry, checkpoint.tokenizer)
        with progress.stage("watch the inputs of products", len(prompts)) as task:
            watched = [v for p, v in named if (sources[p][0], sources[p][2]) in forms]
            moments = gather(net, watched, (_counted(torch.from_numpy(p), task) for p in prompts))
    with progress.stage("round the matrices"), torch.inference_mode():
        improve(named, sources, forms, _METHODS[str(options.rounding)], moments)


def _counted(tokens: torch.Tensor, task: Any) -> torch.Tensor:
    task.advance()
    return tokens

