"""The decoding loop of a TFLite artifact: the same in every runtime, and the model for a host's own.

Needs numpy and an interpreter only; all it must know rides in the file as a contract. ``decode`` owns the state:
its input tensors hold the caches, and new rows are written straight into them. A prefill signature is handed
the same state, and its rows are written into ``decode``'s tensors as well.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A tail of a prompt that fills less than this share of the smallest fitting bucket is decoded token by token.
TAIL_SHARE = 8


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
        self._plan_moves()
        self.position = 0
        self.reset()

    def reset(self) -> None:
        """Forget the sequence: state as it is before the first token."""
        self.position = 0
        for s in self.state:
            self.inputs[s["name"]][...] = s.get("initial", 0)

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
        """How a prompt is read: (tokens, bucket) in order; bucket 1 is decode.

        As many of the largest bucket as fit; the rest in the smallest bucket that holds it, padded, or token by
        token where it would fill too little of that.
        """
        steps: list[tuple[int, int]] = []
        while count:
            fitting = [b for b in self.buckets if b >= count]
            if not self.buckets or (fitting and count * TAIL_SHARE <= fitting[0]):
                steps += [(1, 1)] * count
                break
            bucket = fitting[0] if fitting else self.buckets[-1]
            steps.append((min(count, bucket), bucket))
            count -= steps[-1][0]
        return steps

    def feed(self, tokens: NDArray[Any]) -> NDArray[np.float32]:
        """Append tokens [T]; logits [T, V]."""
        parts, start = [], 0
        for count, bucket in self.plan(len(tokens)):
            piece = tokens[start : start + count]
            parts.append(self.decode(int(piece[0])).copy()[None] if bucket == 1 else self.chunk(piece, bucket))
            start += count
        return np.concatenate(parts) if parts else np.zeros((0, self.vocab), np.float32)

    def _plan_moves(self) -> None:
        """Where each new row of ``decode`` comes from and goes to: addresses, as the tensors never move."""
        #: Of caches, one for each group: rows, destination of row 0, source; all rows of a cache are as long.
        self._cache_moves: list[tuple[int, int, int, int]] = []
        #: Of histories, twice, and of states that are replaced: destination, source, bytes.
        self._moves: list[tuple[int, int, int]] = []
        self._token_states: list[NDArray[Any]] = []
        for s in self.state:
            held = self.inputs[s["name"]]
            if s["kind"] == "tokens":
                self._token_states.append(held)
                continue
            rows = self.outputs[s["rows"]]
            if s["kind"] == "replace":
                self._moves.append((held.ctypes.data, rows.ctypes.data, held.nbytes))
                continue
            row = (rows if s["index"] < 0 else rows[s["index"]])[0]
            if s["kind"] == "history":
                first, step = held.ctypes.data, held.strides[0]
                rest = held.nbytes - step
                self._moves += [(first, first + step, rest), (first + rest, row.ctypes.data, step)]
            else:
                for group in range(len(held)):
                    place = held[group].ctypes.data
                    self._cache_moves.append((held.shape[1], place, row[group].ctypes.data, row[group].nbytes))

    def _append_one(self, token: int) -> None:
        """Write the one new row of a decode step: as :meth:`_append`, without making arrays."""
        move, position = ctypes.memmove, self.position
        for size, place, source, step in self._cache_moves:
            move(place + position % size * step, source, step)
        for place, source, length in self._moves:
            move(place, source, length)
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


def _view(interpreter: Any, detail: Mapping[str, Any]) -> NDArray[Any]:
    """A tensor's memory as an array that may be kept: the interpreter refuses to run while its own views live."""
    array = interpreter.tensor(detail["index"])()
    kind = {"float32": ctypes.c_float, "int32": ctypes.c_int32}[np.dtype(detail["dtype"]).name]
    block = (kind * math.prod(array.shape)).from_address(array.ctypes.data)
    return np.ctypeslib.as_array(block).reshape(array.shape)
