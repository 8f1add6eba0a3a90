"""Device files: what their schema refuses, what a device refuses, and that every shipped number has a source."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from needle_export.config.device import Device, device_names, load_device
from needle_export.config.figures import Figure, sourced
from needle_export.config.options import CACHES, IR_VERSIONS, OPSETS, SCHEMES, SYSTEMS, TARGETS, BuildOptions
from needle_export.config.refusals import (
    ONNX_NEEDS,
    SYSTEM_NAMES,
    TFLITE_BLOCKS,
    TFLITE_BLOCKS_NEED,
    TFLITE_NEEDS,
    fitting_opset,
)
from needle_export.config.rules import Rule
from needle_export.config.shipped import shipped
from needle_export.config.strict import validate
from needle_export.config.units import quantity
from needle_export.errors import BadInput, UsageError

NAMES = device_names()


def guess(value: object) -> dict[str, object]:
    return {"value": value, "kind": "guess", "source": "made up for this test, and nothing else"}


def device(*runtimes: dict[str, Any], **more: Any) -> Device:
    """A small device; what is given by name replaces its own."""
    raw = {"id": "till", "name": "Till", "kind": "till", "os": "TillOS", "os_version": guess("3"),
           "chip": {"name": "T1"}, "memory": guess("100 MB"), "runtime": list(runtimes), **more}
    return validate(Device, raw, "till.toml")


def onnx(version: str = "1.32.0", opset: int = 24, ir: int = 12, **more: Any) -> dict[str, Any]:
    return {"target": "onnx", "name": "ORT", "version": guess(version), "opset": guess(opset), "ir": guess(ir), **more}


def tflite(ops: str, **more: Any) -> dict[str, Any]:
    return {"target": "tflite", "name": "TFL", "version": guess(ops), "ops": guess(ops), **more}


def coreml(system: str) -> dict[str, Any]:
    return {"target": "coreml", "name": "Core ML", "version": guess("1"), "system": guess(system)}


def options(**more: Any) -> BuildOptions:
    return BuildOptions("c", Path("out"), **more)


RATES = {"bandwidth": guess("10 GB/s"), "fp32": guess("20 GMAC/s"), "int8": guess("80 GMAC/s"), "op": guess("2 us"),
         "call": guess("1 ms")}


# What is shipped.


def test_there_are_devices_of_many_classes() -> None:
    kinds = {load_device(name).kind for name in NAMES}
    assert len(NAMES) >= 12 and "pixel-8" in NAMES
    assert {"iphone", "watch", "android", "android-go", "single-board", "browser", "microcontroller"} <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_number_has_unit_kind_and_source(name: str) -> None:
    found = load_device(name)
    assert found.id == name
    told = list(sourced(found))
    assert len(told) >= 5
    for path, figure in told:
        if isinstance(figure, Figure):
            assert re.fullmatch(r"\d+(\.\d+)? [A-Za-z/]+", figure.value), path
        assert figure.kind in ("published", "guess"), f"{path}: nothing was measured on such a device"
        if figure.kind == "published":
            assert re.match(r"https://[a-z0-9.-]+\.[a-z]+/\S*", figure.address), path
        else:
            assert len(figure.source.split()) >= 6, path


@pytest.mark.parametrize("name", NAMES)
def test_numbers_stand_nowhere_but_in_figures_and_budgets(name: str) -> None:
    """A bare number in a file would have neither unit nor source."""
    def bare(value: object, path: str) -> list[str]:
        if isinstance(value, dict):
            if {"value", "kind", "source"} <= set(value):
                return []
            return [p for key, entry in value.items() for p in bare(entry, f"{path}.{key}")]
        if isinstance(value, list):
            return [p for entry in value for p in bare(entry, path)]
        return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []

    raw = tomllib.loads((shipped("devices") / f"{name}.toml").read_text(encoding="utf-8"))
    assert not bare(raw, name)


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_of_this_world(name: str) -> None:
    found = load_device(name)
    for target in found.targets:
        rates = found.rates(target)
        assert rates is not None
        assert 0.5e9 < rates.bandwidth < 200e9 and 1e-7 < rates.op < 2e-5 and 1e-6 < rates.call < 2e-3
        assert {"fp32", "int8"} <= set(rates.throughput) <= {"fp32", "fp16", "int8"}
        assert all(1e9 < rate < 500e9 for rate in rates.throughput.values())
        if found.chip.peak is not None:
            assert rates.bandwidth < quantity(found.chip.peak.value, "bandwidth")
        if found.chip.ram is not None:
            assert found.memory_bytes <= quantity(found.chip.ram.value, "bytes")
    assert found.rates("other") is None


@pytest.mark.parametrize("name", NAMES)
def test_every_device_says_something_of_every_target(name: str) -> None:
    found = load_device(name)
    if found.refusal:
        assert not found.runtimes
        return
    assert {*found.targets, *(w.target for w in found.without)} == set(TARGETS)
    assert {b.metric for b in found.budgets} >= {"size", "state"}


@pytest.mark.parametrize("name", NAMES)
def test_runtime_limits_are_within_what_exists(name: str) -> None:
    """By the table of ONNX itself, and by the releases that TensorFlow had when these files were written."""
    helper = pytest.importorskip("onnx.helper")
    newest = {row[1]: row[2] for row in helper.VERSION_TABLE}  # IR version to the newest opset that came with it
    for runtime in load_device(name).runtimes:
        if runtime.opset is not None and runtime.ir is not None:
            assert OPSETS[0] <= runtime.opset.value <= max(newest.values())
            assert runtime.ir.value in newest
            assert (1, 18) <= runtime.version.parts <= (1, 32)
            # ONNX Runtime runs what the ONNX that it is built with has, so both limits are of one release.
            assert runtime.opset.value <= newest[runtime.ir.value]
        if runtime.ops is not None:
            assert (2, 13) <= runtime.ops.parts <= (2, 21)
        if runtime.system is not None:
            assert runtime.system.value in SYSTEMS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_build_with_the_devices_own_options_is_taken(name: str, target: str) -> None:
    found = load_device(name)
    refused = found.refuses(options(target=target, weights="fp16", **found.defaults(target)))
    assert bool(refused) == (target not in found.targets)
    assert all(s.endswith(".") and found.name in s and len(s) < 700 for s in refused)


# What a device refuses.


def test_what_a_runtime_needs_is_what_targets_write() -> None:
    blocks = pytest.importorskip("needle_export.targets.tflite.blocks")
    assert set(ONNX_NEEDS) == set(IR_VERSIONS) == set(OPSETS)
    assert blocks._RUNTIME == TFLITE_BLOCKS_NEED
    assert set(SYSTEM_NAMES) == set(SYSTEMS)


def test_what_a_runtime_needs_is_what_pages_say() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "onnx.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)(?:, the default)? \| (\d+) \| ([\d.]+) \|", page, re.M)
    assert {int(opset): oldest for opset, _, oldest in rows} == ONNX_NEEDS
    assert {int(opset): int(ir) for opset, ir, _ in rows} == IR_VERSIONS
    page = " ".join((docs / "tflite.md").read_text(encoding="utf-8").split())
    needs, blocks = (version.removesuffix(".0") for version in (TFLITE_NEEDS, TFLITE_BLOCKS_NEED))
    assert f"{needs} for those of today, and {blocks} for the versions of ops that `int4` has" in page


def test_a_device_without_a_runtime_refuses_everything() -> None:
    found = load_device("esp32-s3")
    for target in TARGETS:
        (said,) = found.refuses(options(target=target, weights="fp16"))
        assert said.startswith(f"{found.name} runs none of the runtimes") and "32 MB of flash and PSRAM" in said
    assert found.defaults("onnx") == {} and found.targets == ()


def test_a_target_without_a_runtime() -> None:
    found = device(tflite("2.18"), without=[{"target": "coreml", "why": "it is Apple's", "kind": "guess",
                                             "source": "everybody knows whose Core ML is"}])
    assert found.refuses(options(target="coreml")) == (
        "Till has no runtime for coreml: it is Apple's; choose --target tflite.",)
    assert found.refuses(options(target="onnx")) == ("Till has no runtime for onnx; choose --target tflite.",)


@pytest.mark.parametrize(("runtime", "opset", "weights", "why", "fix"), [
    (onnx(opset=23, ir=11), 24, "fp16", "it runs opset 23 at most", "choose --opset 23."),
    (onnx(opset=23, ir=11), 24, "int4", "it runs opset 23 at most",
     "choose --opset 23 and --weights fp32 or fp16, since int4 needs opset 24."),
    (onnx(ir=11), 24, "fp32", "such a file has IR version 12, and it reads 11 at most", "choose --opset 23."),
    (onnx("1.24.3"), 24, "fp32", "the oldest version that has run such a build is 1.25.1", "choose --opset 23."),
    (onnx("1.17"), 21, "fp32", "is 1.18.1", "no opset that can be emitted is old enough."),
])
def test_an_opset_that_is_too_new(runtime: dict[str, Any], opset: int, weights: str, why: str, fix: str) -> None:
    (said,) = device(runtime).refuses(options(opset=opset, weights=weights))
    assert f"Opset {opset} is too new for ORT" in said and why in said and said.endswith(fix)


def test_the_opset_of_a_device() -> None:
    assert device(onnx()).defaults("onnx") == {"opset": 24} and not device(onnx()).refuses(options())
    found = device(onnx("1.20.0", 21, 10))
    assert found.defaults("onnx") == {"opset": 21} and not found.refuses(options(opset=21))
    old = device(onnx("1.17.0", 20, 9))
    assert old.defaults("onnx") == {} and fitting_opset(old.runtimes[0]) is None


@pytest.mark.parametrize("weights", SCHEMES["tflite"])
@pytest.mark.parametrize("ops", ["2.12", "2.14.0", "2.18.0", "2.20"])
def test_ops_that_are_too_new(weights: str, ops: str) -> None:
    refused = device(tflite(ops)).refuses(options(target="tflite", weights=weights))
    needs = "2.18.0" if weights in TFLITE_BLOCKS else "2.13.0"
    assert bool(refused) == ([int(n) for n in ops.split(".")] < [int(n) for n in needs.split(".")])
    for said in refused:
        assert f"TensorFlow {needs}" in said and f"TFL {ops} on Till knows those of {ops} at most" in said


def test_a_rule_alone_makes_blocks_too() -> None:
    mixed = options(target="tflite", weights="int8", rules=(Rule.parse("memory=int4"),))
    (said,) = device(tflite("2.14.0")).refuses(mixed)
    assert said.startswith("int4 is matrices in blocks")


@pytest.mark.parametrize("has", SYSTEMS)
@pytest.mark.parametrize("asked", SYSTEMS)
def test_a_package_for_a_newer_system(has: str, asked: str) -> None:
    found = device(coreml(has))
    refused = found.refuses(options(target="coreml", os=asked))
    assert bool(refused) == (SYSTEMS.index(asked) > SYSTEMS.index(has))
    for said in refused:
        assert f"choose --os {has}" in said and SYSTEM_NAMES[asked] in said
        assert ("has no states" in said) == (has == "ios17")
    assert found.defaults("coreml") == {"os": has}


def test_what_a_file_lists() -> None:
    listed = {"weights": ["int8"], "cache": ["fp16"], "why": "its build has no such kernels", "kind": "guess",
              "source": "somebody built it without them, they say"}
    found = device(onnx(refuses=[listed]))
    assert not found.refuses(options(weights="int4"))
    assert found.refuses(options(weights="int8")) == (
        "ORT 1.32.0 on Till can't take --weights int8: its build has no such kernels.",)
    assert len(found.refuses(options(weights="int8", cache="fp16"))) == 2


def test_more_memory_than_an_app_has() -> None:
    found = device(onnx())
    assert not found.refuses(options(), resident=100_000_000)
    (said,) = found.refuses(options(), resident=100_000_001)
    assert said.startswith("A session needs at least 100.0 MB at once, and an app on Till may use 100 MB; ")


@pytest.mark.parametrize("cache", CACHES["onnx"])
def test_caches_are_no_matter_where_nothing_is_listed(cache: str) -> None:
    assert not device(onnx()).refuses(options(cache=cache))


# What a file may hold.


def test_rates_in_si_units() -> None:
    rates = device(onnx(rates=RATES)).rates("onnx")
    assert rates is not None and rates.bandwidth == 10e9 and rates.op == pytest.approx(2e-6)
    assert rates.throughput == {"fp32": 20e9, "int8": 80e9} and rates.call == pytest.approx(1e-3)
    assert device(onnx()).rates("onnx") is None and device(onnx()).rates("tflite") is None


@pytest.mark.parametrize(("more", "where", "said"), [
    ({"memory": guess("100")}, "memory", "is no quantity of bytes"),
    ({"memory": guess("100 GB/s")}, "memory", "is no quantity of bytes"),
    ({"memory": {"value": "1 GB", "kind": "published", "source": "a friend told me so"}}, "memory", "https address"),
    ({"memory": {"value": "1 GB", "kind": "published", "source": "http://a.example/b"}}, "memory", "https address"),
    ({"memory": {"value": "1 GB", "kind": "guess", "source": "no idea"}}, "memory", "reasoning"),
    ({"memory": {"value": "1 GB", "kind": "guess", "source": "https://a.example/b"}}, "memory", "reasoning"),
    ({"memory": {"value": "1 GB", "kind": "measured", "source": ""}}, "memory", "command"),
    ({"memory": {"value": "1 GB", "kind": "measured", "source": "https://a.example/b"}}, "memory", "command"),
    ({"memory": {"value": "1 GB", "kind": "rumour", "source": "x"}}, "memory.kind", "input should be 'published'"),
    ({"memory": {"value": "1 GB", "kind": "guess"}}, "memory.source", "missing"),
    ({"id": "Till 1"}, "id", "match pattern"),
    ({"os_version": guess("three")}, "os_version.value", "match pattern"),
    ({"chip": {"name": "T1", "clock": guess("2 GB")}}, "chip.clock", "is no quantity of frequency"),
    ({"runtime": [], "refusal": ""}, "", "says why in refusal"),
    ({"refusal": "it is too small for that"}, "", "a device with a runtime has no refusal"),
    ({"runtime": [onnx(), onnx()]}, "", "onnx is there twice"),
    ({"runtime": [{**onnx(), "system": guess("ios18")}]}, "runtime[1]", "system is a limit of coreml, not of onnx"),
    ({"runtime": [{k: v for k, v in onnx().items() if k != "ir"}]}, "runtime[1]", "needs its limit ir"),
    ({"runtime": [coreml("ios19")]}, "runtime[1].system.value", "there is no 'ios19'; choose from ios17"),
    ({"runtime": [onnx(rates={**RATES, "op": guess("2 GB")})]}, "runtime[1].rates.op", "is no quantity of time"),
    ({"runtime": [onnx(refuses=[{"weights": ["int9"], "why": "x", **guess("1")}])]}, "runtime[1].refuses[1].value",
     "there is no such key"),
    ({"budget": [{"metric": "size", "max": "1 MB", "device": "other"}]}, "", "about another device"),
])
def test_what_is_refused_and_where(more: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        device(onnx(), **more)
    assert caught.value.where == (f"till.toml: {where}" if where else "till.toml") and said in caught.value.what


def test_unknown_keys_in_nested_tables() -> None:
    with pytest.raises(BadInput, match=r"runtime\[1\]\.rates\.bandwith: .*; did you mean bandwidth\?"):
        device(onnx(rates={**RATES, "bandwith": guess("1 GB/s")}))
    with pytest.raises(BadInput, match="did you mean memory"):
        device(onnx(), memroy=guess("1 GB"))
    with pytest.raises(BadInput, match="there is no scheme 'int9'; did you mean int"):
        device(onnx(refuses=[{"weights": ["int9"], "why": "x", "kind": "guess", "source": "made up for this test"}]))


def test_a_device_by_name_or_path(tmp_path: Path) -> None:
    assert load_device("pixel-8").name == "Google Pixel 8"
    path = tmp_path / "ours.toml"
    text = (shipped("devices") / "pixel-8.toml").read_text(encoding="utf-8")
    path.write_text(text.replace('id = "pixel-8"', 'id = "ours"', 1), encoding="utf-8")
    assert load_device(path).id == load_device(str(path)).id == "ours"
    for unknown, fix in (("pixel8", "did you mean pixel-8?"), ("zzz", "choose from")):
        with pytest.raises(UsageError, match="there is no device") as caught:
            load_device(unknown)
        assert fix in caught.value.fix
    with pytest.raises(BadInput, match="there is no such file"):
        load_device("absent.toml")


def test_sources_are_found_wherever_they_stand() -> None:
    found = device(onnx(rates=RATES), without=[{"target": "tflite", "why": "no", "kind": "guess",
                                                "source": "made up for this test, once more"}])
    paths = [path for path, _ in sourced(found)]
    assert paths == ["os_version", "memory", "runtime[onnx].version", "runtime[onnx].opset", "runtime[onnx].ir",
                     *(f"runtime[onnx].rates.{key}" for key in RATES), "without[tflite]"]
