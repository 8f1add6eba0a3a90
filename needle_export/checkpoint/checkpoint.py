"""Read one checkpoint, whatever file it is."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.container import is_container, read_container
from needle_export.checkpoint.files import Progress, map_file, naming, sha256_of
from needle_export.checkpoint.loaded import (
    Checkpoint,
    Permutations,
    Source,
    drop_head,
    standard_permutations,
)
from needle_export.checkpoint.safetensors_file import read_safetensors
from needle_export.errors import BadInput

__all__ = ["Checkpoint", "Permutations", "Source", "drop_head", "read_checkpoint", "standard_permutations"]


def read_checkpoint(path: str | PathLike[str], *, progress: Progress | None = None) -> Checkpoint:
    """Reads a safetensors checkpoint or a ``.cact`` container; the content decides, not the name.

    Args:
        path: the file.
        progress: called as ``progress(done, total)`` in bytes while the file is read through.

    Raises:
        BadInput: when the file is missing, damaged, of another format, generation or model; the sentence
            names the field or the tensor.
    """
    file = Path(path)
    data = map_file(file)
    with naming(file.name):
        _refuse_foreign(data)
        reader = read_container if is_container(data) else read_safetensors
        partial = reader(data)
    source = dataclasses.replace(partial.source, path_name=file.name, sha256=sha256_of(data, progress))
    return dataclasses.replace(partial, source=source)


def _refuse_foreign(data: NDArray[np.uint8]) -> None:
    head = data[:16].tobytes()
    if head.startswith(b"PK\x03\x04"):
        raise BadInput("this is a zip archive, as torch.save writes it, and may hold a pickle",
                       fix="convert it to safetensors")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[8:9] != b"{":
        raise BadInput("this is a pickle, which could run code when opened", fix="convert it to safetensors")
    if head.startswith(b"GGUF"):
        raise BadInput("this is a GGUF file", fix="give a Needle 3 safetensors or .cact file")
    if head.startswith((b"version https:", b"<!DOCTYPE", b"<html")):
        raise BadInput("this is a web page or a pointer, not the file itself", fix="download the file again")
