"""needle-export devices: the list, one device, a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needle_export.config.device import Device, device_names, load_device
from needle_export.config.figures import sourced
from needle_export.config.shipped import shipped
from tests.cli.conftest import Run


def test_the_list(run: Run) -> None:
    page = run("devices")
    assert page.exit_code == 0 and page.stdout.startswith("\nDevices\n") and "guesses" in page.stdout
    listed = json.loads(run("devices", "--json").stdout)["devices"]
    assert [d["id"] for d in listed] == list(device_names())
    for told in listed:
        device = load_device(told["id"])
        assert told["id"] in page.stdout
        assert told["memory_bytes"] == device.memory_bytes and told["os_version"] == device.os_version.value
        assert [r["target"] for r in told["runtimes"]] == list(device.targets)
        assert bool(told["refusal"]) == (told["bandwidth_bytes_per_s"] is None) == (not device.targets)


@pytest.mark.parametrize("name", ["pixel-8", "iphone-12", "esp32-s3"])
def test_one_device_with_every_source(run: Run, name: str) -> None:
    device = load_device(name)
    page = run("devices", name)
    assert page.exit_code == 0 and page.stdout.startswith(f"{device.name} ({name})\n")
    words = page.stdout.replace(" ", "").replace("\n", "")
    for _, figure in sourced(device):
        assert figure.source[-12:].replace(" ", "") in words
        assert str(getattr(figure, "value", "")).replace(" ", "") in words
    assert ("no artifact runs here" in page.stdout) == bool(device.refusal)
    assert all(budget.sentence in page.stdout for budget in device.budgets)
    assert Device.model_validate_json(run("devices", name, "--json").stdout) == device


def test_a_file_of_ones_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "till.toml"
    text = (shipped("devices") / "raspberry-pi-5.toml").read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    assert run("devices", str(path)).stdout == run("devices", "raspberry-pi-5").stdout
    path.write_text(text.replace("[memory]", "[memroy]"), encoding="utf-8")
    broken = run("devices", str(path))
    assert broken.exit_code == 3 and "memroy" in broken.stderr and "did you mean memory?" in broken.stderr


def test_a_name_that_is_none(run: Run) -> None:
    wrong = run("devices", "pixel8", "--json")
    assert wrong.exit_code == 2 and "did you mean pixel-8?" in wrong.stderr and not wrong.stdout.startswith("{}")
    assert json.loads(wrong.stdout)["error"]
