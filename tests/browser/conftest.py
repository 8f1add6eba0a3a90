"""A headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Nothing but what the page asks for may reach the network, or a request of the browser's own would count.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage",
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser that ``NEEDLE_EXPORT_CHROMIUM`` names, or the first on the path."""
    named = os.environ.get("NEEDLE_EXPORT_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium here: the page in it is untested (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield browser
        browser.close()
