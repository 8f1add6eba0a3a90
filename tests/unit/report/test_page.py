"""The HTML page: its numbers are the report's, nothing in a report is taken for markup, nothing is loaded."""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from needle_export.report.elsewhere import EstimateParts, ImportedLatency, LatencyEstimate, PrefillEstimate
from needle_export.report.page import prepare, render_page
from needle_export.report.schema import Report, load_report, parse_report
from needle_export.report.view import STATUS
from tests.support.pages import Page, longest_common_prompt, looked_up, made_up, reads_as
from tests.support.reports import make_artifact, make_report, write_artifact

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def several() -> list[tuple[str, Report]]:
    return made_up()


@pytest.fixture(scope="module")
def text(several: list[tuple[str, Report]]) -> str:
    return render_page(several)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_every_number_is_the_one_in_the_report(page: Page, several: list[tuple[str, Report]]) -> None:
    assert len(page.numbers) > 500
    prompt = longest_common_prompt(several)
    assert prompt == 256
    for shown in page.numbers:
        expected = looked_up(shown.source, several[shown.report][1])
        assert json.loads(shown.value) == expected, shown
        if shown.text:
            assert reads_as(shown.text, expected), shown


def test_no_number_is_shown_without_its_source(page: Page) -> None:
    assert not [piece for piece in page.loose if re.search(r"\d", piece)]


def test_the_essential_is_cited(page: Page) -> None:
    sources = {shown.source for shown in page.numbers}
    for name in ("size", "compressed", "state", "load_rss", "decode", "prefill", "kl", "token_agreement"):
        assert f"metric:/artifacts/0/{name}" in sources
    for source in (
        "/artifacts/0/size/by_role/memory", "/artifacts/0/size/overhead_bytes", "/artifacts/0/latency/decode/ms_p95",
        "layer:/artifacts/0/size/tensors/memory/2", "/artifacts/0/latency/prefill/1/ms_p50", "/checkpoint/parameters",
        "/artifacts/0/fusion/attention/fused", "/artifacts/0/runtimes/0/max_abs", "/artifacts/0/files/0/bytes",
        "/artifacts/0/parity/tolerance/logits", "/artifacts/0/memory/decode/rss_bytes", "/artifacts/0/nodes/decode",
        "/artifacts/0/kept_float/0/bytes", "/artifacts/0/state_bytes/by_part/keys", "/options/context",
    ):
        assert source in sources, source


def test_areas_sum_to_the_files(several: list[tuple[str, Report]]) -> None:
    cards = {card.folder: card for card in prepare(several).cards}
    for folder, report in several:
        size = report.artifacts[0].size
        for drawn in cards[folder].maps:
            assert sum(area.bytes.value for area in drawn.areas) == size.total_bytes
            whole = sum(area.rect.area for area in drawn.areas)
            for area in drawn.areas:
                assert area.rect.area / whole == pytest.approx(area.bytes.value / size.total_bytes, rel=1e-9)
            layers = [area for area in drawn.areas if area.title.startswith("memory, layer ")]
            assert len(layers) == 3 and sum(area.bytes.value for area in layers) == size.by_role["memory"]


def test_a_number_that_is_not_the_reports_is_noticed(several: list[tuple[str, Report]]) -> None:
    """The lookup can fail: each of its kinds gives another number for another report."""
    small, large = several[3][1], several[0][1]
    for source in ("/artifacts/0/size/total_bytes", "layer:/artifacts/0/size/tensors/memory/1",
                   "metric:/artifacts/0/kl", "/artifacts/0/fusion/*/fused",
                   "share:/artifacts/0/size/by_role/norms|/artifacts/0/size/total_bytes",
                   "count:/artifacts/0/fusion/attention/left"):
        assert looked_up(source, small) != looked_up(source, large), source
    assert not reads_as("65.4 MB", 65_460_000) and reads_as("65.4 MB", 65_440_000)


def test_random_weights_come_first_and_loud(text: str, several: list[tuple[str, Report]]) -> None:
    assert text.index('class="warning loud') < text.index("<main>")
    assert "RANDOM WEIGHTS, made for tests" in text.split("<main>")[0]
    trained = [(name, dataclasses.replace(r, checkpoint=dataclasses.replace(r.checkpoint, random=False)))
               for name, r in several]
    assert "RANDOM" not in render_page(trained)
    mixed = render_page([*trained[:1], several[1]])
    assert "losses mean nothing (onnx int8)" in mixed


def test_each_status_says_what_it_means(text: str) -> None:
    for words in STATUS.values():
        assert words in text
    assert "through an evaluator of ours" in text and "nothing has run them" in text
    alone = render_page([("d", make_report())])
    assert "evaluator of ours" not in alone and "nothing has run" not in alone


