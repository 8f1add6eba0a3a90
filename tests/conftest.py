"""Settings for all tests."""

from __future__ import annotations

import logging
import os


def pytest_configure() -> None:
    """Two settings of torch that tests are many times slower without, and none of this machine's own.

    Its structured trace would go through pytest's log capture, which doubles the time of an export; and more
    threads than one make small matrices slower, the more so on a machine that does something else too.
    """
    import torch

    # What this machine was calibrated to is no part of what is tested.
    os.environ["NEEDLE_EXPORT_HOST"] = ""
    logging.getLogger("torch.__trace").disabled = True
    torch.set_num_threads(1)
