"""A site in a browser: the tokens that Python gets, nothing from anywhere else, numbers that are numbers."""

from __future__ import annotations

import functools
import http.server
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from needle_export import demo, pipeline
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.companions import load_tools
from needle_export.config.progress import NullProgress
from needle_export.config.recipe import load_recipe
from needle_export.generate.assistant import Assistant
from needle_export.generate.schemas import Tool
from needle_export.plan import resolve
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.targets.onnx.widen import Matrix, unpack
from needle_export.website import make_site
from tests.browser.test_page import cut_off, illegible, seen
from tests.support.web_runtime import VARIABLE, runtime_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

#: Milliseconds that a step may take on a busy machine.
PATIENCE = 240_000

#: Orders that the model was made for, things that it should leave, and texts that no tokenizer is made for.
REQUESTS = (
    "turn on the kitchen lights", "set a pasta timer for twelve minutes",
    "lock the front door and close the study blinds", "play golden rivers by nina holt in the lounge",
    "what is the weather", "dim the bedroom lights to 35%",
    "Zürich – 25 °C?", "日本語", "  two  spaces ", "set the heating to {\"degrees\":21}",
)


@pytest.fixture(scope="module")
def runtime() -> Path:
    found = runtime_folder()
    if found is None:
        pytest.skip(f"no onnxruntime-web here: sites are untested (make setup fetches it with npm, or set {VARIABLE})")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as the recipe for browsers has it: 4-bit weights, caches of int8."""
    out = tmp_path_factory.mktemp("build") / "dist"
    plan = resolve(load_recipe("web"), None, {"bench": False}, checkpoint="demo:", out=out)
    pipeline.build(plan.options, NullProgress())
    return out


@pytest.fixture(scope="module")
def tools() -> tuple[Tool, ...]:
    return load_tools(demo.files().tools)


@pytest.fixture(scope="module")
def site(dist: Path, root: Path, runtime: Path) -> Path:
    """A site in a folder of a folder that is served, with the tools that the model came with."""
    out = root / "a folder" / "site"
    made = make_site(dist, out, title="Lights & doors", system="",
                     tokenizer=demo.files().tokenizer, runtime=runtime, progress=NullProgress())
    assert made.tools == str(demo.files().tools)
    return out


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.files().tokenizer)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A static server that says nothing, and isolates pages where it is asked to."""

    isolated = False

    def end_headers(self) -> None:
        if self.isolated:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Isolating(Quiet):
    isolated = True


