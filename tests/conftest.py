"""Settings for all tests."""

from __future__ import annotations

import logging


def pytest_configure() -> None:
    """Keep torch from writing its structured trace into pytest's log capture: it doubles the time of an export."""
    logging.getLogger("torch.__trace").disabled = True
