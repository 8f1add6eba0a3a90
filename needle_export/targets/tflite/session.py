"""One sequence through a TFLite file: the same in every runtime, and the model for a host's own.

Needs numpy and an interpreter only; all it must know rides in the file as a contract, and lies in the manifest. This
file lies beside every TFLite build as ``decoder.py``, and builds are verified through the class in it. ``decode`` owns
the state: its input tensors hold the caches, and new rows are written straight into them. A prefill signature is handed
the same state, and its rows are written into ``decode``'s tensors as well.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A tail of a prompt that fills less than this share of the smallest fitting bucket is decoded token by token.
TAIL_SHARE = 8

_CTYPES: dict[str, Any] = {"float32": ctypes.c_float, "int32": ctypes.c_int32}


def open_decoder(folder: Path, manifest: Mapping[str, Any], threads: int = 1) -> Loop:
    """A decoder of the build in a folder, in LiteRT.

    Args:
        manifest: of the build, decoded.
        threads: of XNNPACK and of the runtime's own kernels.
    """
    from ai_edge_litert.interpreter import Interpreter

    (model,) = (file["name"] for file in manifest["files"] if file["role"] == "model")
    return Loop(Interpreter(str(folder / model), num_threads=threads), manifest["io"])


class Loop:
    """One sequence in one interpreter.

    Args:
        interpreter: of any TFLite runtime, made but not allocated; ``decode`` is its first signature.
        contract: of the file, decoded.
    """

    def __init__(self, interpreter: Any, contract: Mapping[str, Any]) -> None:
        self.interpreter = interpreter
        self.context = int(contract["context"])
        self.vocab = int(contract["vocab"])
        self.buckets = sorted(int(b) for b in contract["buckets"])
        self.state = list(contract["state"])
        self.heads = tuple(contract.get("heads", ()))
        interpreter.allocate_tensors()
        decode = interpreter.get_signature_runner("decode")
        self.inputs = {n: _view(interpreter, d) for n, d in decode.get_input_details().items()}
        self.outputs = {n: _view(interpreter, d) for n, d in decode.get_output_details().items()}
        del decode
        self._plan_writes()
        self.position = 0
        self.reset()

    def reset(self) -> None:
        """Forget the sequence: state as it is before the first token."""
        self.position = 0
        for s in self.state:
            self.inputs[s["name"]][...] = s.get("initial", 0)

    def save(self) -> tuple[int, dict[str, NDArray[Any]]]:
        """A copy of position and state, for :meth:`restore`."""
        return self.position, {s["name"]: self.inputs[s["name"]].copy() for s in self.state}

    def restore(self, saved: tuple[int, dict[str, NDArray[Any]]]) -> None:
        """Go back to a sequence that was saved here."""
        self.position, held = saved
        for name, value in held.items():
            self.inputs[name][...] = value

    def decode(self, token: int) -> NDArray[np.float32]:
        """One token; logits [V], valid until the next call."""
        self.inputs["tokens"][0], self.inputs["position"][0] = token, self.position
        self.interpreter.invoke()
        self._append_one(token)
        logits: NDArray[np.float32] = self.outputs["logits"][0]
        return logits

    def chunk(self, tokens: NDArray[Any], bucket: int) -> NDArray[np.float32]:
        """Up to ``bucket`` tokens [n] through its signature; logits [n, V]."""
        padded = np.zeros(bucket, np.int32)
        padded[: len(tokens)] = tokens
        given = {**self.inputs, "tokens": padded, "position": np.array([self.position], np.int32)}
        if self.heads:
            given["count"] = np.array([len(tokens)], np.int32)
        # Not kept: an interpreter refuses to run ``decode`` while a runner of it lives.
        results = self.interpreter.get_signature_runner(f"prefill_{bucket}")(**given)
        self._append(results, tokens, len(tokens))
        logits: NDArray[np.float32] = results["logits"][: len(tokens)]
        return logits

    def confidence(self) -> NDArray[np.float32]:
        """What the confidence head says about the tokens so far: [1], raw."""
        return self.head("confidence")

    def head(self, name: str) -> NDArray[np.float32]:
        """What a probe head says about the tokens so far: [O].

        Raises:
            ValueError: the file has no such head, or there are no tokens yet.
        """
        if name not in self.heads:
            raise ValueError(f"this file has no {name} head; it has: {', '.join(self.heads) or 'none'}")
        if not self.position:
            raise ValueError(f"the {name} head has nothing to judge before the first token")
        runner = self.interpreter.get_signature_runner(name)
        answer: NDArray[np.float32] = runner(**{n: self.inputs[n] for n in runner.get_input_details()})[name]
        return answer

    def plan(self, count: int) -> list[tuple[int, int]]:
        """How a prompt is read; see :func:`plan`."""
        return plan(self.buckets, count)

    def feed(self, tokens: NDArray[Any]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V]."""
        if len(tokens) == 1:
            return self.decode(int(tokens[0])).copy()[None]
        parts, start = [], 0
        for count, bucket in self.plan(len(tokens)):
            piece = tokens[start : start + count]
            parts.append(self.decode(int(piece[0])).copy()[None] if bucket == 1 else self.chunk(piece, bucket))
            start += count
        return np.concatenate(parts) if parts else np.zeros((0, self.vocab), np.float32)

    def _plan_writes(self) -> None:
        """Views for the writes of a decode step, made once: tensors never move.

        States of one shape that lie evenly spaced, as an interpreter lays them, are one array: a step then writes the
        rows of all blocks at once.
        """
        #: Caches [N, G, S, D] with their new rows [N, G, D].
        self._caches: list[tuple[NDArray[Any], NDArray[Any]]] = []
        #: Histories [N, R, C] with their new rows [N, C].
        self._histories: list[tuple[NDArray[Any], NDArray[Any]]] = []
        #: States and what replaces them.
        self._replaced: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._token_states: list[NDArray[Any]] = []
        alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for s in self.state:
            held = self.inputs[s["name"]]
            if s["kind"] == "tokens":
                self._token_states.append(held)
            elif s["kind"] == "replace":
                self._replaced.append((held, self.outputs[s["rows"]]))
            else:
                alike.setdefault((s["kind"] == "history", s["rows"], held.shape), []).append(s)
        for (history, output, _), group in alike.items():
            rows = self.outputs[output] if group[0]["index"] >= 0 else self.outputs[output][None]
            first = max(group[0]["index"], 0)
            stack = _as_one([self.inputs[s["name"]] for s in group])
            if stack is not None and [max(s["index"], 0) for s in group] == list(range(first, first + len(group))):
                pairs = [(stack, rows[first : first + len(group), 0])]
            else:
                pairs = [(self.inputs[s["name"]][None], rows[s["index"], 0][None]) for s in group]
            (self._histories if history else self._caches).extend(pairs)

    def _append_one(self, token: int) -> None:
        """Write the one new row of a decode step: as :meth:`_append`, with the views made beforehand."""
        position = self.position
        for caches, rows in self._caches:
            caches[:, :, position % caches.shape[2]] = rows
        for histories, rows in self._histories:
            histories[:, :-1] = histories[:, 1:]
            histories[:, -1] = rows
        for held, new in self._replaced:
            held[...] = new
        for held in self._token_states:
            held[:-1] = held[1:]
            held[-1] = token
        self.position = position + 1

    def _append(self, rows: Mapping[str, NDArray[Any]], tokens: NDArray[Any], count: int) -> None:
        """Write the first ``count`` new rows of a call into the state."""
        at = np.arange(self.position, self.position + count)
        for s in self.state:
            held, kind = self.inputs[s["name"]], s["kind"]
            if kind == "replace":
                held[...] = rows[s["rows"]]
                continue
            if kind == "tokens":
                new: NDArray[Any] = tokens[:count]
            else:
                new = rows[s["rows"]]
                new = (new if s["index"] < 0 else new[s["index"]])[:count]
            if kind in ("keys", "values"):
                slots: Any = at % held.shape[1] if count > 1 else int(at[0]) % held.shape[1]
                held[:, slots] = new.swapaxes(0, 1) if count > 1 else new[0]
            elif count >= len(held):
                held[...] = new[count - len(held) :]
            else:
                held[:-count] = held[count:]
                held[-count:] = new
        self.position += count


