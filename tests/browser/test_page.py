"""The page in a browser: no error, no request, nothing too small, too faint, cut off or on top of something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from needle_export.report.page import render_page
from needle_export.report.schema import Report
from tests.support.pages import looked_up, made_up, reads_as
from tests.support.reports import make_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

    Visit = Callable[..., Tab]

LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
WIDTHS = (360, 390, 720, 1100, 1440)

#: WCAG 2.2, 1.4.3 and 1.4.11: of text, of large text, and of shapes that carry a meaning.
TEXT, LARGE, SHAPE = 4.5, 3.0, 3.0
SMALLEST = 11.0


@pytest.fixture(scope="module")
def reports() -> list[tuple[str, Report]]:
    return made_up()


@pytest.fixture(scope="module")
def place(reports: list[tuple[str, Report]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(reports), encoding="utf-8")
    return path


@pytest.fixture
def visit(chromium: Browser, place: Path) -> Iterator[Visit]:
    """Opens the page in a window of its own, with what it asked for or complained about in ``tab.told``.

    A window has its width, its scheme and its medium before the page is in it, and keeps them: Chromium (156 at least)
    may leave a sheet that a script has changed under the media of before, and for good, if the window changes before
    the next frame. Then ``innerWidth`` and ``matchMedia`` are right and what is drawn isn't.
    """
    contexts = []

    def visit(width: int = 1440, scheme: str = "light", medium: str = "screen", page: Path = place) -> Tab:
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        tab = context.new_page()
        tab.emulate_media(media=medium, color_scheme=scheme)
        told: list[str] = []
        tab.on("console", lambda message: told.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: told.append(f"error: {error}"))
        tab.on("request", lambda asked: told.append(f"request: {asked.url}"))
        tab.goto(page.as_uri())
        tab.told = told
        return tab

    yield visit
    for context in contexts:
        context.close()


def seen(tab: Tab) -> dict[str, Any]:
    """What the page looks like in its window."""
    found: dict[str, Any] = tab.evaluate(LOOK)
    assert tab.viewport_size and found["window"] == tab.viewport_size["width"]
    return found


def luminance(color: list[float]) -> float:
    """Relative luminance of sRGB (WCAG 2.2)."""
    parts = [c / 255 for c in color]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: list[float], b: list[float]) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_of_contrast() -> None:
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast([118, 118, 118], [255, 255, 255]) == pytest.approx(4.54, abs=0.01)


def test_it_opens_without_an_error_and_asks_for_nothing(visit: Visit, place: Path) -> None:
    tab = visit()
    assert tab.told == [f"request: {place.as_uri()}"]
    assert tab.evaluate("getComputedStyle(document.body).fontSize") == "16px"  # the policy let the style in


def test_its_numbers_are_the_reports(visit: Visit, reports: list[tuple[str, Report]]) -> None:
    shown = visit().evaluate(
        "[...document.querySelectorAll('[data-metric]')].map(e => [e.dataset.metric, e.dataset.value,"
        " Number(e.dataset.report), e.matches('.n') ? e.innerText.trim() : ''])")
    assert len(shown) > 500
    for source, value, report, text in shown:
        expected = looked_up(source, reports[report][1])
        assert json.loads(value) == expected
        assert not text or reads_as(text.replace("\n", " "), expected), (source, text)


def illegible(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts that are too small or too faint, with the reason."""
    out = [(t["text"], f"{t['size']} px") for t in found["texts"] if t["size"] < SMALLEST]
    for t in found["texts"]:
        assert t["color"] and t["ground"], t
        large = t["size"] >= 24 or (t["size"] >= 18.66 and t["weight"] >= 700)
        ratio = contrast(t["color"], t["ground"])
        if ratio < (LARGE if large else TEXT):
            out.append((t["text"], f"{ratio:.2f}: {t['color']} on {t['ground']}"))
    return out


