"""Prompts to calibrate with: a text file of one JSON object a line, with ``tokens`` or with ``text``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.dimensions import Geometry
from needle_export.checkpoint.encode import Encoder
from needle_export.checkpoint.files import map_file, naming
from needle_export.checkpoint.jsonl import read_objects
from needle_export.checkpoint.tokenizer import parse_tokenizer
from needle_export.errors import BadInput

_FORM = 'write {"tokens": [1, 2, 3]} or {"text": "..."} on a line of its own'


def read_prompts(path: Path, geometry: Geometry, tokenizer: bytes | None) -> list[NDArray[np.int64]]:
    """Sequences of tokens, int64 [T] each, of a file of prompts. Empty lines are passed over.

    Args:
        path: of the file, UTF-8.
        geometry: of the model whose tokens they are.
        tokenizer: the checkpoint's tokenizer dump, which ``text`` needs, or None.

    Raises:
        BadInput: naming the line, when one isn't such an object, holds a token that the model hasn't, more tokens than
            it can take or none, or text although there is no tokenizer; or the file can't be read or holds no prompt.
    """
    data = map_file(path).tobytes()
    encoder: Encoder | None = None
    prompts: list[NDArray[np.int64]] = []
    with naming(path.name):
        for number, prompt in read_objects(data, _FORM):
            where = f"line {number}"
            _check_keys(prompt, where)
            if "tokens" in prompt:
                ids = prompt["tokens"]
            else:
                if tokenizer is None:
                    raise BadInput("it has text, but the checkpoint has no tokenizer", where=where,
                                   fix="give tokens, or a .cact container, which carries one")
                if not isinstance(prompt["text"], str):
                    raise BadInput("text isn't a string", where=where, fix=_FORM)
                encoder = encoder or Encoder(parse_tokenizer(tokenizer))
                with naming(where):
                    ids = encoder.encode(prompt["text"])
            prompts.append(_checked(ids, geometry, where))
        if not prompts:
            raise BadInput("it holds no prompt", fix=_FORM)
    return prompts


def _check_keys(found: dict[str, Any], where: str) -> None:
    if set(found) not in ({"tokens"}, {"text"}):
        keys = ", ".join(repr(key)[:40] for key in sorted(found)) or "nothing"
        raise BadInput(f"it has {keys} instead of either 'tokens' or 'text'", where=where, fix=_FORM)


def _checked(ids: Any, geometry: Geometry, where: str) -> NDArray[np.int64]:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadInput("tokens isn't a list of whole numbers", where=where, fix=_FORM)
    if not ids:
        raise BadInput("it holds no token", where=where, fix="leave the line out, or fill it")
    unknown = next((i for i in ids if not 0 <= i < geometry.vocab_size), None)
    if unknown is not None:
        raise BadInput(f"token {str(unknown)[:20]} isn't one of the model's {geometry.vocab_size}", where=where,
                       fix="tokens count from 0; check that they are this model's")
    if len(ids) > geometry.max_seq_len:
        raise BadInput(f"{len(ids)} tokens are more than the {geometry.max_seq_len} that the model can take",
                       where=where, fix="cut the prompt")
    return np.array(ids, np.int64)
