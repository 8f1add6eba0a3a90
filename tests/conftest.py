"""Settings for all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Nothing of this machine's own for any test, and two settings of torch that tests are many times slower without.

    Tests of the cache name a folder of their own. Variables go for commands that tests start too.

    Torch's structured trace would go through pytest's log capture, which doubles the time of an export; and more
    threads than one make small matrices slower, the more so on a machine that does something else too.
    """
    # What earlier builds made, and what this machine was calibrated to, are no part of what is tested.
    os.environ["NEEDLE_EXPORT_CACHE"] = "off"
    os.environ["NEEDLE_EXPORT_HOST"] = ""
    import torch

    logging.getLogger("torch.__trace").disabled = True
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of published models first: each takes minutes, and last of all it would run while other workers idle."""
    others = {item.path for item in items if item.get_closest_marker("published") is None}
    items.sort(key=lambda item: item.path in others)


@pytest.fixture(scope="session", autouse=True)
def _shared_exports() -> Iterator[None]:
    """One export for all builds of a process that would make the same; tests/support/traces.py says why it may be."""
    from tests.support.traces import shared

    with shared():
        yield
