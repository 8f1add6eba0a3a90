"""Where this machine's own device file is: what ``needle-export calibrate`` writes, and every estimate here reads."""

from __future__ import annotations

import os
from pathlib import Path

from needle_export.config.device import Device, load_device
from needle_export.config.rates import HOST
from needle_export.errors import BadInput

#: The variable that names the file; empty for none.
VARIABLE = "NEEDLE_EXPORT_HOST"


def host_path() -> Path | None:
    """The file that the variable names, else the one in the user's folder for settings; None if that is empty."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    import platformdirs

    return platformdirs.user_config_path("needle-export", appauthor=False) / f"{HOST}.toml"


def host_device() -> Device | None:
    """This machine's device, or None where it was never calibrated.

    Raises:
        BadInput: the variable names a file that isn't there, or the file isn't right.
    """
    path = host_path()
    if path is None or (VARIABLE not in os.environ and not path.is_file()):
        return None
    device = load_device(path)
    if device.id != HOST:
        fix = "name a file that calibrate has written"
        raise BadInput(f"this is the device {device.id!r}", where=str(path), fix=fix)
    return device
