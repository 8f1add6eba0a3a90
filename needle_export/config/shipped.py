"""The data files that come along, such as devices and recipes, by their ids; and a team's own, by their paths."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from needle_export.errors import UsageError

_SUFFIX = ".toml"


def shipped(kind: str) -> Path:
    """The folder of data files of a kind (``devices``, ``recipes``), in an installation or in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_names(kind: str) -> tuple[str, ...]:
    """Ids of the files of a kind that come along, sorted."""
    return tuple(sorted(path.stem for path in shipped(kind).glob(f"*{_SUFFIX}")))


def find(kind: str, name_or_path: str | Path, where: str) -> Path:
    """The file of one that comes along, by its id, or any file by its path, which may not be there.

    A path is what ends in ``.toml`` or has a separator in it.

    Args:
        kind: ``devices`` or ``recipes``.
        where: the option that it was given for, for the error.

    Raises:
        UsageError: there is no such id; names the nearest.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(_SUFFIX) or re.search(r"[/\\]", text):
        return Path(text)
    known = shipped_names(kind)
    if text not in known:
        near = difflib.get_close_matches(text, known, 1, 0.5)
        fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}, or give a {_SUFFIX} file"
        raise UsageError(f"there is no {kind.removesuffix('s')} {text[:60]!r}", where=where, fix=fix)
    return shipped(kind) / f"{text}{_SUFFIX}"