def served(root: Path, handler: type[Quiet]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def origin(root: Path) -> Iterator[str]:
    yield from served(root, Quiet)


@pytest.fixture(scope="module")
def tab(chromium: Browser, site: Path, origin: str) -> Iterator[Tab]:
    """The page, ready, with what it asked for and complained about in ``tab.asked`` and ``tab.told``."""
    context = chromium.new_context(color_scheme="light", viewport={"width": 1100, "height": 900})
    tab = context.new_page()
    tab.told, tab.asked = [], []
    tab.on("console", lambda message: tab.told.append(message.text))
    tab.on("pageerror", lambda error: tab.told.append(str(error)))
    context.on("request", lambda asked: tab.asked.append(asked.url))
    tab.goto(f"{origin}a%20folder/site/")
    settled(tab, "ready")
    yield tab
    context.close()


def settled(tab: Tab, state: str) -> None:
    tab.wait_for_selector(f"body[data-state={state}], body[data-state=failed]", timeout=PATIENCE)
    assert tab.evaluate("document.body.dataset.state") == state, tab.inner_text("#error")


def ask(tab: Tab, request: str, constrained: bool) -> list[int]:
    """Types a request, as a user would; the tokens of its answer."""
    tab.set_checked("#constrained", constrained)
    tab.fill("#request", request)
    tab.press("#request", "Enter")
    settled(tab, "answered")
    tokens: list[int] = json.loads(tab.evaluate("document.body.dataset.tokens"))
    return tokens


@pytest.fixture(scope="module")
def expected(site: Path, tokenizer: Tokenizer, tools: tuple[Tool, ...]) -> dict[bool, list[list[int]]]:
    """Tokens by Python's loop, on the site's own graphs in ONNX Runtime; within the grammar, and free."""
    about = json.loads((site / "site.json").read_text(encoding="utf-8"))["model"]
    unpack(site / "model", [Matrix(**matrix) for matrix in about["matrices"]])
    runner = OnnxRunner(site / "model")
    found = {}
    for constrained in (True, False):
        assistant = Assistant(runner, tokenizer, tools, constrained=constrained)
        found[constrained] = [list(assistant.ask(request.strip()).tokens) for request in REQUESTS]
    return found


@pytest.mark.parametrize("constrained", [True, False], ids=["within the grammar", "free"])
def test_ten_requests_get_the_tokens_that_python_gets(
    tab: Tab, expected: dict[bool, list[list[int]]], constrained: bool
) -> None:
    wanted = expected[constrained]
    assert len({token for tokens in wanted for token in tokens}) > 20  # or equal tokens would prove nothing
    assert [ask(tab, request, constrained) for request in REQUESTS] == wanted


@pytest.mark.parametrize(("text", "calls"), [
    ("<tool_call>[]</tool_call>", []),
    ('<think>x</think>\n<tool_call>[{"name":"a","arguments":{"b":[1]}}]</tool_call><|im_end|>',
     [{"name": "a", "arguments": {"b": [1]}}]),
    ('<tool_call>[{"name":"a"}]</tool_call>', None),
    ("<tool_call>[", None),
    ("[]", None),
])
def test_calls_are_read_from_an_answer(tab: Tab, text: str, calls: list[object] | None) -> None:
    assert tab.evaluate("async (text) => (await import('./assistant.js')).parsed(text)", text) == calls


def test_numbers_are_numbers(tab: Tab) -> None:
    ask(tab, REQUESTS[0], True)
    numbers = {name: float(tab.get_attribute(f"#{name}", "data-value") or "nan")
               for name in ("speed", "first", "tokens", "model", "wasm", "heap")}
    assert all(number > 0 for number in numbers.values()), numbers
    assert numbers["wasm"] > numbers["model"]
    assert "on one thread (the page isn't cross-origin isolated)" in tab.inner_text("#state")


def test_nothing_comes_from_anywhere_else_and_nothing_is_said(tab: Tab, origin: str) -> None:
    assert tab.told == []
    asked = set(tab.asked)
    assert {url for url in asked if not url.startswith(f"{origin}a%20folder/site/")} == set()
    assert f"{origin}a%20folder/site/model/weights.bin" in asked


def test_it_takes_a_keyboard_alone(tab: Tab) -> None:
    tab.focus("#request")
    reached = []
    for _ in range(3):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["ask", "constrained", "SUMMARY"]


@pytest.mark.parametrize("width", [360, 1100])
def test_it_is_legible(chromium: Browser, site: Path, origin: str, width: int) -> None:
    """In a window of its own: one that is resized may keep what it was drawn by."""
    tab = chromium.new_page(color_scheme="light", viewport={"width": width, "height": 900})
    tab.goto(f"{origin}a%20folder/site/")
    settled(tab, "ready")
    ask(tab, REQUESTS[0], True)
    found = seen(tab)
    assert illegible(found) == []
    assert cut_off(found) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_an_isolated_page_has_more_threads_and_the_same_tokens(
    chromium: Browser, site: Path, root: Path, expected: dict[bool, list[list[int]]]
) -> None:
    for origin in served(root, Isolating):
        tab = chromium.new_page()
        tab.goto(f"{origin}a%20folder/site/index.html")
        settled(tab, "ready")
        threads = tab.evaluate("Math.min(4, Math.max(1, navigator.hardwareConcurrency >> 1))")
        assert ("on one thread." if threads == 1 else f"on {threads} threads.") in tab.inner_text("#state")
        assert ask(tab, REQUESTS[0], True) == expected[True][0]
        tab.close()


def test_opened_as_a_file_it_says_how_to_serve_it(chromium: Browser, site: Path) -> None:
    tab = chromium.new_page()
    tab.goto((site / "index.html").as_uri())
    assert "python3 -m http.server" in tab.inner_text("main")
    tab.close()


def test_a_missing_file_is_one_sentence(chromium: Browser, site: Path, origin: str) -> None:
    tab = chromium.new_page()
    tab.route("**/prefill.onnx", lambda route: route.fulfill(status=404))
    tab.goto(f"{origin}a%20folder/site/")
    settled(tab, "failed")
    assert tab.inner_text("#error") == "model/prefill.onnx couldn't be loaded (HTTP 404)."
    tab.close()


def texts() -> list[str]:
    """Text of all kinds: words, markers, spaces, Unicode of every plane."""
    rng = random.Random(0)
    words = [*" ".join(REQUESTS).split(" "), "<tool_call>", "</tool_call>", "<|im_end|>", "\n", "\t", " ", "  ", "▁",
             "\0", "e\u0301", "👩‍👩‍👧", "\ufeff", "</s>", "<0x41>", "ﬁ", "İ", "\u202e", "[]", "{\"", ":"]
    mixed = ["".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(rng.randint(1, 12))) for _ in range(300)]
    planes = ((32, 0x7E), (0x80, 0x7FF), (0x800, 0xD7FF), (0x10000, 0x10FFFF))
    odd = ["".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 20))) for _ in range(200)]
    return ["", " ", *REQUESTS, *mixed, *odd]


@pytest.mark.parametrize(
    "changes",
    [{}, {"add_dummy_prefix": True}, {"remove_extra_whitespaces": True}, {"byte_fallback": False},
     {"add_dummy_prefix": True, "remove_extra_whitespaces": True}],
    ids=["as it is", "a space in front", "extra spaces removed", "no bytes", "both of spaces"])
def test_its_tokenizer_is_pythons(tab: Tab, tokenizer: Tokenizer, changes: dict[str, bool]) -> None:
    tokenizer = Tokenizer(replace(tokenizer.table, **changes))
    given = [*texts(), "  a", "a  ", "  a   b  ", "   ", "\u2581 a \u2581", "a\u2581\u2581b "]
    rng = random.Random(1)
    streams = [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 12))] for _ in range(200)]
    found = tab.evaluate(
        """async ({ table, texts, streams }) => {
          const { Tokenizer } = await import("./tokenizer.js");
          const tokenizer = new Tokenizer(table);
          return { encoded: texts.map((text) => tokenizer.encode(text)),
                   decoded: streams.map((ids) => tokenizer.decode(ids)),
                   bytes: tokenizer.bytes.map((bytes) => [...bytes]) };
        }""",
        {"table": asdict(tokenizer.table), "texts": given, "streams": streams})
    assert found["encoded"] == [tokenizer.encode(text) for text in given]
    assert found["decoded"] == [tokenizer.decode(ids) for ids in streams]
    assert found["bytes"] == [list(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
