"""One sequence through a package in Core ML, through coremltools on a Mac.

Needs numpy, coremltools and ``host.py``, which lies beside every package as this file does. What the inputs of a call
hold is computed there; here functions are loaded and called, and a state goes from one call to the next. Nothing in
this file has run on an Apple device yet: tests run it against a stand-in for coremltools' model class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def open_decoder(folder: Path, manifest: Mapping[str, Any], threads: int = 1) -> Decoder:
    """A decoder of the build in a folder.

    Args:
        manifest: of the build, decoded.
        threads: nothing that Core ML can be told.
    """
    return Decoder(folder, manifest["io"])


class Decoder:
    """One sequence.

    Every function is a model object of its own, and all share a state that decode's has made. Apple doesn't say whether
    they may; when a prefill is first called for, a state that nobody needs tells. If it can't be shared, prompts are
    read token by token.

    Args:
        folder: of the package.
        contract: of the package, decoded.
        compute_units: by coremltools' name: ALL, CPU_ONLY, CPU_AND_GPU or CPU_AND_NE.
    """

    def __init__(self, folder: Path, contract: Mapping[str, Any], compute_units: str = "ALL") -> None:
        from host import Host  # type: ignore[import-not-found]  # the file beside this one

        self._folder, self._units, self._contract = folder, compute_units, contract
        self.host: Any = Host(contract)
        self.context, self.vocab = int(contract["context"]), int(contract["vocab"])
        self._models: dict[int, Any] = {}
        self._usable: dict[int, bool] = {1: True}
        self._host_type = Host
        self.reset()

    @property
    def position(self) -> int:
        """Tokens of the sequence so far."""
        return int(self.host.position)

    def reset(self) -> None:
        """Forget the sequence."""
        self.host.reset()
        self._state = self._model(1).make_state() if self.host.stateful else None

    def feed(self, tokens: NDArray[Any]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V].

        Raises:
            ValueError: they don't fit into the context.
        """
        if self.position + len(tokens) > self.context:
            raise ValueError(f"{self.position + len(tokens)} tokens don't fit in a context of {self.context}")
        if not all(self._reads(bucket) for _, bucket in self.host.plan(len(tokens))):
            self.host.buckets = []
        parts, start = [np.zeros((0, self.vocab), np.float32)], 0
        for count, bucket in self.host.plan(len(tokens)):
            chunk = tokens[start : start + count]
            outputs = self._predict(bucket, self.host.inputs(chunk, bucket), self._state)
            if not self.host.stateful:
                self.host.keep(outputs, count)
            self.host.advance(chunk)
            parts.append(np.asarray(outputs["logits"][:count], np.float32))
            start += count
        return np.concatenate(parts)

    def _model(self, bucket: int) -> Any:
        """The model object of a function, loaded when it is first wanted."""
        if bucket not in self._models:
            import coremltools as ct

            name = "decode" if bucket == 1 else f"prefill_{bucket}"
            # Before iOS 18 a package has one function, and every prefill is a package of its own.
            whole = self.host.stateful or bucket == 1
            self._models[bucket] = ct.models.MLModel(
                str(self._folder / ("model.mlpackage" if whole else f"model_{name}.mlpackage")),
                function_name=name if self.host.stateful else None,
                compute_units=ct.ComputeUnit[self._units],
            )
        return self._models[bucket]

    def _predict(self, bucket: int, given: dict[str, NDArray[Any]], state: Any) -> Mapping[str, NDArray[Any]]:
        model = self._model(bucket)
        found: Mapping[str, NDArray[Any]] = model.predict(given) if state is None else model.predict(given, state=state)
        return found

    def _reads(self, bucket: int) -> bool:
        """Whether a function writes into a state that decode's model has made."""
        if bucket not in self._usable:
            self._usable[bucket] = not self.host.stateful or self._shares(bucket)
        return self._usable[bucket]

    def _shares(self, bucket: int) -> bool:
        state = self._model(1).make_state()
        given = self._host_type(self._contract).inputs(np.ones(bucket, np.int32), bucket)
        try:
            self._predict(bucket, given, state)
        except RuntimeError:  # what coremltools makes of Core ML's refusals
            return False
        return any(np.any(state.read_state(s["port"])) for s in self._contract["state"] if s["port"])
