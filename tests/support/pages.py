"""Pages taken apart, and the numbers on them looked up in report.json, apart from the code that wrote them."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from typing import Any

from needle_export.report.measured import DecodeLatency, Latency, PrefillLatency
from needle_export.report.metrics import metrics_of, prompts
from needle_export.report.schema import Artifact, Fusion, LeftUnfused, Report, dump_report
from tests.support.reports import make_artifact, make_evaluation, make_report, make_size

VOID = frozenset({"meta", "link", "br", "img", "input", "hr", "base", "col", "embed", "source", "track", "wbr"})

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "ms": 1, "s": 1e3, "%": 0.01}


@dataclasses.dataclass(frozen=True)
class Shown:
    """A number on a page: what it cites, its exact value as written, and its text (empty inside a drawing)."""

    source: str
    value: str
    report: int
    text: str


class Page(HTMLParser):
    """What a page is made of.

    Attributes:
        tags: every element: its name and attributes.
        numbers: those with a citation.
        loose: text that is neither a cited number, nor marked as quoted, nor of a drawing.
        style: the style sheet.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.numbers: list[Shown] = []
        self.loose: list[str] = []
        self.style = ""
        self._open: list[tuple[str, dict[str, str]]] = []
        self._texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag not in VOID:
            self._open.append((tag, found))
            self._texts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        name, attrs = self._open.pop()
        assert name == tag, f"{tag} ends {name}"
        text = self._texts.pop()
        if self._texts:
            self._texts[-1] += text
        if "data-metric" in attrs:
            shown = " ".join(text.split()) if name in ("span", "tspan") else ""
            self.numbers.append(Shown(attrs["data-metric"], attrs["data-value"], int(attrs["data-report"]), shown))

    def handle_data(self, data: str) -> None:
        if self._texts:
            self._texts[-1] += data
        tags = {tag for tag, _ in self._open}
        classes = {name for _, attrs in self._open for name in attrs.get("class", "").split()}
        if "style" in tags:
            self.style += data
        elif not tags & {"svg", "title", "code"} and "said" not in classes \
                and not any("data-metric" in attrs for _, attrs in self._open):
            self.loose.append(data)


_JSON: dict[int, tuple[Report, Any]] = {}


def as_json(report: Report) -> Any:
    """The report's JSON, read anew once for each report; a page has thousands of numbers."""
    if id(report) not in _JSON:
        # The report is kept too, or another could get its identity.
        _JSON[id(report)] = report, json.loads(dump_report(report))
    return _JSON[id(report)][1]


def looked_up(source: str, report: Report) -> float:
    """The number that a citation means, from the report's JSON."""
    raw = as_json(report)
    kind, _, rest = source.rpartition(":") if ":" in source.split("/", 1)[0] else ("", "", source)
    if kind == "metric":
        _, _, index, name = rest.split("/")
        found = metrics_of(report, report.artifacts[int(index)])[name].value
        assert found is not None
        return found
    if kind == "count":
        return len(_find(raw, _keys(rest)))
    if kind == "share":
        part, total = (_total(raw, _keys(pointer)) for pointer in rest.split("|"))
        return part / total if total else 0.0
    if kind == "layer":
        *place, role, layer = _keys(rest)
        return sum(t["by_layer"][int(layer)] for t in _find(raw, place) if t["role"] == role and t["by_layer"])
    if kind == "rest":
        *place, role = _keys(rest)
        return sum(t["bytes"] - sum(t["by_layer"]) for t in _find(raw, place) if t["role"] == role and t["by_layer"])
    assert kind == "", source
    return _total(raw, _keys(rest))


def reads_as(text: str, value: float) -> bool:
    """Whether a number's text is its value, to the digits that are shown."""
    match = re.match(r"(-?[\d,]+(?:\.\d+)?)(e[+-]\d+)?(?: (\S+))?", text)
    assert match, text
    digits, exponent, unit = match.groups()
    scale = float(f"1{exponent or ''}") * _UNITS.get(unit or "", 1)
    decimals = len(digits.partition(".")[2])
    return abs(float(digits.replace(",", "")) * scale - value) <= scale * 0.5000001 * 10.0**-decimals


def _keys(pointer: str) -> list[str]:
    return [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]


def _find(raw: Any, keys: list[str]) -> Any:
    for key in keys:
        raw = raw[int(key)] if isinstance(raw, list) else raw[key]
    return raw


def _total(raw: Any, keys: list[str]) -> float:
    if "*" not in keys:
        return _find(raw, keys)
    at = keys.index("*")
    items = _find(raw, keys[:at])
    return sum(_total(item, keys[at + 1:]) for item in (items.values() if isinstance(items, dict) else items))


def longest_common_prompt(reports: list[tuple[str, Report]]) -> int | None:
    """The prompt that prefill is told for on a page."""
    return prompts([artifact for _, report in reports for artifact in report.artifacts])


LONG = "a-name-without-any-place-to-break-it-" * 6


def made_up() -> list[tuple[str, Report]]:
    """Reports of several targets and schemes, with everything that a page can have to show."""

    def lossy(kl: float, equal: float) -> dict[str, Any]:
        return {**make_artifact().parity, "scheme_loss": {"kl": kl, "argmax_equal": equal, "max_abs": 0.5},
                "cache_loss": None, "weights": {"matrices": 7, "bytes": 123_456, "folded": 3}}

    def sized(total: int, **changes: Any) -> Artifact:
        roles = {"memory": total * 6 // 10, "content": total * 2 // 10, "routing": total // 12,
                 "vocabulary": total // 20, "mixing": total // 90, "lanes": total // 80, "norms": total // 700}
        files = {"model.bin": bytes(total)}
        changes = {"evaluations": (make_evaluation(120 + total // 8_000),), **changes}
        return make_artifact(files, size=make_size(total, roles), estimates=(), imported=(), **changes)

    estimated = Latency("estimated", "an imaginary phone", 4, "nothing repeats it", None, None,
                        (PrefillLatency(64, 61.5, 1040.6), PrefillLatency(256, 230.0, 1113.0)),
                        DecodeLatency(3.25, 3.25, 307.7, 256), None)
    left = tuple(LeftUnfused(layer, f"node_{layer}", "the mask isn't causal") for layer in (0, 1, 2, 7))
    exact = {**make_artifact().parity, "scheme_loss": None}
    return [
        ("builds/fp32", make_report(sized(484_000, parity=exact), random=True)),
        ("builds/int8", make_report(sized(127_000, weights="int8", parity=lossy(0.00085, 0.846)), random=True)),
        ("builds/int8-wide", make_report(sized(131_000, weights="int8", parity=lossy(0.0009, 0.83)), random=True)),
        ("builds/int4", make_report(sized(
            65_400, weights="int4", parity=lossy(0.0797, 0.2243), fusion={"attention": Fusion(20, 16, left)}),
            random=True)),
        ("builds/phone", make_report(sized(
            71_000, target="tflite", weights="int4", parity=lossy(0.063, 0.294), latency=estimated, memory=None),
            random=True)),
        (f"builds/{LONG}", make_report(sized(
            70_900, target="coreml", weights="int4", status="verified-by-evaluator", latency=None, memory=None,
            parity={**lossy(0.0617, 0.28), "rounded": {"max_abs": 0.02, "argmax_equal": 29, "steps": 32}},
            notes=(LONG, "no Apple device took part")), random=True)),
        ("builds/untried", make_report(sized(
            69_000, target="other", weights="int4", status="converted-only", latency=None, memory=None, parity={},
            fusion={}, runtimes=(), kept_float=(), versions={}, evaluations=()), random=True)),
    ]
