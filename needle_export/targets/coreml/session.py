"""A decoding session of a Core ML package in the evaluator, with the host code that lies beside every package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from needle_export.errors import BadInput
from needle_export.targets.base import Floats
from needle_export.targets.coreml import contract
from needle_export.targets.coreml.contract import STREAM
from needle_export.targets.coreml.evaluate import load_package
from needle_export.targets.coreml.sequence import Sequence
from needle_export.targets.ports import CONTRACT_KEY, entry_name

#: As the lowering names ops: block, then a running number; the last op of a block holds its stream.
_NAME = re.compile(STREAM + r"(\d+)_(\d+)")


def read_contract(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    """What a package says to its host.

    Raises:
        BadInput: it isn't a package of ours.
    """
    text = metadata.get(CONTRACT_KEY)
    if text is None:
        raise BadInput("it doesn't carry this tool's contract", where=str(path), fix="build it again")
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as fault:
        raise BadInput("its contract isn't JSON", where=str(path), fix="build it again") from fault
    return found


class EvaluatorRunner(Sequence):
    """One sequence in the evaluator.

    Args:
        folder: of the artifact.
        threads: of torch.
        inner: keep the stream after each block, for finding a faulty layer.
        precision: ``float32`` for whether the program is right, ``declared`` for every op rounded to its own type.

    Raises:
        BadInput: the folder doesn't hold a package of ours, or a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int | None = None,
        inner: bool = False,
        precision: Literal["float32", "declared"] = "float32",
    ) -> None:
        from needle_export.targets.coreml.evaluate import Evaluator

        path = folder / contract.FILE_NAME
        if not path.is_dir():
            raise BadInput("this part of the artifact is missing", where=str(path), fix="build it again")
        packages = {"": load_package(path)}
        facts = read_contract(packages[""].metadata, path)
        # Caches that the host keeps are rounded when everything is.
        super().__init__(facts, "float32" if precision == "float32" else None)
        #: By bucket: evaluator and function.
        self.functions: dict[int, tuple[Any, str]] = {}
        several = Evaluator(packages[""], precision=precision, threads=threads)
        for bucket in (1, *self.host.buckets):
            name = entry_name(bucket)
            if self.host.stateful:
                self.functions[bucket] = (several, name)
                continue
            # Before iOS 18 a package has one function, and each its own.
            own = folder / contract.package_name(name, False)
            evaluator = several if bucket == 1 else Evaluator(load_package(own), precision=precision, threads=threads)
            self.functions[bucket] = (evaluator, "main")
        self.inner = inner
        self._last: tuple[Any, str, int] | None = None

    @property
    def findings(self) -> list[Any]:
        """Overflows and the like, of all calls so far."""
        unique = {id(e): e for e, _ in self.functions.values()}
        return [finding for evaluator in unique.values() for finding in evaluator.findings]

    def _forget(self) -> None:
        for evaluator, _ in self.functions.values():
            evaluator.reset()

    def save(self) -> Any:
        """Position and state, for :meth:`restore`; the evaluator changes no tensor, but the host its caches."""
        host = self.host
        states = [dict(evaluator.state.tensors) for evaluator, _ in self.functions.values()]
        return host.position, host.history.copy(), {n: c.copy() for n, c in host.caches.items()}, states

    def restore(self, saved: Any) -> None:
        """Go back to a sequence that was saved here."""
        host = self.host
        host.position, history, caches, states = saved
        host.history = history.copy()
        host.caches = {name: cache.copy() for name, cache in caches.items()}
        for (evaluator, _), tensors in zip(self.functions.values(), states, strict=True):
            evaluator.state.tensors = dict(tensors)

    def _call(self, bucket: int, given: dict[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        evaluator, name = self.functions[bucket]
        if self.inner:
            names = [op.name for op in evaluator.package.function(name).ops if _NAME.fullmatch(op.name)]
            evaluator.watch(names)
        results: Mapping[str, NDArray[Any]] = evaluator.run(name, given)
        self._last = (evaluator, name, int(given["count"][0]) if "count" in given else 1)
        return results

    def _held(self, port: str) -> NDArray[Any]:
        held: NDArray[Any] = self.functions[1][0].state[port]
        return held

    def streams(self) -> dict[int, Floats]:
        """The stream after each block of the last call, [T, n, C], for a runner opened with ``inner``."""
        if not self.inner or self._last is None:
            return {}
        evaluator, _, count = self._last
        last: dict[int, tuple[int, Any]] = {}
        for name, value in evaluator.watched.items():
            match = _NAME.fullmatch(name)
            assert match is not None
            block, number = int(match.group(1)), int(match.group(2))
            if number >= last.get(block, (-1, None))[0]:
                last[block] = (number, value)
        found = {}
        for block, (_, value) in last.items():
            array = np.asarray(value, np.float32)
            lanes, width = array.shape[-2:]
            found[block] = array.reshape(-1, lanes, width)[:count]
        return found
