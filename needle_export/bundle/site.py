"""A published site is known by the file that lists what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from needle_export.errors import BadInput

SITE_NAME = "site.json"

#: What such a file begins with.
FORMAT = "needle-export site"

_MAX_BYTES = 1 << 24


def listed_site_files(folder: Path) -> frozenset[str]:
    """Paths of the files of a site, its list included.

    Raises:
        BadInput: the list can't be read, or isn't one of this tool.
    """
    place = folder / SITE_NAME
    try:
        with place.open("rb") as handle:
            raw: Any = json.loads(handle.read(_MAX_BYTES))
        known = raw["format"] == FORMAT
        files = frozenset(str(file["path"]) for file in raw["files"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        known, files = False, frozenset()
    if not known:
        raise BadInput("this isn't the list of a site of needle-export", where=str(place))
    return files | {SITE_NAME}
