"""Better numbers for matrices that will lie in integer blocks, found before anything rounds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.checkpoint.prompts import read_prompts
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.errors import BadInput
from needle_export.model.dynamic import matrices_of
from needle_export.model.improve import Method, improve
from needle_export.model.moments import gather
from needle_export.model.step import Step, parameter_sources
from needle_export.targets.base import Target
from needle_export.weights.forms import Form

#: Methods by what ``--rounding`` calls them.
_METHODS: dict[str, Method] = {"search": "mse", "calibrated": "calibrated"}


class Improvement:
    """Rounds matrices of the reference to levels of their integer blocks, in place, by something better than nearest.

    Rounding to nearest, which is all that targets do, then leaves them as they are.

    Args:
        net: the reference, from which programs are traced.
    """

    def __init__(self, net: Any, checkpoint: Checkpoint, target: Target, options: BuildOptions) -> None:
        step = Step(net, options.context)
        self._net, self._checkpoint, self._options = net, checkpoint, options
        self._sources, rules = parameter_sources(step), options.schemes
        self._named = [(p, v) for p, v in step.named_parameters() if p in self._sources]
        self._forms: dict[tuple[str, int], Form] = {}
        for path, value in self._named:
            if value.dim() < 2:
                continue
            source, role, layer = self._sources[path]
            form = target.blocks(rules.scheme(source, role), *matrices_of(source, value)[0].shape)
            if form is not None:
                self._forms[source, layer] = form

    @property
    def forms(self) -> list[list[Any]]:
        """Which tensors are rounded to which form: name, layer, form's name."""
        return [[source, layer, form.name] for (source, layer), form in self._forms.items()]

    def run(self, progress: Progress) -> None:
        """Find the numbers, which may take minutes.

        Raises:
            BadInput: the prompts can't be read.
        """
        sources, options, moments = self._sources, self._options, None
        if options.calibrate is not None:
            with progress.stage("read the prompts"):
                prompts = read_prompts(Path(options.calibrate), self._checkpoint.geometry, self._checkpoint.tokenizer)
            with progress.stage("watch the inputs of products", len(prompts)) as task:
                watched = [v for p, v in self._named if (sources[p][0], sources[p][2]) in self._forms]
                moments = gather(self._net, watched, (_counted(torch.from_numpy(p), task) for p in prompts))
        with progress.stage("round the matrices"), torch.inference_mode():
            improve(self._named, sources, self._forms, _METHODS[str(options.rounding)], moments)

    def found(self) -> dict[str, NDArray[Any]]:
        """What :meth:`run` has found, for :meth:`restore`: levels and scales, or floats where these aren't all."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, matrix, form in self._matrices():
            values, scales = form.quantize(matrix)
            if torch.equal(form.dequantize(values, scales).view(torch.int32), matrix.contiguous().view(torch.int32)):
                arrays |= {f"{name} values": values.numpy(), f"{name} scales": scales.numpy()}
            else:
                arrays[f"{name} floats"] = matrix.numpy()
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put numbers that :meth:`found` gave for the same model into the reference.

        Raises:
            BadInput: they are another model's; then nothing has changed.
        """
        new = []
        for name, matrix, form in self._matrices():
            try:
                rounded = torch.from_numpy(np.array(arrays[f"{name} floats"])) if f"{name} floats" in arrays else (
                    form.dequantize(*(torch.from_numpy(np.array(arrays[f"{name} {x}"])) for x in ("values", "scales"))))
            except (KeyError, ValueError, RuntimeError, TypeError) as fault:
                raise BadInput("the rounded matrices are another model's", where=name) from fault
            if rounded.shape != matrix.shape or rounded.dtype != matrix.dtype:
                raise BadInput("the rounded matrix has another shape", where=name)
            new.append((matrix, rounded))
        with torch.inference_mode():
            for matrix, rounded in new:
                matrix.copy_(rounded)

    def _matrices(self) -> Iterator[tuple[str, Tensor, Form]]:
        """Every matrix [O, I] that is rounded: a name, a view of the parameter, the form."""
        for path, value in self._named:
            source, _, layer = self._sources[path]
            form = self._forms.get((source, layer))
            for site, matrix in enumerate(matrices_of(source, value.detach()) if form is not None else ()):
                assert form is not None
                yield f"{path}.{site}", matrix, form


def _counted(tokens: Tensor, task: Any) -> Tensor:
    task.advance()
    return tokens