def test_measured_and_estimated_differ_in_form_and_in_words(several: list[tuple[str, Report]], text: str) -> None:
    data = prepare(several)
    assert data.prompts is not None and data.kinds == {"measured", "estimated"}
    for mark in data.prompts.marks:
        estimated = "imaginary phone" in mark.title
        assert mark.solid is not estimated and ("estimated" in mark.title) is estimated
    assert [m.name for m in data.prompts.marks if not m.solid and m.name] == ["tflite int4\nestimated"]
    drawn = next(m for m in data.prompts.marks if not m.solid and m.name)
    assert drawn.label is not None and ">estimated</tspan>" in text
    assert {s.dashed for s in data.prompts.segments if s.shape == "tflite"} == {True}
    assert {s.dashed for s in data.prompts.segments if s.shape == "onnx"} == {False}
    assert [bar.kind for bar in data.steps if bar.machine == "an imaginary phone"] == ["estimated"]
    assert "estimated, dashed and hollow" in text and "nothing here is estimated" not in text
    phone = next(card for card in data.cards if card.folder == "builds/phone")
    assert [tile.title for tile in phone.tiles if tile.estimated] == ["decode", "prefill"]
    assert text.count(">estimated</em>") == 2 + 2 + 2  # its tiles, its row of the table, its bar and the key to that
    measured = render_page(several[:2])
    assert "nothing here is estimated" in measured and ">estimated<" not in measured
    assert "hollow" not in measured.split("<body>")[1]


def elsewhere() -> Report:
    estimate = LatencyEstimate("estimated", "phone", "Imaginary Phone 3", "guess", 256, 4.5,
                               EstimateParts(3.0, 0.0, 0.0, 1.5, 0.0),
                               (PrefillEstimate(256, 300.0, 853.3), PrefillEstimate(64, 75.0, 853.3)))
    found = ImportedLatency("imported", "Imaginary Phone 3", "csv", "times.csv", "d" * 64, None, "decode", 1, 5.25,
                            "median", 50, None, None, None, 9.5, None, 4)
    prompt = dataclasses.replace(found, phase="prefill", tokens=64, ms=81.0, first_ms=None)
    return make_report(make_artifact(estimates=(estimate,), imported=(found, prompt)))


def test_times_of_other_machines_stand_beside_and_say_what_they_are() -> None:
    report = elsewhere()
    data = prepare([("d", report)])
    timed = {timing.kind: timing for timing in data.cards[0].timings}
    assert list(timed) == ["measured", "imported", "estimated"]
    assert "a guess" in timed["estimated"].how and "times.csv" in timed["imported"].how
    assert [prompt.tokens.value for prompt in timed["estimated"].prompts] == [64, 256]
    steps = {bar.kind: bar.ms.value for bar in data.steps}
    assert steps == {"measured": 2.5, "imported": 5.25, "estimated": 4.5}
    assert data.prompts is not None
    assert {m.name: m.solid for m in data.prompts.marks if m.name} == {
        "onnx fp32": True, "onnx fp32\nimported": True, "onnx fp32\nestimated": False}
    text = render_page([("d", report)])
    for shown in Page(text).numbers:
        assert json.loads(shown.value) == looked_up(shown.source, report)
    # The artifact's own figures stay what was measured here.
    assert not any(tile.estimated for tile in data.cards[0].tiles)
    assert "imported: measured elsewhere, by another program" in text


def test_size_against_loss_marks_what_compare_marks(several: list[tuple[str, Report]]) -> None:
    data = prepare(several)
    assert data.plot is not None
    best = {mark.name.replace("\n", ", ") for mark in data.plot.marks if mark.solid}
    assert best == {"onnx fp32", "onnx int8, int8", "onnx int4", "coreml int4"}
    assert best == {card.name for card in data.cards if card.unbeaten}
    assert data.unknown_loss == ("other int4",)
    assert data.plot.zero is not None  # fp32 loses nothing, which no logarithm has


def test_one_artifact_alone_has_no_comparison() -> None:
    found = render_page([("dist", make_report())])
    assert "Side by side" not in found and "Size against loss" not in found
    assert "One decode step" in found


HOSTILE = '<script>alert(1)</script>"\'&<img src=x onerror=alert(2)>{{ 7*7 }}</style>'


