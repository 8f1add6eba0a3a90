"""What docs/devices.md says of device files is what they hold."""

from __future__ import annotations

import re
from pathlib import Path

from needle_export.config.device import Chip, Device, RatesTable, Runtime, device_names, load_device
from needle_export.report.devices import markdown

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")


def test_the_table_is_made_from_the_files() -> None:
    assert markdown([load_device(name) for name in device_names()]) in PAGE


def test_every_key_is_explained() -> None:
    said = set(re.findall(r"`\[{0,2}(?:runtime\.)?([a-z_0-9]+)\]{0,2}`", PAGE))
    for table in (Device, Runtime, Chip, RatesTable):
        assert set(table.model_fields) <= said | {"rates"}, table
    kinds = {load_device(name).kind for name in device_names()}
    assert all(f"`{kind}`" in PAGE for kind in kinds)


def test_nothing_is_claimed_of_devices() -> None:
    assert "**Nothing of this project has run on any of these devices.**" in PAGE