def plan(buckets: Sequence[int], count: int) -> list[tuple[int, int]]:
    """How a prompt is read: (tokens, bucket) in order; bucket 1 is decode.

    As many of the largest bucket as fit; the rest in the smallest bucket that holds it, padded, or token by
    token where it would fill too little of that.

    Args:
        buckets: lengths of prefills, ascending.
    """
    steps: list[tuple[int, int]] = []
    while count:
        fitting = [b for b in buckets if b >= count]
        if not buckets or (fitting and count * TAIL_SHARE <= fitting[0]):
            steps += [(1, 1)] * count
            break
        bucket = fitting[0] if fitting else buckets[-1]
        steps.append((min(count, bucket), bucket))
        count -= steps[-1][0]
    return steps


def _as_one(arrays: list[NDArray[Any]]) -> NDArray[Any] | None:
    """Arrays of one shape that lie evenly spaced in memory as one array, or None if they don't."""
    places = [a.ctypes.data for a in arrays]
    step = places[1] - places[0] if len(places) > 1 else arrays[0].nbytes
    if any(b - a != step for a, b in pairwise(places)) or abs(step) < arrays[0].nbytes:
        return None
    kind = _CTYPES[arrays[0].dtype.name]
    if step % ctypes.sizeof(kind):
        return None
    # One block from the lowest to the highest; a view may run through it in either direction.
    count = (abs(step) * (len(arrays) - 1) + arrays[0].nbytes) // ctypes.sizeof(kind)
    block = np.ctypeslib.as_array((kind * count).from_address(min(places)))
    start = block[(places[0] - min(places)) // ctypes.sizeof(kind) :]
    strides = (step, *arrays[0].strides)
    return np.lib.stride_tricks.as_strided(start, (len(arrays), *arrays[0].shape), strides)


def _view(interpreter: Any, detail: Mapping[str, Any]) -> NDArray[Any]:
    """A tensor's memory as an array that may be kept: the interpreter refuses to run while its own views live."""
    array = interpreter.tensor(detail["index"])()
    kind = _CTYPES[np.dtype(detail["dtype"]).name]
    block = (kind * math.prod(array.shape)).from_address(array.ctypes.data)
    return np.ctypeslib.as_array(block).reshape(array.shape)