def poisoned(value: Any) -> Any:
    """JSON with every text, and every name that is free, turned hostile; what has a fixed form stays."""
    if isinstance(value, dict):
        fixed = {"status", "sha256", "tools_sha256", "kind"}
        return {key: item if key in fixed else poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def hostile() -> Report:
    raw = json.loads(json.dumps(dataclasses.asdict(make_report())))
    raw = poisoned(raw)
    artifact = raw["artifacts"][0]
    for file, name in zip(artifact["files"], ("<script>x", "a&b<c"), strict=True):
        file["name"] = name
    artifact["size"]["by_role"] = {HOSTILE: artifact["size"]["total_bytes"] - artifact["size"]["overhead_bytes"]}
    artifact["size"]["tensors"] = [{"name": HOSTILE, "role": HOSTILE, "by_layer": [],
                                    "bytes": artifact["size"]["by_role"][HOSTILE]}]
    artifact["estimates"][0]["basis"] = "guess"
    artifact["imported"][0] |= {"format": "csv", "phase": "decode", "statistic": "mean"}
    artifact["evaluations"][0]["reference"] = None  # as a reason for having none is given
    for part in ("fusion", "versions", "signatures"):
        artifact[part] = {HOSTILE + key: value for key, value in artifact[part].items()}
    return parse_report(json.dumps(raw).encode())


def test_nothing_in_a_report_is_markup() -> None:
    found = Page(render_page([(HOSTILE, hostile())]))
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "link", "base", "form", "a"}
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on") or name == "style"]
    assert "alert" not in found.style and "49" not in "".join(found.loose)
    for shown in found.numbers:
        assert json.loads(shown.value) == looked_up(shown.source, hostile())


def test_characters_that_steer_are_replaced() -> None:
    report = make_report(make_artifact(notes=("a\u202eb\x1b[31mc\ud800d\x00e",)))
    found = render_page([("d\u2066", report)])
    assert "a\ufffdb\ufffd[31mc\ufffdd\ufffde" in found
    found.encode()
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f]", found)


def test_it_loads_nothing_and_runs_nothing(text: str, page: Page) -> None:
    for tag, attrs in page.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image"}
        assert "src" not in attrs and "style" not in attrs and "srcset" not in attrs
        assert attrs.get("href", "#").startswith("#")
    assert not re.search(r"url\(|@import|https?:", page.style)
    targets = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {attrs["href"][1:] for _, attrs in page.tags if "href" in attrs} <= targets


def test_the_policy_lets_in_the_style_and_nothing_else(page: Page) -> None:
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_the_same_reports_make_the_same_page(several: list[tuple[str, Report]], text: str) -> None:
    assert render_page(made_up()) == text
    cards = [card.folder for card in prepare(several[::-1]).cards]
    assert cards == [card.folder for card in prepare(several).cards]


def test_a_report_may_be_nearly_empty() -> None:
    bare = make_artifact({"model.onnx": b""}, parity={}, fusion={}, kept_float=(), notes=(), versions={}, signatures={},
                         runtimes=(), gpu_lint=(), latency=None, memory=None, estimates=(), imported=())
    found = Page(render_page([("d", make_report(bare, options={}))]))
    assert "No time was measured or estimated." in "".join(found.loose)
    assert not [piece for piece in found.loose if re.search(r"\d", piece)]


def test_free_form_values_of_any_type_do_no_harm() -> None:
    parity = {"max_abs": "tiny", "sqnr_db": None, "argmax_equal": True, "steps": [1], "tolerance": {"logits": "x"},
              "weights": "all", "rounded": [], "many": list(range(100)), "deep": {"a": {"b": [{"c": 1.5}]}}}
    report = make_report(make_artifact(parity=parity), options={"context": "long", "rules": [["a", "b"]]})
    for shown in Page(render_page([("d", report)])).numbers:
        assert json.loads(shown.value) == looked_up(shown.source, report)


def test_several_models_are_each_named(several: list[tuple[str, Report]]) -> None:
    other = dataclasses.replace(several[1][1], checkpoint=dataclasses.replace(
        several[1][1].checkpoint, path_name="other.safetensors", sha256="c" * 64))
    data = prepare([several[0], ("other", other)])
    assert [origin.title.split()[0] for origin in data.origins] == ["needle3.safetensors", "other.safetensors"]
    assert len(data.plot.segments) == 0 if data.plot else False


def test_a_folder_that_is_given_twice_is_there_twice(tmp_path: Path) -> None:
    write_artifact(tmp_path)
    report = load_report(tmp_path)
    assert [card.key for card in prepare([("d", report), ("d", report)]).cards] == ["a0", "a1"]


def test_templates_are_in_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "needle_export" / "report"
    files = [path.relative_to(folder).as_posix() for path in (folder / "templates").iterdir()]
    assert sorted(files) == ["templates/page.css", "templates/page.html.j2"]
    assert all(any(fnmatch.fnmatch(name, glob) for glob in data["needle_export.report"]) for name in files)
