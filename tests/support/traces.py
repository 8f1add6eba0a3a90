"""One export for all tests of a process that would export the same: most of a small build's time is torch.export's.

An export depends on the code of the model, on its numbers and shapes, and not on its weights, which stand behind
placeholders. So what is shared is the graph; each trace copies it and puts its own weights behind it. Where a test has
patched the model or its functions, nothing is shared, in either direction.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from needle_export.graph import trace

#: What a trace runs through; a function or a constant of theirs that isn't their own is a patched one.
_TRACED = ("graph.ops", "graph.reference", "graph.trace", "model.block", "model.heads", "model.network", "model.state",
           "model.step")

_EXPORT = trace._export


class _Unknown(Exception):
    """Something that may decide what is traced, and that can't be compared."""


@dataclasses.dataclass(frozen=True)
class _Exported:
    """What :func:`trace._program` reads of an ``ExportedProgram``, with the weights of another module."""

    graph: torch.fx.Graph
    graph_signature: Any
    constants: Mapping[str, Any]
    module: nn.Module

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_parameters(remove_duplicate=False)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(remove_duplicate=False)


class Shared:
    """Stands in for ``trace._export``.

    Attributes:
        made: exports that were really made.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[torch.fx.Graph, Any, Mapping[str, Any]]] = {}
        self._modules = [importlib.import_module(f"needle_export.{name}") for name in _TRACED]
        self._own = _contents(self._modules)
        self.made = 0

    def __call__(self, module: nn.Module, example: tuple[object, ...], dynamic: object) -> Any:
        try:
            key = (_module(module), _frozen(example), _frozen(dynamic)) if self._untouched() else None
        except _Unknown:
            key = None
        if key is None or key not in self._kept:
            exported = _EXPORT(module, example, dynamic)
            self.made += 1
            if key is None:
                return exported
            # Buffers belong to the module, whichever of the two tables torch keeps them in.
            buffers = dict(module.named_buffers())
            lifted = {name: value for name, value in exported.constants.items() if name not in buffers}
            self._kept[key] = exported.graph, exported.graph_signature, lifted
        return _Exported(*self._kept[key], module)

    def _untouched(self) -> bool:
        """Whether the code of the model is the one that was imported."""
        now = _contents(self._modules)
        # ``trace._export`` itself is what this object stands in for.
        return now.keys() == self._own.keys() and all(
            value is self._own[name] for name, value in now.items() if name != (trace.__name__, "_export"))


def _contents(modules: list[ModuleType]) -> dict[tuple[str, ...], object]:
    """Everything that the modules and their own classes hold, by name."""
    found: dict[tuple[str, ...], object] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("__"):
                continue
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(module.__name__, name, inner): held for inner, held in vars(value).items()
                          if not inner.startswith("__") or inner in ("__init__", "__call__")}
    return found


def _module(module: nn.Module) -> tuple[Any, ...]:
    """A module's structure, shapes and numbers, without the values of its tensors."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    parts = []
    for path, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            raise _Unknown
        plain = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        parts.append((path, type(part), *((name, _frozen(value)) for name, value in sorted(plain.items()))))
    return (tuple(parts), tuple((name, _frozen(value)) for name, value in tensors))


def _frozen(value: object) -> Any:
    """Something that compares equal where ``value`` decides alike."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, torch.export.Dim):
        return ("dim", value.__name__, value.min, value.max)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return ("dict", *((name, _frozen(held)) for name, held in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_frozen(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value), value)
    raise _Unknown


@contextmanager
def shared() -> Iterator[Shared]:
    """While active, what was exported before isn't exported again."""
    with pytest.MonkeyPatch.context() as patch:
        share = Shared()
        patch.setattr(trace, "_export", share)
        yield share