def cut_off(found: dict[str, Any]) -> list[str]:
    """Texts that leave what they stand in, or the window."""
    return [
        t["text"] for t in found["texts"] for left, top, right, bottom in t["boxes"]
        if left < t["frame"][0] - 1 or right > t["frame"][2] + 1 or top < t["frame"][1] - 2
        or bottom > t["frame"][3] + 2 or left < -0.5 or right > found["window"] + 0.5
    ]


def covered(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Texts that stand on each other."""
    texts = found["texts"]
    boxes = sorted((box[1], box, index) for index, t in enumerate(texts) for box in t["boxes"])
    out = []
    for at, (_, a, first) in enumerate(boxes):
        for top, b, second in boxes[at + 1 :]:
            if top >= a[3]:
                break
            across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            # Lines of one paragraph overlap by their leading.
            if first != second and across > 1.5 and down > 4:
                out.append((texts[first]["text"], texts[second]["text"]))
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_legible(visit: Visit, width: int) -> None:
    found = seen(visit(width))
    assert len(found["texts"]) > 500
    assert found["width"] <= width
    assert not illegible(found)
    assert not cut_off(found)
    assert not covered(found)
    assert found["marks"] and not [m for m in found["marks"] if contrast(m["color"], m["ground"]) < SHAPE]


@pytest.mark.parametrize("width", [390, 1440])
def test_it_is_legible_in_the_dark(visit: Visit, width: int) -> None:
    tab = visit(width, "dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 19, 23)"
    found = seen(tab)
    assert not illegible(found)
    assert found["marks"] and not [m for m in found["marks"] if contrast(m["color"], m["ground"]) < SHAPE]


def test_a_text_that_is_cut_faint_or_covered_is_noticed(visit: Visit) -> None:
    """The checks can fail."""
    tab = visit(390)
    tab.evaluate("""() => {
        const made = document.createElement('section');
        made.id = 'spoilt';
        made.innerHTML = '<p class="a">faint</p><p class="b">covering</p><p class="c">' + 'wide'.repeat(500) + '</p>';
        document.querySelector('main').prepend(made);
        const sheet = document.styleSheets[0];
        sheet.insertRule('#spoilt .a { color: #999; background: #aaa; font-size: 9px }', sheet.cssRules.length);
        sheet.insertRule('#spoilt .b { margin-top: -24px }', sheet.cssRules.length);
        sheet.insertRule('#spoilt .c { white-space: nowrap; overflow-wrap: normal }', sheet.cssRules.length);
    }""")
    found = seen(tab)
    assert found["width"] > 390
    assert [text for text, _ in illegible(found)] == ["faint", "faint"]
    assert cut_off(found) == ["wide" * 15]
    assert covered(found) == [("faint", "covering")]


def test_everything_unfolds_and_is_legible_then(visit: Visit) -> None:
    tab = visit(360)
    tab.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    found = seen(tab)
    assert len(found["texts"]) > 1000
    assert found["width"] <= 360
    assert not illegible(found)
    assert not cut_off(found)
    assert not covered(found)


def test_on_paper_it_is_light_and_shows_what_is_unfolded(visit: Visit) -> None:
    tab = visit(794, "dark", "print")  # A4 at 96 pixels an inch
    tab.evaluate("document.querySelector('details').open = true")
    paper, ink = tab.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    heights = [e.evaluate("e => e.getBoundingClientRect().height") for e in tab.locator("details").all()[:2]]
    found = seen(tab)
    assert (paper, ink) == ("rgb(255, 255, 255)", "rgb(27, 29, 34)")
    assert heights[0] > 100 > heights[1]
    assert found["width"] <= 794 and not illegible(found) and not covered(found)


@pytest.mark.parametrize("width", [360, 1440])
def test_one_artifact_alone(visit: Visit, width: int, tmp_path: Path) -> None:
    place = tmp_path / "one.html"
    place.write_text(render_page([("dist", make_report())]), encoding="utf-8")
    tab = visit(width, page=place)
    found = seen(tab)
    assert tab.told == [f"request: {place.as_uri()}"]
    assert found["width"] <= width
    assert not illegible(found) and not cut_off(found) and not covered(found)
