"""Numbers as a page shows them, each with the exact value and the place in report.json that it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from needle_export.config.metrics import BY_NAME, Unit
from needle_export.report.codec import encode
from needle_export.report.metrics import Value
from needle_export.report.schema import Report
from needle_export.report.units import milliseconds, percent, rate, size, small, whole

Form = Callable[[Any], str]


@dataclass(frozen=True)
class Number:
    """A number that is shown.

    Attributes:
        text: as it is shown, with its unit.
        value: exact.
        source: where it is from: a JSON pointer (RFC 6901) into the report; in it, ``*`` stands for every item, whose
            numbers are summed. ``count:`` before a pointer is the number of items there, ``share:`` before two, with
            ``|`` between, the first over the second. ``metric:`` before an artifact's pointer and a name is a figure
            of ``report.metrics``. ``layer:`` before a pointer to tensors, a role and a layer is the sum of that layer's
            bytes; ``rest:`` before such a pointer and a role is the sum of what tensors with layers have besides.
        report: index of the report among those of the page.
    """

    text: str
    value: float
    source: str
    report: int


class Citation:
    """Numbers of one report of a page, by their place in it."""

    def __init__(self, index: int, report: Report) -> None:
        self.index = index
        self.report = report
        self._raw = encode(report)

    def __call__(self, form: Form, *keys: str | int) -> Number:
        """The number at a place, shown in a form; a key ``*`` sums over all items."""
        value = _sum(self._raw, keys)
        return Number(form(value), value, pointer(*keys), self.index)

    def count(self, noun: str, *keys: str | int) -> Number:
        """How many items are at a place: 3 files."""
        value = len(_at(self._raw, keys))
        unit = noun if value == 1 or not noun else f"{noun}s"
        return Number(f"{whole(value)} {unit}".strip(), value, f"count:{pointer(*keys)}", self.index)

    def share(self, part: tuple[str | int, ...], total: tuple[str | int, ...], digits: int = 1) -> Number:
        """One number over another, in percent; 0 of nothing is 0."""
        above, below = _sum(self._raw, part), _sum(self._raw, total)
        shown = percent(above, below) if digits == 1 else f"{100 * above / below if below else 0:.{digits}f} %"
        value = above / below if below else 0.0
        return Number(shown, value, f"share:{pointer(*part)}|{pointer(*total)}", self.index)

    def layer(self, role: str, layer: int, *tensors: str | int) -> Number:
        """Bytes of a role in a layer, by the list of tensors at a place."""
        value = sum(tensor["by_layer"][layer] for tensor in self._of(role, tensors))
        return Number(size(value), value, f"layer:{pointer(*tensors, role, layer)}", self.index)

    def beside_layers(self, role: str, *tensors: str | int) -> Number:
        """Bytes of a role's tensors with layers that are no single layer's."""
        value = sum(tensor["bytes"] - sum(tensor["by_layer"]) for tensor in self._of(role, tensors))
        return Number(size(value), value, f"rest:{pointer(*tensors, role)}", self.index)

    def _of(self, role: str, tensors: tuple[str | int, ...]) -> list[Any]:
        return [t for t in _at(self._raw, tensors) if t["role"] == role and t["by_layer"]]

    def has(self, *keys: str | int) -> bool:
        """Whether there is a number at a place; the comparison in a report is free-form."""
        try:
            return number(_at(self._raw, keys))
        except (KeyError, IndexError, TypeError):
            return False

    def metric(self, artifact: int, name: str, value: Value) -> Number | None:
        """A figure of an artifact; None where it has no value."""
        if value.value is None:
            return None
        found = value.value
        source = f"metric:{pointer('artifacts', artifact)}/{name}"
        return Number(in_unit(found, BY_NAME[name].unit), found, source, self.index)


def in_unit(value: float, unit: Unit) -> str:
    """A figure with its unit."""
    match unit:
        case "bytes":
            return size(int(value))
        case "ms":
            return milliseconds(value)
        case "tokens/s":
            return rate(value)
        case "share":
            return f"{100 * value:.1f} %"
        case "nats":
            return f"{small(value)} nats" if value else "0"
        case "logit":
            return small(value)


def share(value: float) -> str:
    """A share in percent."""
    return in_unit(value, "share")


def number(value: object) -> bool:
    """Whether a value of the free-form part is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def pointer(*keys: str | int) -> str:
    """A JSON pointer."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def _at(raw: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        raw = raw[key]
    return raw


def _sum(raw: Any, keys: tuple[str | int, ...]) -> Any:
    if "*" not in keys:
        return _at(raw, keys)
    at = keys.index("*")
    items = _at(raw, keys[:at])
    return sum(_sum(item, keys[at + 1 :]) for item in (items.values() if isinstance(items, Mapping) else items))
