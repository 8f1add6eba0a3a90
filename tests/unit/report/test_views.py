"""Text and Markdown: what matters comes first, nothing is hidden, nothing steers the reader's screen."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from needle_export.report.elsewhere import EstimateParts
from needle_export.report.markdown import escape, render_markdown
from needle_export.report.page import render_page
from needle_export.report.render import STYLES, render
from needle_export.report.schema import Fusion, KeptFloat, LeftUnfused, Nodes, Report
from needle_export.report.text import render_text
from tests.support.reports import make_artifact, make_report

VIEWS: list[Callable[[Report], str]] = [render_text, render_markdown]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Text without Markdown's escapes, on one line."""
    return " ".join(text.replace("\\", "").split())


@pytest.mark.parametrize("view", VIEWS)
def test_the_essential_is_in_the_first_lines(view: Callable[[Report], str]) -> None:
    head = plain("\n".join(view(make_report()).splitlines()[:16]))
    for essential in ("needle3.safetensors + home.safetensors, 3 of 20 layers, 405,093 parameters",
                      "2.15 kB (2,148 bytes, 2 files)", "verified on the runtime (onnxruntime 1.32.0)",
                      "64 of 64 next tokens equal", "largest logit error 1.3e-06 (allowed 0.0001)",
                      "2.50 ms a token, 400 tokens/s (measured;",
                      "128.0 MB resident after loading decode and a step, 49.0 MB of it before loading; 221.0 MB after "
                      "loading everything and a prompt of 64 tokens (measured, 1 thread)",
                      "on Imaginary 9000, 2 cores, Linux, 1 thread, by: needle-export bench dist --threads 1",
                      "700 B between steps, for 1,024 tokens", "confidence head"):
        assert essential in head, essential


@pytest.mark.parametrize("view", VIEWS)
def test_everything_else_is_there(view: Callable[[Report], str]) -> None:
    text = plain(view(make_report()))
    for part in ("routing", "537", "25.0 %", "overhead", "total", "100.0 %", "rms_norm", "12", "sdpa_1",
                 "the mask isn't causal", "MatMul", "keys", "42.9 %", "norms are never narrowed",
                 "opset 21 has no fused attention", "onnxruntime 1.32.0", "123.5 MB",
                 "3 by XNNPACK", "GATHER 2", "olderruntime 0.9", "knows no such op",
                 "a lint from public sources, not a result", "the delegate has no such op", "a public list",
                 "sensitivity", "logits 5e-05, state 2e-05",
                 "incomplete: attention 2 of 3", make_report().artifacts[0].files[0].sha256):
        assert part in text, part


@pytest.mark.parametrize("style", STYLES)
def test_random_weights_are_announced_in_every_view(style: str) -> None:
    text = render(make_report(random=True), style)
    assert ("RANDOM WEIGHTS" if style != "json" else '"random": true') in text
    if style != "json":
        assert "RANDOM WEIGHTS" in "\n".join(text.splitlines()[:3])
        assert "RANDOM" not in render(make_report(), style)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("status", "words"), [
    ("verified-by-evaluator", "verified by our evaluator, not on the runtime"),
    ("converted-only", "converted only: nothing has run it"),
])
def test_a_weaker_status_is_said_twice(view: Callable[[Report], str], status: str, words: str) -> None:
    text = plain(view(make_report(make_artifact(status=status))))
    assert text.count(words) == 2
    assert "verified on the runtime" not in text


@pytest.mark.parametrize("view", VIEWS)
def test_estimates_are_never_called_measured(view: Callable[[Report], str]) -> None:
    latency = make_artifact().latency
    assert latency is not None
    estimate = dataclasses.replace(latency, kind="estimated", host="Pixel 8", load_ms=None, first_ms=None,
                                   peak_rss_bytes=None)
    report = make_report(make_artifact(latency=estimate, memory=None, imported=()))
    text = plain(view(report)).replace("not measured", "")
    assert "measured" not in text
    assert "400 tokens/s (estimated;" in text
    assert "decode 9.00 ms after 256 tokens; prompt of 64 at 640 tokens/s; rates partly GUESSED" in text
    assert "on Pixel 8" in text


@pytest.mark.parametrize("view", VIEWS)
def test_without_latency_it_says_so(view: Callable[[Report], str]) -> None:
    assert "not measured" in view(make_report(make_artifact(latency=None)))


@pytest.mark.parametrize("view", VIEWS)
def test_a_report_may_be_nearly_empty(view: Callable[[Report], str]) -> None:
    artifact = make_artifact(parity={}, fusion={}, nodes=Nodes(None, 3, {}), kept_float=(), notes=(), io={},
                             versions={})
    text = plain(view(make_report(artifact, options={})))
    assert "no fused ops in this build" in text
    assert "Comparison" not in text
    assert "Kept" not in text
    assert "prefill, all" not in text


@pytest.mark.parametrize("view", VIEWS)
def test_free_form_values_of_any_type_do_no_harm(view: Callable[[Report], str]) -> None:
    parity = {"max_abs": "tiny", "sqnr_db": None, "argmax_equal": True, "steps": [1],
              "tolerance": {"logits": "x"}, "many": list(range(100))}
    text = plain(view(make_report(make_artifact(parity=parity), options={"context": "long"})))
    assert "sqnr_db" in text
    assert "none" in text
    assert "6, 7, and 92 more" in text


