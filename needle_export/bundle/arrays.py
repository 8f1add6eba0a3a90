"""Token ids in and logits out, as .npy files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.checkpoint.files import atomic_write
from needle_export.errors import BadInput
from needle_export.report.schema import Report


def read_tokens(path: Path, report: Report) -> NDArray[np.int64]:
    """Token ids [T] for the model that ``report`` describes.

    Raises:
        BadInput: when the file isn't a .npy of whole numbers [T], is empty, has an id outside the
            vocabulary, or more ids than the built context.
    """
    ids = _mapped(path)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadInput(f"the array is {ids.dtype} {list(ids.shape)}, not whole numbers [T]", where=str(path))
    vocabulary = _number(report.checkpoint.geometry, "vocab_size", "checkpoint.geometry")
    context = _number(report.options, "context", "options")
    if not 1 <= len(ids) <= context:
        raise BadInput(f"the file has {len(ids)} ids, and this build takes 1 to {context}", where=str(path),
                       fix="build with a larger --context" if len(ids) else "")
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(outside):
        first = int(outside[0])
        raise BadInput(f"id {ids[first]} at position {first} is outside the vocabulary of {vocabulary}",
                       where=str(path))
    return np.array(ids, np.int64)


def _mapped(path: Path) -> NDArray[Any]:
    """The array in a .npy file, mapped, so that a header can't claim more memory than the file has."""
    try:
        with path.open("rb") as handle:
            start = handle.read(len(np.lib.format.MAGIC_PREFIX))
    except FileNotFoundError:
        raise BadInput("there is no such file", where=str(path), fix="check the path") from None
    except OSError as error:
        raise BadInput(f"the file can't be read ({error.strerror})", where=str(path)) from None
    if start != np.lib.format.MAGIC_PREFIX:
        raise BadInput("this isn't a .npy file", where=str(path), fix="write one with numpy.save")
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception:  # the header is parsed as Python source, and fails in as many ways
        raise BadInput("the .npy file is damaged or holds no numbers", where=str(path),
                       fix="write it again with numpy.save") from None


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Writes a .npy file that appears whole or not at all.

    Raises:
        UsageError: when the place can't be written.
    """
    with atomic_write(path) as handle:
        np.save(handle, array, allow_pickle=False)


def _number(values: dict[str, object], key: str, where: str) -> int:
    value = values.get(key)
    if type(value) is not int:
        raise BadInput("needs a whole number here", where=f"report.json: {where}.{key}",
                       fix="build again: the report is incomplete")
    return value


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write an .npz whose bytes depend on the arrays alone: no time stamps, as numpy's own writer would add."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w") as entry:
                np.lib.format.write_array(entry, np.asarray(array, order="C"), allow_pickle=False)
