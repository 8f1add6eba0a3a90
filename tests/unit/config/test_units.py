"""Quantities with their units."""

from __future__ import annotations

import pytest

from needle_export.config.units import quantity


@pytest.mark.parametrize(("text", "kind", "value"), [
    ("35.5 MB", "bytes", 35.5e6),
    ("2 MiB", "bytes", 2 * 2**20),
    ("0 kB", "bytes", 0),
    ("4 ms", "time", 4e-3),
    ("0.5 us", "time", 0.5e-6),
    ("250 tokens/s", "speed", 250),
    ("40 GMAC/s", "compute", 40e9),
    ("12.8 GB/s", "bandwidth", 12.8e9),
    ("2.4 GHz", "frequency", 2.4e9),
])
def test_a_quantity_in_si_units(text: str, kind: str, value: float) -> None:
    assert quantity(text, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("text", "kind", "said"), [
    ("35.5", "bytes", "is no quantity of bytes, such as 35.5 MB or 2 MiB"),
    ("35.5MB", "bytes", "is no quantity of bytes"),
    ("4 ms", "bytes", "is no quantity of bytes"),
    ("4 m", "time", "is no quantity of time"),
    ("4 MB/s", "speed", "is no quantity of speed"),
    ("4 tokens", "bytes", "is no quantity of bytes"),
    ("4 GHz", "compute", "is no quantity of compute"),
    ("4 GMAC/s", "bandwidth", "is no quantity of bandwidth"),
    ("4 kilotime", "time", "is no quantity of time"),
    ("4 (MB", "bytes", "is no quantity"),
    ("4 MB**2", "bytes", "is no quantity"),
    ("MB", "bytes", "is no quantity"),
    ("4 parsecs", "bytes", "is no quantity"),
    ("nan MB", "bytes", "below 0 or not finite"),
    ("-4 MB", "bytes", "below 0 or not finite"),
])
def test_what_is_none_is_refused(text: str, kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        quantity(text, kind)
