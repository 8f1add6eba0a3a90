"""A step in a browser against the same step in ONNX Runtime for Python: artifacts as built, and widened.

    python -m tests.benchmarks.web dist/int4 dist/fp32

Forced tokens, one thread, in headless Chromium; the tokens that would have been chosen are counted as equal or not.
Both run in turns in one go, but in processes of their own: trust the ratios of rows rather than the times.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from needle_export.targets.onnx.session import OnnxRunner
from needle_export.targets.onnx.widen import unpack, widen
from needle_export.web.page import put_static
from tests.browser.conftest import ARGUMENTS
from tests.support.web_runtime import runtime_folder

PAGE = "<!doctype html><meta charset=utf-8><link rel=icon href=data:,><title>benchmark</title>"

#: Reads a prompt, then steps; twice, as a browser compiles while it runs for the first time.
LOOP = """async ({ about, tokens, prompt }) => {
  const memories = [];
  WebAssembly.Memory = class extends WebAssembly.Memory {
    constructor(descriptor) { super(descriptor); memories.push(this); }
  };
  const [ort, { Model }, { argmax }] = await Promise.all(
    ["./runtime/ort.wasm.min.mjs", "./model.js", "./assistant.js"].map((name) => import(name)));
  ort.env.wasm.wasmPaths = new URL("runtime/", location).href;
  ort.env.wasm.numThreads = 1;
  const read = async (name) => new Uint8Array(await (await fetch(`model/${name}`)).arrayBuffer());
  const began = performance.now();
  const model = await Model.open(ort, about, read);
  const load = performance.now() - began;
  let chosen, times, first;
  for (let round = 0; round < 3; round++) {
    model.reset();
    chosen = []; times = [];
    let from = performance.now();
    chosen.push(argmax(await model.feed(tokens.slice(0, prompt))));
    first = performance.now() - from;
    for (const token of tokens.slice(prompt)) {
      from = performance.now();
      chosen.push(argmax(await model.feed([token])));
      times.push(performance.now() - from);
    }
  }
  return { load, first, times, chosen, wasm: memories.reduce((sum, m) => sum + m.buffer.byteLength, 0) };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def in_python(folder: Path, tokens: np.ndarray, prompt: int) -> tuple[list[float], list[int]]:
    """Milliseconds of each step, and the tokens chosen."""
    runner = OnnxRunner(folder)
    for _ in range(3):
        runner.reset()
        chosen, times = [int(runner.feed(tokens[:prompt])[-1].argmax())], []
        for token in tokens[prompt:]:
            began = time.perf_counter()
            chosen.append(int(runner.decode(int(token)).argmax()))
            times.append(1000 * (time.perf_counter() - began))
    return times, chosen


def main() -> None:
    """Print a row for every artifact in both forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, nargs="+")
    parser.add_argument("--prompt", type=int, default=150, help="tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    runtime = runtime_folder()
    if runtime is None:
        parser.error("there is no onnxruntime-web: run make setup, where npm is")
    print(f"{'artifact':40} {'browser':>9} {'python':>9} {'ratio':>6} {'prompt':>8} {'load':>8} {'wasm':>9}  equal")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=list(ARGUMENTS))
        root = Path(scratch)
        put_static(root)
        (root / "index.html").write_text(PAGE, encoding="utf-8")
        shutil.copytree(runtime, root / "runtime")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=scratch))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for dist in options.dist:
            for form in ("as built", "widened"):
                shutil.rmtree(root / "model", ignore_errors=True)
                (root / "model").mkdir()
                contract = widen(dist, root / "model")
                if form == "widened" and not contract.matrices:
                    continue
                names = ("decode", "prefill", "weights") if form == "as built" else ("weights",)
                for name in names:
                    shutil.copyfile(dist / contract.files[name], root / "model" / contract.files[name])
                about = contract.as_dict() if form == "widened" else contract.as_dict() | {"matrices": []}
                if form == "widened":
                    unpack(root / "model", contract.matrices)
                tokens = np.random.default_rng(0).integers(0, contract.vocab, options.prompt + options.steps)
                tab = browser.new_page()
                tab.goto(f"http://127.0.0.1:{server.server_port}/")
                found = tab.evaluate(LOOP, {"about": about, "tokens": tokens.tolist(), "prompt": options.prompt})
                tab.close()
                times, chosen = in_python(root / "model", tokens, options.prompt)
                ours, theirs = statistics.median(found["times"]), statistics.median(times)
                equal = sum(a == b for a, b in zip(found["chosen"], chosen, strict=True))
                print(f"{f'{dist.name}, {form}':40} {ours:6.2f} ms {theirs:6.2f} ms {ours / theirs:6.2f} "
                      f"{found['first']:5.0f} ms {found['load']:5.0f} ms {found['wasm'] / 1e6:6.0f} MB  "
                      f"{equal} of {len(chosen)}, {len(set(chosen))} different", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
