"""Settings for all tests."""

from __future__ import annotations

import logging


def pytest_configure() -> None:
    """Two settings of torch that tests are many times slower without.

    Its structured trace would go through pytest's log capture, which doubles the time of an export; and more
    threads than one make small matrices slower, the more so on a machine that does something else too.
    """
    import torch

    logging.getLogger("torch.__trace").disabled = True
    torch.set_num_threads(1)
