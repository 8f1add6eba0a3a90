"""This machine's device file: what is written is read again as it was measured, and where it is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from needle_export import calibration
from needle_export.config.device import load_device
from needle_export.config.host import host_device, host_path
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.config.rates import Rates
from needle_export.errors import BadInput, UsageError
from needle_export.estimates import basis_of
from needle_export.measure import rates as measured
from needle_export.measure.latency import host
from tests.unit.measure.test_rates import CACHE, RATES, times


@pytest.fixture(autouse=True)
def _measured_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "last_cache", lambda: CACHE)
    monkeypatch.setattr(measured, "measure", lambda target, cache, *, repeats, progress: [times(RATES)] * repeats)


def test_the_file_holds_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "host.toml"
    calibration.calibrate(("onnx", "tflite"), out, NullProgress(), repeats=1)
    device = load_device(out)
    assert (device.id, device.chip.name, device.targets) == ("host", host(), ("onnx", "tflite"))
    assert basis_of(device, "onnx") == "measured"
    found = device.rates("tflite")
    assert isinstance(found, Rates)
    assert found.op == pytest.approx(RATES.op, rel=0.1) and found.cold == pytest.approx(RATES.cold, rel=0.1)
    assert dict(found.streams) == pytest.approx(dict(RATES.streams), rel=0.05)
    assert found.cache == pytest.approx(RATES.cache) and found.own == RATES.own
    assert "needle-export calibrate --target onnx,tflite" in out.read_text()
    # What is built and verified here is nothing that this machine refuses.
    for target in device.targets:
        assert not device.refuses(BuildOptions("x", tmp_path, target=target, weights="int4"))


def test_targets_without_such_graphs_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the rates of coreml can't be measured here"):
        calibration.calibrate(("onnx", "coreml"), tmp_path / "host.toml", NullProgress(), repeats=1)
    assert not (tmp_path / "host.toml").exists()


def test_the_file_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "host.toml"
    calibration.calibrate(("onnx",), out, NullProgress(), repeats=1)
    monkeypatch.setenv("NEEDLE_EXPORT_HOST", str(out))
    assert host_path() == out
    found = host_device()
    assert found is not None and found.targets == ("onnx",)
    monkeypatch.setenv("NEEDLE_EXPORT_HOST", "")
    assert host_path() is None and host_device() is None
    monkeypatch.setenv("NEEDLE_EXPORT_HOST", str(tmp_path / "none.toml"))
    with pytest.raises(BadInput, match="there is no such file"):
        host_device()


def test_without_the_variable_it_is_in_the_user_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEEDLE_EXPORT_HOST", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    path = host_path()
    assert path is not None and path.name == "host.toml"
    if path.is_relative_to(tmp_path):  # elsewhere systems have folders of their own
        assert host_device() is None


def test_another_device_s_file_is_not_this_machine_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needle_export.config.shipped import shipped

    monkeypatch.setenv("NEEDLE_EXPORT_HOST", str(shipped("devices") / "pixel-8.toml"))
    with pytest.raises(BadInput, match="this is the device 'pixel-8'"):
        host_device()
