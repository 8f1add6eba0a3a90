"""onnxruntime-web for the tests: where `make setup` puts it, and the program that it is put there with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from needle_export.errors import NeedleExportError
from needle_export.web.runtime import MODULE, PACKAGE, VERSION, put_runtime

#: Names another folder with its files.
VARIABLE = "NEEDLE_EXPORT_ONNXRUNTIME_WEB"

PLACE = Path(__file__).parents[2] / "build" / "onnxruntime-web"


def runtime_folder() -> Path | None:
    """The folder with the runtime's files, or None where there is none."""
    place = Path(os.environ.get(VARIABLE) or PLACE)
    return place if (place / MODULE).is_file() else None


def main() -> None:
    """Fetch it; a machine without npm tests all but sites, and is told so."""
    from needle_export.reuse import open_cache

    PLACE.mkdir(parents=True, exist_ok=True)
    cache = open_cache()
    try:
        put_runtime(PLACE, None, None if cache is None else cache.folder)
    except NeedleExportError as fault:
        sys.stderr.write(f"NO {PACKAGE} {VERSION}: tests of sites in a browser WILL BE SKIPPED ({fault.sentence})\n")


if __name__ == "__main__":
    main()