@pytest.mark.parametrize("view", VIEWS)
def test_long_lists_are_cut_and_the_rest_is_summed(view: Callable[[Report], str]) -> None:
    ops = {f"Op{index}": index + 1 for index in range(20)}
    kept = tuple(KeptFloat(f"w{index}", 10 + index, "why") for index in range(20))
    artifact = make_artifact(nodes=Nodes(None, sum(ops.values()), ops), kept_float=kept)
    text = plain(view(make_report(artifact)))
    assert re.search(r"5 other operators[ |]+15\b", text)
    assert re.search(r"5 other weights[ |]+60\b", text)
    share = 100 * 390 / artifact.size.total_bytes
    assert re.search(rf"total[ |]+390[ |]+{share:.2f} % of the files", text)


@pytest.mark.parametrize("view", VIEWS)
def test_places_left_are_grouped_by_reason(view: Callable[[Report], str]) -> None:
    left = tuple(LeftUnfused(layer, f"n{layer}", "too wide") for layer in (0, 1, 2, 5, None))
    text = plain(view(make_report(make_artifact(fusion={"attention": Fusion(5, 0, left)}))))
    assert "0-2, 5, outside the stack" in text
    assert text.count("too wide") == 1


def test_complete_fusion_is_said() -> None:
    text = render_text(make_report(make_artifact(fusion={"a": Fusion(3, 3), "b": Fusion(1, 1)})))
    assert "complete, 4 fused ops of 2 kinds" in text


def test_colours_add_nothing_but_colours() -> None:
    report = make_report(random=True)
    colored, without = render_text(report, color=True), render_text(report)
    assert ANSI.search(colored)
    assert "\x1b" not in without
    assert [line.rstrip() for line in ANSI.sub("", colored).splitlines()] == without.splitlines()
    assert not [line for line in without.splitlines() if line != line.rstrip()]


def test_the_environment_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render_text(make_report()), render_text(make_report(), color=True)
    for name, value in (("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("COLUMNS", "20"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    assert (render_text(make_report()), render_text(make_report(), color=True)) == before


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_lines_keep_to_the_width(width: int) -> None:
    lines = render_text(make_report(random=True), width=width).splitlines()
    assert max(len(line) for line in lines) <= max(width, 40)


def test_control_characters_cannot_steer_a_terminal() -> None:
    nasty = "\x1b]0;owned\x07\x1b[2J\u202e\r[bold]x[/bold] :smile:"
    artifact = make_artifact(notes=(nasty,), versions={nasty: nasty, "onnxruntime": nasty},
                             parity={nasty: nasty})
    text = render_text(make_report(artifact, options={nasty: nasty}))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "[bold]x[/bold] :smile:" in text


def test_markdown_takes_nothing_for_markup() -> None:
    nasty = "a | b\n# c <img src=x> [d](e) `f` *g*"
    text = render_markdown(make_report(make_artifact(notes=(nasty,), versions={"lib": nasty})))
    assert "\n# c" not in text
    assert r"a \| b \# c \<img src=x\> \[d\](e) \`f\` \*g\*" in text
    for line in text.splitlines():
        if line.startswith("| lib"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert escape("\x1b[0m") == r"\[0m"


def test_markdown_tables_are_regular() -> None:
    lines = render_markdown(make_report()).splitlines()
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    for index, line in enumerate(lines):
        if line.startswith("|") and lines[index - 1].startswith("|"):
            assert bars[index] == bars[index - 1], line


@pytest.mark.parametrize("view", VIEWS)
def test_measured_estimated_and_imported_times_stand_apart(view: Callable[[Report], str]) -> None:
    text = plain(view(make_report()))
    for kind, device, took in (("measured", "here", "2.50 ms"), ("estimated", "till", "9.00 ms"),
                               ("imported", "till", "8.00 ms")):
        assert re.search(rf"{kind}[ |]+{device}[ |]+decode[ |]+{took}", text), kind
    assert "(till, roofline) decode 9.00 ms" in text and "read from till.txt, 2026-11-30" in text


def test_a_prediction_for_this_machine_says_how_far_off_it_is() -> None:
    (estimate,) = make_artifact().estimates
    here = dataclasses.replace(estimate, device="host", decode_ms=2.0, parts=EstimateParts(2.0, 0, 0, 0, 0))
    assert "(20% below the 2.50 ms measured)" in plain(render(make_report(make_artifact(estimates=(here,))), "text"))
    without = make_artifact(estimates=(here,), latency=None)
    assert "below" not in plain(render(make_report(without), "text"))


def test_the_plan_behind_a_build_is_told() -> None:
    report = make_report()
    text = render(report, "text", color=False, width=100)
    assert "ios-balanced" in text and "iphone-12" in text and "size, max 35.5 MB" in text
    assert "ios-balanced" in render_page([("dist", report)])
    bare = dataclasses.replace(report, plan=None)
    assert "\nPlan\n" not in render(bare, "text", color=False, width=100)
